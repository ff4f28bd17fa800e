"""What a loader does after each step on a device of torch_xla: submit the step, and watch how often one is compiled."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch_xla
from torch_xla.debug import metrics

from nb_accelerate.base.progress_page import Phase, here
from nb_accelerate.training.pytree import paths_of_tensors, tensors_in

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("nb_accelerate")

# Shapes of batches that steps may be compiled for: those of full batches, a smaller last one, and one to spare.
_MOST_SHAPES = 3

# Steps that may be compiled for batches of known shapes: they begin, continue and close a window of accumulation, with
# and without state of the optimizer.
_MOST_OF_ONE_SHAPE = 8


class StepEnd:
    """Submits the operations of a step, and warns once if steps are compiled again and again."""

    def __init__(self) -> None:
        self._num_compiled = _num_compiled()
        self._began = self._seconds = _seconds_compiling()
        self._page = here()
        self._compiled_before: set[tuple[torch.Size, ...]] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._known: set[tuple[tuple[int, ...], ...]] = set()
        self._num_again = 0
        self._has_warned = False

    def __call__(self, step: int, batch: Any) -> None:
        """Submit a step, with its number in its epoch, from 1."""
        sizes = tuple([tensor.size() for tensor in tensors_in(batch)])
        is_known = sizes in self._compiled_before
        if not is_known:
            self._page.enter(Phase.COMPILING)
        torch_xla.sync()
        compiled = _num_compiled()
        if compiled == self._num_compiled:
            if not is_known:
                self._compiled_before.add(sizes)
            return
        self._compiled_before.discard(sizes)
        seconds = _seconds_compiling()
        self._page.compiled(compiled - self._num_compiled, seconds - self._seconds)
        self._num_compiled, self._seconds = compiled, seconds
        if self._has_warned:
            return
        tensors = tensors_in(batch)
        shapes = {path: tuple(tensor.shape) for path, tensor in zip(paths_of_tensors(batch), tensors, strict=True)}
        known = tuple(shapes.values())
        self._num_again += known in self._known
        self._known.add(known)
        if len(self._known) > _MOST_SHAPES or self._num_again > _MOST_OF_ONE_SHAPE:
            self._warn(step, shapes)
        self._shapes = shapes

    def _warn(self, step: int, shapes: dict[str, tuple[int, ...]]) -> None:
        self._has_warned = True
        changed = [
            f"batch{path} from {self._shapes.get(path)} to {shape}"
            for path, shape in shapes.items()
            if self._shapes.get(path) != shape
        ]
        why = (
            f"since the step that was compiled before, {', '.join(changed)}. Pad all batches to one shape: "
            "padding='max_length' in a tokenizer, drop_last=True for a smaller last batch"
            if changed
            else "batches have the same shapes as before. Look for Python numbers that change, such as loss.item(), or "
            "for branches, inside of the step"
        )
        sentence = (
            f"XLA compiled step {step} again, as it did {len(self._known) + self._num_again - 1} steps of this epoch "
            f"before, in {self._seconds - self._began:.1f} s: {why}. A step that does what an earlier one did is not "
            "compiled."
        )
        self._page.warn(sentence)
        logger.warning("%s", sentence)


def _num_compiled() -> int:
    return int(metrics.counter_value("UncachedCompile") or 0)


def _seconds_compiling() -> float:
    data = metrics.metric_data("CompileTime")
    return 0.0 if data is None else float(data[1]) / 1e9

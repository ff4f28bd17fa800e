"""Note which models optimizers train, for two hints to who expects something else.

::

    begin: a call or a cell --> first step of each optimizer: does each rank train a model of its own? Rank 0 warns
                            --> end: which models of the notebook were trained? The notebook's own are as they were

A launch sends a copy of the models that its function uses, or forks it, and so does a cell. What is trained is the
copy: the notebook's own model is as it was, and nothing else would say so.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.imported import imported
from nb_accelerate.base.seam import asks_for_accelerator
from nb_accelerate.notebook.worker.groups import collectives_of_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

logger = logging.getLogger("nb_accelerate")

_AVERAGING = ("torch_xla", "deepspeed", "horovod")
"""Libraries that average gradients without a process group of torch.distributed that could be seen."""


class TrainedModels:
    """The models that this rank trains. Nothing is noted on other ranks than the first, and while torch is missing."""

    def __init__(self) -> None:
        self._is_watching = False
        self._known: dict[int, weakref.ref[Any]] = {}  # a parameter of each model that was trained ever
        self._trained: dict[int, weakref.ref[Any]] = {}  # all parameters that were trained since `begin`
        self._num_ranks = "1"
        self._is_told = False
        self._collectives: Mapping[str, int] = {}

    def begin(self, num_ranks: int | None = None) -> None:
        """Begin a call or a cell that this many ranks run; all by default."""
        self._trained.clear()
        optimizers = imported("torch.optim.optimizer")
        if optimizers is None or os.environ.get("RANK") != "0":
            return
        self._num_ranks = os.environ.get("WORLD_SIZE", "1") if num_ranks is None else str(num_ranks)
        self._is_told = False
        self._collectives = collectives_of_groups()
        if not self._is_watching:
            self._is_watching = True
            optimizers.register_optimizer_step_pre_hook(self._note_step)

    def among(self, names: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Return those of these values that are models and were trained since `begin`."""
        if not self._trained:
            return {}
        module = imported("torch.nn").Module
        # Not isinstance(), which believes what a value says.
        models = {name: value for name, value in names if issubclass(type(value), module)}
        return {name: model for name, model in models.items() if any(map(self._is_trained, _parameters(model)))}

    def dropped(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: object) -> list[str]:
        """Return the names of models of the notebook that a call has trained, and that are not in what it returned."""
        trained: dict[int, tuple[str, Any]] = {}
        for name, model in self.among(_reached(function, args, kwargs)).items():
            trained.setdefault(id(model), (name, model))  # of several names of one model, the first
        if not trained:
            return []
        leaves = list(_leaves(value))
        if any(issubclass(type(leaf), imported("torch.nn").Module) for leaf in leaves):
            return []
        # By shape: what comes from an accelerator device, or from shards, is a copy.
        shapes = {tuple(leaf.shape) for leaf in leaves if issubclass(type(leaf), imported("torch").Tensor)}  # type: ignore[attr-defined]
        return [name for name, model in trained.values() if not {tuple(p.shape) for p in model.parameters()} <= shapes]

    def _is_trained(self, parameter: Any) -> bool:
        reference = self._trained.get(id(parameter))
        return reference is not None and reference() is parameter

    def _note_step(self, optimizer: Any, *_: object) -> None:
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if first is None or self._is_trained(first):
            return
        self._trained.update((id(p), weakref.ref(p)) for group in optimizer.param_groups for p in group["params"])
        if self._num_ranks == "1":  # nothing is to be told of it; it is new in a cell of several ranks
            return
        known = self._known.get(id(first))
        self._known[id(first)] = weakref.ref(first)
        is_new = known is None or known() is not first
        if self._is_told or not is_new or _is_averaged(self._collectives):
            return
        self._is_told = True
        logger.warning(
            "There is no Accelerator on the ranks, so each of the %s processes trains a model of its own with all of "
            "its rows. To train one model together: accelerator = Accelerator(); model, optimizer, loader = "
            "accelerator.prepare(model, optimizer, loader); and accelerator.backward(loss) in place of "
            "loss.backward()",
            self._num_ranks,
        )


trained_models = TrainedModels()
"""Those of this process: hooks of optimizers cannot be taken away while one is called."""


def _parameters(model: Any) -> Iterable[Any]:
    try:
        return list(model.parameters())
    except Exception:  # a model is users' code
        return ()


def _is_averaged(collectives: Mapping[str, int]) -> bool:
    """Return whether an `Accelerator`, a library or the user's code may average gradients."""
    if any(asks_for_accelerator.fire()) or any(map(imported, _AVERAGING)):
        return True
    return collectives_of_groups() != collectives  # DDP, FSDP and who averages by hand call one before a step


def _reached(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a call can reach of the notebook, with the name it has there or in the call."""
    function = getattr(function, "func", function)  # functools.partial
    variables = getattr(function, "__globals__", {})
    if variables.get("__name__") in ("__main__", "__mp_main__"):  # the second: see `pack_call`
        yield from list(variables.items())
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    yield from zip(names, args, strict=False)
    yield from kwargs.items()


def _leaves(value: object) -> Iterator[object]:
    """Yield what is in nested lists, tuples and dicts."""
    pending, seen = [value], set()
    while pending:
        part: Any = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if issubclass(type(part), dict):
            pending += dict.values(part)
        elif issubclass(type(part), (list, tuple)):
            pending += part
        else:
            yield part

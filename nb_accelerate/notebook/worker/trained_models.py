"""Note what a rank trains, for two hints to who expects something else.

::

    begin: a call or a cell --> first step of each optimizer, or the end if gradients were computed and none took a
                                step: were gradients exchanged? If not, rank 0 warns
                            --> end: what of the notebook was trained? The notebook's own is as it was

A launch sends a copy of the models that its function uses, or forks it, and so does a cell. What is trained is the
copy: the notebook's own model is as it was, and nothing else would say so.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.imported import imported
from nb_accelerate.base.seam import asks_for_prepared
from nb_accelerate.notebook.worker.groups import collectives_of_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

logger = logging.getLogger("nb_accelerate")

# Libraries that average gradients without a process group of torch.distributed that could be seen.
_AVERAGING = ("torch_xla", "deepspeed", "horovod")

_ALONE = (
    "No gradients were exchanged, so each of the %s processes trains a model of its own with all of its rows. To train "
    "one model together: accelerator = Accelerator(); model, optimizer, loader = accelerator.prepare(model, optimizer, "
    "loader); and accelerator.backward(loss) in place of loss.backward(). Or make the weights an nn.Module, and write "
    "%%%%distributed --convert"
)


class TrainedModels:
    """The models and tensors that rank 0 trains. Other ranks note nothing, nor does it while torch is missing."""

    def __init__(self) -> None:
        self._is_watching = False
        self._ever_trained: dict[int, weakref.ref[Any]] = {}  # a parameter of each model that was trained ever
        self._trained: dict[int, weakref.ref[Any]] = {}  # all parameters that were trained since `begin`
        self._num_ranks = "1"
        self._is_told = False
        self._has_gradients = False
        self._is_told_by_hand = False
        self._collectives: Mapping[str, int] = {}

    def begin(self, num_ranks: int | None = None) -> None:
        """Begin a call or a cell that this many ranks run; all by default."""
        self._trained.clear()
        optimizers = imported("torch.optim.optimizer")
        if optimizers is None or os.environ.get("RANK") != "0":
            return
        self._num_ranks = os.environ.get("WORLD_SIZE", "1") if num_ranks is None else str(num_ranks)
        self._is_told = self._has_gradients = False
        self._collectives = collectives_of_groups()
        if not self._is_watching:
            self._is_watching = True
            optimizers.register_optimizer_step_pre_hook(self._note_step)
            self._watch_gradients(imported("torch.autograd"))

    def _watch_gradients(self, autograd: Any) -> None:
        plain = autograd.backward

        @functools.wraps(plain)
        def backward(*args: Any, **kwargs: Any) -> None:
            if not self._has_gradients:
                self._has_gradients = True
                self._collectives = collectives_of_groups()
            plain(*args, **kwargs)

        autograd.backward = backward  # Tensor.backward looks it up there

    def end(self) -> None:
        """End the call or cell. A step that is made by hand, ``w -= rate * w.grad``, is noticed here only."""
        is_silent = self._is_told or self._is_told_by_hand or self._num_ranks == "1" or self._trained
        if self._has_gradients and not is_silent and not _is_averaged(self._collectives):
            self._is_told_by_hand = True
            logger.warning(_ALONE, self._num_ranks)

    def among(self, names: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Return the values that are models or tensors and were trained since `begin`."""
        if not (self._trained or self._has_gradients):
            return {}
        module, tensor = imported("torch.nn").Module, imported("torch").Tensor
        # isinstance() would believe what a value says of its class.
        models = {name: value for name, value in names if issubclass(type(value), (module, tensor))}
        return {name: value for name, value in models.items() if self._has_trained(value)}

    def _has_trained(self, value: Any) -> bool:
        if not hasattr(value, "is_leaf"):
            return any(map(self._is_trained, _parameters(value)))
        by_hand = self._has_gradients and not self._trained
        return self._is_trained(value) or (by_hand and value.is_leaf and value.grad is not None)

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
        # Shapes are compared, because what comes from an accelerator device, or from shards, is a copy.
        shapes = {tuple(leaf.shape) for leaf in leaves if issubclass(type(leaf), imported("torch").Tensor)}  # type: ignore[attr-defined]
        return [name for name, value in trained.values() if not {tuple(p.shape) for p in _parameters(value)} <= shapes]

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
        noted = self._ever_trained.get(id(first))
        self._ever_trained[id(first)] = weakref.ref(first)
        is_new = noted is None or noted() is not first
        if self._is_told or not is_new or _is_averaged(self._collectives):
            return
        self._is_told = True
        logger.warning(_ALONE, self._num_ranks)


trained_models = TrainedModels()  # those of this process: hooks of optimizers cannot be taken away while one is called


def _parameters(value: Any) -> Iterable[Any]:
    if hasattr(value, "is_leaf"):  # a tensor
        return (value,)
    try:
        return list(value.parameters())
    except Exception:  # a model is users' code
        return ()


def _is_averaged(collectives: Mapping[str, int]) -> bool:
    """Return whether an `Accelerator`, a library or the user's code may average gradients."""
    if any(asks_for_prepared.fire()) or any(map(imported, _AVERAGING)):
        return True
    return collectives_of_groups() != collectives  # DDP, FSDP and code that averages by hand call one before a step


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

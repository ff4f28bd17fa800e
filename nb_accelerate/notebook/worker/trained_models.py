"""Look at the models that optimizers train: warn where each rank trains one by itself, and name those of cells.

::

    begin: a call or a cell --> first step of each optimizer: told? --> trained: names of models, for the notebook
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
    from collections.abc import Iterable, Mapping

logger = logging.getLogger("nb_accelerate")

_AVERAGING = ("torch_xla", "deepspeed", "horovod")
"""Libraries that average gradients without a process group of torch.distributed that could be seen."""


class TrainedModels:
    """The models that this rank trains, of which the first one that nothing averages is told.

    Nothing is done where there is one rank, on all ranks but the first, and until torch's optimizers are imported.
    """

    def __init__(self) -> None:
        self._is_watching = False
        self._known: dict[int, weakref.ref[Any]] = {}
        self._trained: dict[int, Any] = {}
        self._num_ranks = "1"
        self._is_told = False
        self._collectives: Mapping[str, int] = {}

    def begin(self, num_ranks: int | None = None) -> None:
        """Begin a call or a cell that this many ranks run; all by default."""
        self._trained.clear()
        all_ranks = os.environ.get("WORLD_SIZE", "1")
        optimizers: Any = imported("torch.optim.optimizer")
        if optimizers is None or all_ranks == "1" or os.environ.get("RANK") != "0":
            return
        self._num_ranks = all_ranks if num_ranks is None else str(num_ranks)
        self._is_told = False
        self._collectives = collectives_of_groups()
        if not self._is_watching:
            self._is_watching = True
            optimizers.register_optimizer_step_pre_hook(self._note_step)

    def among(self, names: Mapping[str, Any]) -> tuple[str, ...]:
        """Return which of these names are those of models that were trained since `begin`."""
        if not self._trained:
            return ()
        module: Any = imported("torch.nn").Module
        models = {name: value for name, value in list(names.items()) if issubclass(type(value), module)}
        return tuple(name for name, model in models.items() if any(id(p) in self._trained for p in _parameters(model)))

    def _note_step(self, optimizer: Any, *_: object) -> None:
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)  # for all of its model
        if first is None or id(first) in self._trained:
            return
        self._trained[id(first)] = first
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

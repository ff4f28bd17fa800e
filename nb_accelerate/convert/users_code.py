"""See users' code while it runs: its line, and for ``--show`` how its loop is written for an `Accelerator`."""

from __future__ import annotations

import linecache
import sys
import traceback
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nb_accelerate.errors.frame_locals import locals_of
from nb_accelerate.errors.traceback_lines import is_users

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

_KINDS = (nn.Module, Optimizer, DataLoader, LRScheduler)
"""In the order in which `prepare` is taught."""


def frames_here() -> Iterator[FrameType]:
    """Yield the frames of users' code that led here, the newest first."""
    stack = traceback.walk_stack(sys._getframe(1))  # noqa: SLF001 - as `warnings` does
    return (frame for frame, _ in stack if is_users(frame.f_code.co_filename))


def line_here() -> int:
    """Return the line of users' code that runs."""
    return next((frame.f_lineno for frame in frames_here()), 0)


class SeenLoop:
    """What is seen of a loop that trains."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._backward: dict[tuple[str, int], str] = {}
        self._named: dict[int, tuple[str, Any]] = {}

    def note(self) -> None:
        """Note the line that calls backward, and what the names there stand for."""
        frame = next(frames_here(), None)
        if frame is None or (where := (frame.f_code.co_filename, frame.f_lineno)) in self._backward:
            return
        self._backward[where] = linecache.getline(*where).strip() or f"in {frame.f_code.co_name}"
        for names in (*map(locals_of, frames_here()), self._variables):
            found = {id(one): (name, one) for name, one in list(names.items()) if isinstance(one, _KINDS)}
            self._named |= found  # names of the cell in the place of those in functions

    def by_hand(self, models: Sequence[nn.Module], loaders: Sequence[DataLoader[Any]]) -> str:
        """Return the lines for an `Accelerator`, of models and loaders that were used; "" if nothing was trained."""
        parameters = {id(parameter) for model in models for parameter in model.parameters()}
        trains = []
        for _, one in self._named.values():
            owner = getattr(one, "optimizer", one)  # of a scheduler
            if isinstance(owner, Optimizer) and id(owner.param_groups[0]["params"][0]) in parameters:
                trains.append(one)
        given = [self._named[id(one)] for one in (*models, *trains, *loaders) if id(one) in self._named]
        names = ", ".join(name for kind in _KINDS for name, one in given if isinstance(one, kind))
        lines = ["accelerator = Accelerator(split_batches=True)  # from nb_accelerate"]
        lines += [f"{names} = accelerator.prepare({names})  # before the loop"]
        lines += [
            f"accelerator.backward(loss)  # line {number}: {text}" for (_, number), text in self._backward.items()
        ]
        lines += ['loss = accelerator.reduce(loss.detach(), "mean")  # before it is printed or added up']
        lines += ["outputs, targets = accelerator.gather_for_metrics((outputs, targets))  # before rows are counted"]
        return "\n".join(lines) if self._backward and names else ""

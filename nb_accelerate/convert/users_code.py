"""See users' code while it runs: its line, and for ``--show`` how its loop is written for an `Accelerator`."""

from __future__ import annotations

import linecache
import re
import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

_LOSS = re.compile(r"(?:\w+\.scale)?\(?([\w.\[\]]+)\)?\.backward\(")
_KINDS = (nn.Module, Optimizer, DataLoader, LRScheduler)
"""In the order in which `prepare` is taught."""


def frames_here() -> Iterator[FrameType]:
    """Yield the frames of the callers, without those of torch and of this package."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - as `warnings` does
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("nb_accelerate", "torch"):
            yield frame
        frame = frame.f_back


def line_here() -> int:
    """Return the line of users' code that runs."""
    return next((frame.f_lineno for frame in frames_here()), 0)


class SeenLoop:
    """What is seen of a loop that trains."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._backward: dict[tuple[str, int], str] = {}
        self._named: dict[str, Any] = {}

    def note(self) -> None:
        """Note the line that calls backward, and what the names there stand for. Called by backward."""
        frame, *callers = frames_here()
        where = frame.f_code.co_filename, frame.f_lineno
        if where not in self._backward:
            self._backward[where] = linecache.getline(*where).strip() or f"in {frame.f_code.co_name}"
            for names in (frame.f_locals, *(one.f_locals for one in callers), self._variables):
                found = {name: one for name, one in list(names.items()) if isinstance(one, _KINDS) and name[0] != "_"}
                self._named = {**found, **{n: one for n, one in self._named.items() if not _is_in(one, found.values())}}

    def by_hand(self, models: Iterable[nn.Module], loaders: Iterable[DataLoader[Any]]) -> str:
        """Return the lines for an `Accelerator`, of models and loaders that were used."""
        parameters = [one for model in models for one in model.parameters()]
        used = [*models, *loaders]
        for one in self._named.values():
            owner = one.optimizer if isinstance(one, LRScheduler) else one
            if isinstance(owner, Optimizer) and _is_in(owner.param_groups[0]["params"][0], parameters):
                used.append(one)
        given = [(name, one) for one in used for name, known in self._named.items() if known is one]
        names = ", ".join(name for kind in _KINDS for name, one in given if isinstance(one, kind))
        lines = ["accelerator = Accelerator(split_batches=True)  # from nb_accelerate"]
        lines += [f"{names} = accelerator.prepare({names})  # before the loop"]
        for (_, number), text in self._backward.items():
            loss = _LOSS.search(text)
            lines += [f"accelerator.backward({loss[1] if loss else 'loss'})  # line {number}: {text}"]
        lines += ['loss = accelerator.reduce(loss.detach(), "mean")  # before it is printed or added up']
        lines += ["outputs, targets = accelerator.gather_for_metrics((outputs, targets))  # before rows are counted"]
        return "\n".join(lines)


def _is_in(wanted: Any, values: Iterable[Any]) -> bool:
    return any(one is wanted for one in values)

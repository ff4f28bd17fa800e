"""The process this code runs in, for functions that are called without an `Accelerator`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.data.tracker import LoaderTracker
from nb_accelerate.optim.accumulation import AccumulationState
from nb_accelerate.process import context
from nb_accelerate.process.setup import setup_process
from nb_accelerate.strategies import select_collectives

if TYPE_CHECKING:
    from nb_accelerate.comm import Collectives
    from nb_accelerate.process.context import ProcessContext


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What an `Accelerator` chose, as far as states show it. Holds no model, so it may outlive the `Accelerator`.

    Attributes:
        mixed_precision: the name of the precision.
        accumulation: where in its window the loop is.
        tracker: which loader is being iterated.
    """

    mixed_precision: str
    accumulation: AccumulationState
    tracker: LoaderTracker

    @classmethod
    def make(cls, mixed_precision: str, plugin: GradientAccumulationPlugin | None = None) -> Choices:
        """Return the choices of a process in which nothing is trained yet."""
        tracker = LoaderTracker()
        accumulation = AccumulationState(plugin or GradientAccumulationPlugin(), tracker)
        return cls(mixed_precision=mixed_precision, accumulation=accumulation, tracker=tracker)


def process_here() -> ProcessContext:
    """Return what this process is; finds out, and connects it with the others, if nobody did so yet."""
    return context.current() or setup_process()


def collectives_here() -> Collectives:
    """Return how this process talks to the others."""
    return select_collectives(process_here())


def newest_choices() -> Choices | None:
    """Return what the newest `Accelerator` of this process chose, or None if there was none. Connects nothing."""
    known = context.current()
    return None if known is None else known.newest.value


def remember(process: ProcessContext, choices: Choices | None) -> None:
    """Make ``choices`` those that states show. An `Accelerator` calls it when it is made."""
    process.newest.value = choices

"""The process this code runs in, for functions that are called without an `Accelerator`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nb_accelerate.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.config.dynamo import resolve_dynamo
from nb_accelerate.config.env import Environment
from nb_accelerate.config.precision import resolve_precision
from nb_accelerate.optim.accumulation import AccumulationState
from nb_accelerate.process import context
from nb_accelerate.process.setup import setup_process
from nb_accelerate.state.shared import shared_training
from nb_accelerate.strategies import select_collectives

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.comm import Collectives
    from nb_accelerate.config.dynamo import TorchDynamoPlugin
    from nb_accelerate.data.tracker import LoaderTracker
    from nb_accelerate.process.context import ProcessContext


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What an `Accelerator` chose, as far as states show it. Holds no model, so it may outlive the `Accelerator`.

    Attributes:
        mixed_precision: the name of the precision.
        dynamo: how models are compiled.
        accumulation: where in its window the loop is.
        tracker: which loader is being iterated.
        said: what the environment said about precision and compilation when they were chosen.
    """

    mixed_precision: str
    dynamo: TorchDynamoPlugin
    accumulation: AccumulationState
    tracker: LoaderTracker
    said: Mapping[str, str] = field(default_factory=lambda: _said(Environment()))

    @classmethod
    def make(cls, mixed_precision: str | None = None, plugin: GradientAccumulationPlugin | None = None) -> Choices:
        """Return the choices of a process in which nothing is trained yet."""
        environment = Environment()
        shared = shared_training()
        return cls(
            mixed_precision=str(resolve_precision(mixed_precision, environment)),
            dynamo=resolve_dynamo(None, None, environment),
            accumulation=AccumulationState(plugin or GradientAccumulationPlugin(), shared.tracker, shared.window),
            tracker=shared.tracker,
        )


def inherited(environment: Environment) -> Choices | None:
    """Return the choices that a further `Accelerator` takes over where it is not told otherwise, or None.

    Not those that were made when the environment said something else: it was changed to have an effect.
    """
    known = newest_choices()
    return known if known is not None and known.said == _said(environment) else None


def _said(environment: Environment) -> dict[str, str]:
    names = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_")
    return {name: value for name, value in environment.variables.items() if name.startswith(names)}


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

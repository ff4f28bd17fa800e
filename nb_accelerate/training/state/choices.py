"""Find the context of this process and the choices of its newest `Accelerator`, for code without an `Accelerator`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.base.config.dynamo import resolve_dynamo
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.precision import resolve_precision
from nb_accelerate.training.comm.data_parallel import between_groups
from nb_accelerate.training.process import context
from nb_accelerate.training.process.setup import setup_process
from nb_accelerate.training.state.shared import shared_training
from nb_accelerate.training.strategies import select_collectives
from nb_accelerate.training.strategies.select import ENGINE_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.config.distributed import DistributedType
    from nb_accelerate.base.config.dynamo import TorchDynamoPlugin
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.data.tracker import LoaderTracker
    from nb_accelerate.training.optim.accumulation import AccumulationState
    from nb_accelerate.training.process.context import ProcessContext
    from nb_accelerate.training.strategies.select import EngineOptions


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of an `Accelerator` that states show. It refers to no model, so it may outlive the `Accelerator`."""

    mixed_precision: str
    dynamo: TorchDynamoPlugin
    accumulation: AccumulationState
    tracker: LoaderTracker
    distributed_type: DistributedType | None = None  # None where no `Accelerator` has chosen one, as `engines`
    engines: EngineOptions | None = None
    variables: Mapping[str, str] = field(default_factory=lambda: _variables(Environment()))

    @classmethod
    def make(cls, mixed_precision: str | None = None, plugin: GradientAccumulationPlugin | None = None) -> Choices:
        """Return choices from the environment and the arguments, where no `Accelerator` was made."""
        environment = Environment()
        shared = shared_training()
        return cls(
            mixed_precision=str(resolve_precision(mixed_precision, environment)),
            dynamo=resolve_dynamo(None, None, environment),
            accumulation=shared.accumulation(plugin or GradientAccumulationPlugin()),
            tracker=shared.tracker,
        )


def inherited(environment: Environment) -> Choices | None:
    """Return the choices that another `Accelerator` inherits for arguments that are not given, or None.

    Nothing is inherited after the environment variables about precision, compilation or engines were changed.
    """
    known = newest_choices()
    return known if known is not None and known.variables == _variables(environment) else None


def _variables(environment: Environment) -> dict[str, str]:
    names = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_", *ENGINE_VARIABLES)
    return {name: value for name, value in environment.variables.items() if name.startswith(names)}


def current_process() -> ProcessContext:
    """Return rank, device and group of this process; the first call in a process sets them up."""
    return context.current() or setup_process()


def current_collectives() -> Collectives:
    """Return the collectives of this process; sets it up like `current_process`."""
    return select_collectives(current_process())


def current_data_collectives() -> Collectives:
    """Return collectives between processes that read rows of their own; those that share rows count as one."""
    collectives, known = current_collectives(), newest_choices()
    layout = None if known is None or known.engines is None else known.engines.parallelism
    if layout is None or collectives.world_size == 1:
        return collectives
    return between_groups(collectives, layout.non_data_parallel_size)


def newest_choices() -> Choices | None:
    """Return the choices of the newest `Accelerator` of this process, or None. Sets nothing up."""
    known = context.current()
    return None if known is None else known.newest.value


def remember(process: ProcessContext, choices: Choices | None) -> None:
    """Make states show ``choices``. `Accelerator` calls it when it is made."""
    process.newest.value = choices

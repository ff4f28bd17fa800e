"""Options of a pool, and of a cell on it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nb_accelerate.base.config.checks import check_choice
from nb_accelerate.base.config.engine import VARIABLES
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.launch import PROGRESS, LaunchOptions, check_start_method
from nb_accelerate.base.start_methods import START_METHODS
from nb_accelerate.errors import ConfigError, PoolError
from nb_accelerate.notebook.launch.machine import facts_here
from nb_accelerate.notebook.launch.plan import make_plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.base.config.engine import EngineOptions
    from nb_accelerate.notebook.launch.plan import LaunchPlan

RANKS_WITHOUT_GPUS = 2  # ranks on a machine without GPUs: enough to see that a program is distributed

STYLES = ("fold", "group", "raw")


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """Options for starting the ranks of a pool.

    Attributes:
        num_processes: number of ranks, on all machines together; None for one for each GPU, or two on a machine without
            GPUs. With an engine it is one on each such machine.
        mixed_precision: default of `Accelerator()` on the ranks.
        devices: ``"cpu"``, or the numbers of GPUs; None for all that are visible.
        start_method: ``"auto"``, ``"forkserver"`` or ``"spawn"``.
        env: environment variables of the ranks, on top of the notebook's.
        engine: who starts a process on each of several machines, as for `notebook_launcher`; so are the four below.
            None is what the notebook, the environment or the configuration file says for all calls.
        placing: the same, decided.

    Raises:
        ConfigError: an option has a value that cannot be.
    """

    num_processes: int | None = None
    mixed_precision: str = "no"
    devices: str | Sequence[int] | None = None
    start_method: str = "auto"
    env: Mapping[str, str] = field(default_factory=dict)
    engine: str | None = None
    hosts: str | Sequence[str] | None = None
    address: str | None = None
    command_template: str | None = None
    remote_python: str | None = None
    placing: EngineOptions = field(init=False)

    def __post_init__(self) -> None:
        placing = Environment().engine_options(**{name: getattr(self, name) for name in VARIABLES})
        object.__setattr__(self, "placing", placing)
        stays = [method.name for method in START_METHODS.values() if method.serves_cells]
        if self.start_method in START_METHODS and self.start_method not in stays:
            raise ConfigError(
                f"start_method={self.start_method!r} is for notebook_launcher only: ranks that stay are sent what each "
                f"cell needs. Write start_method='auto', 'forkserver' or 'spawn'"
            )
        check_start_method(self.start_method, stays)
        self.as_launch()  # checks the rest

    def as_launch(self) -> LaunchOptions:
        """Return the same as options of a launch, without a function: ranks that stay are given none."""
        return LaunchOptions(
            function=lambda: None,
            num_processes=self.num_processes,
            mixed_precision=self.mixed_precision,
            devices=self.devices,
            start_method=self.start_method,
            env=self.env,
            engine=self.placing,
        )

    def plan(self) -> tuple[LaunchOptions, LaunchPlan | None]:
        """Decide how many ranks are started on which devices: return a launch with these ranks, and its plan.

        There is no plan yet if ranks are on other machines, which have to say first what they are.
        """
        ipython = sys.modules.get("IPython")
        if ipython is not None and getattr(ipython.get_ipython(), "is_rank", False):
            raise PoolError("this runs on a rank already: ranks that stay are started in the notebook")
        launch = self.as_launch()
        if not self.placing.is_local:
            return launch, None
        facts = facts_here(self.env)
        plan = make_plan(launch, facts, may_copy=False)
        if self.num_processes is None and plan.kind.is_host:
            launch = replace(launch, num_processes=RANKS_WITHOUT_GPUS)
            plan = make_plan(launch, facts, may_copy=False)
        return launch, plan


@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """Options for running a cell.

    Attributes:
        ranks: the ranks that run it; None for all.
        send: names to send from the notebook first, also if the ranks have bound them themselves.
        large: send more than a GiB, too.
        timeout: seconds until it is interrupted; None for no limit.
        style: ``"fold"`` shows equal lines of ranks once, ``"group"`` at the end what each rank printed, and ``"raw"``
            every line as it comes.
        quiet: show no output.
        progress: ``"auto"``, ``"widget"``, ``"text"`` or ``"off"``: where its panel is drawn.
        wants_values: return the value of the last expression of each rank.
        converts: the cell is written for one process; ranks share the work of its models.

    Raises:
        ConfigError: an option has a value that cannot be.
    """

    ranks: tuple[int, ...] | None = None
    send: tuple[str, ...] = ()
    large: bool = False
    timeout: float | None = None
    style: str = "fold"
    quiet: bool = False
    wants_values: bool = False
    converts: bool = False
    progress: str = "auto"

    def __post_init__(self) -> None:
        check_choice("style", self.style, STYLES)
        check_choice("progress", self.progress, PROGRESS)
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout={self.timeout!r} is not a number of seconds above 0. Leave it out for no limit")
        if self.ranks is not None and not self.ranks:
            raise ConfigError("ranks=() names no rank. Leave it out for all ranks")
        if self.ranks is not None and self.converts:
            raise ConfigError("--convert shares the work of a cell among all ranks. Leave --ranks out")

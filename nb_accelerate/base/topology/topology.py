"""Compute rank, local rank and world size of a process, write them to its environment, and read them from there.

A launcher is a row of `LAUNCHERS`: which variables hold which number. The first row whose rank and world size are both
set wins; a process without any is alone. Our own launcher writes the variables of the first row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nb_accelerate.base.config.env import Environment
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Rank, local rank, world size and machine of one process.

    Raises:
        ConfigError: the numbers contradict each other.
    """

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for number, most, total in (
            ("rank", self.world_size - 1, "world_size"),
            ("local_rank", self.local_world_size - 1, "local_world_size"),
            ("node_rank", self.num_nodes - 1, "num_nodes"),
            ("local_world_size", self.world_size, "world_size"),
        ):
            if not 0 <= getattr(self, number) <= most:
                raise ConfigError(
                    f"{number}={getattr(self, number)} does not fit {total}={getattr(self, total)}. Check the "
                    "variables that the launcher sets: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."
                )

    @classmethod
    def of_machine(cls, local_rank: int, local_world_size: int, *, node_rank: int = 0, num_nodes: int = 1) -> Topology:
        """Number a process by its machine, where all machines have equally many."""
        return cls(
            rank=node_rank * local_world_size + local_rank,
            local_rank=local_rank,
            node_rank=node_rank,
            world_size=num_nodes * local_world_size,
            local_world_size=local_world_size,
            num_nodes=num_nodes,
        )

    def as_variables(self) -> dict[str, str]:
        """Return the environment variables that torchrun sets for such a process; `read_topology` reads them."""
        rank, world_size = str(self.rank), str(self.world_size)
        return {
            "RANK": rank,
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.num_nodes),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": world_size,
            "ROLE_NAME": "default",
        }

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1


class Launcher(NamedTuple):
    """The variables that one launcher sets for a process; of several names, the first that is set counts.

    A process without rank and world size was not started by it.
    """

    rank: str
    world_size: str
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    num_nodes: tuple[str, ...] = ()


def _launcher_of_mpi(name: str) -> Launcher:
    return Launcher(f"{name}_RANK", f"{name}_SIZE", (f"{name}_LOCAL_RANK",), (f"{name}_LOCAL_SIZE",))


_TORCHRUN = Launcher(
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    node_rank=("GROUP_RANK", "NODE_RANK"),
    num_nodes=("GROUP_WORLD_SIZE",),
)
_SLURM = Launcher(
    # SLURM_NTASKS is also set in batch scripts and interactive allocations, where a notebook is one process and
    # not one of many. Only a step started by srun has SLURM_STEP_NUM_TASKS.
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    local_rank=("SLURM_LOCALID",),
    node_rank=("SLURM_NODEID",),
    num_nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
)
_MPICH = Launcher("PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",))

LAUNCHERS = (_TORCHRUN, _launcher_of_mpi("OMPI_COMM_WORLD"), _launcher_of_mpi("MV2_COMM_WORLD"), _SLURM, _MPICH)


def read_topology(variables: Mapping[str, str]) -> Topology:
    """Read the numbers of a process from its environment.

    Launchers that do not say how many processes share a machine are taken to have spread them evenly.
    """
    environment = Environment(variables)
    for launcher in LAUNCHERS:
        rank = environment.whole(launcher.rank)
        world_size = environment.whole(launcher.world_size, at_least=1)
        if rank is not None and world_size is not None:
            return _read(launcher, environment, rank, world_size)
    return Topology()


def _read(launcher: Launcher, environment: Environment, rank: int, world_size: int) -> Topology:
    def first(names: tuple[str, ...], *, at_least: int = 0) -> int | None:
        values = (environment.whole(name, at_least=at_least) for name in names)
        return next((value for value in values if value is not None), None)

    num_nodes = first(launcher.num_nodes, at_least=1)
    local_world_size = first(launcher.local_world_size, at_least=1)
    if local_world_size is None:
        local_world_size = max(1, world_size // (num_nodes or 1))
    if num_nodes is None:
        num_nodes = max(1, world_size // local_world_size)
    local_rank = first(launcher.local_rank)
    node_rank = first(launcher.node_rank)
    return Topology(
        rank=rank,
        local_rank=rank % local_world_size if local_rank is None else local_rank,
        node_rank=min(rank // local_world_size, num_nodes - 1) if node_rank is None else node_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=num_nodes,
    )

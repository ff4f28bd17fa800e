"""How ranks are laid out: which of them hold copies of a model, and which hold shards of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.config.checks import check_options, check_whole
from nb_accelerate.config.options import Options
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from nb_accelerate.config.env import Environment

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_NOT_YET = {
    "tp_size": ("tensor parallelism", "Shard the model instead: dp_shard_size"),
    "cp_size": ("context parallelism", "Shard the model instead, and checkpoint activations: dp_shard_size"),
    "sp_size": ("sequence parallelism", "Shard the model instead, and checkpoint activations: dp_shard_size"),
}


@dataclass
class ParallelismConfig(Options):
    """Lay ranks out as a mesh: ``Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, ...))``.

    Ranks of one shard group hold a model together (FSDP), and every group holds all of it (HSDP). Neighbouring ranks
    are in one shard group, so that on machines of equal size shards need not leave their machine. Names are
    accelerate's.

    Attributes:
        dp_replicate_size: copies of the model. Default: 1.
        dp_shard_size: ranks that hold a copy together. Default: 1.
        tp_size: not supported in this version, as ``cp_size`` and ``sp_size``.
        cp_size: see ``tp_size``.
        cp_backend: see ``tp_size``.
        sp_size: see ``tp_size``.
        sp_backend: see ``tp_size``.
        tp_handler: see ``tp_size``.
        cp_handler: see ``tp_size``.
        sp_handler: see ``tp_size``.

    Raises:
        ConfigError: a size is less than 1, or not supported.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    @override
    def _check(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if size is None:
                continue
            check_whole(name, size, at_least=1)
            if name in _NOT_YET and size > 1:
                what, instead = _NOT_YET[name]
                raise ConfigError(f"{name}={size} asks for {what}, which is not supported in this version. {instead}.")

    @property
    def total_size(self) -> int:
        """The number of ranks that this is a layout of."""
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that get rows of their own."""
        return self.total_size

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that get the same rows: 1."""
        return 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies of the model."""
        return (self.dp_replicate_size or 1) > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether several ranks hold a copy together."""
        return (self.dp_shard_size or 1) > 1

    @property
    def dp_dim_names(self) -> list[str]:
        """The names of the mesh's dimensions that are longer than 1."""
        sizes = {"dp_replicate": self.dp_replicate_enabled, "dp_shard": self.dp_shard_enabled}
        return [name for name, is_on in sizes.items() if is_on]

    @property
    def active_mesh_dims(self) -> list[str]:
        """See `dp_dim_names`."""
        return self.dp_dim_names

    def check_ranks(self, world_size: int) -> None:
        """Refuse another number of ranks than this is a layout of.

        Raises:
            ConfigError: it is another one.
        """
        if self.total_size != world_size:
            sizes = f"dp_replicate_size={self.dp_replicate_size or 1} x dp_shard_size={self.dp_shard_size or 1}"
            raise ConfigError(
                f"ParallelismConfig lays out {self.total_size} ranks ({sizes}), and there are {world_size}. Write "
                f"sizes whose product is {world_size}, or start {self.total_size} ranks."
            )


def resolve_parallelism(config: ParallelismConfig | None, environment: Environment) -> ParallelismConfig | None:
    """Choose how ranks are laid out: the argument, and for what it leaves open ``PARALLELISM_CONFIG_*`` variables.

    Returns:
        None if neither says anything.

    Raises:
        ConfigError: a value is not supported.
    """
    given = check_options("parallelism_config", config, ParallelismConfig)
    if given is None and not environment.flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return None
    given = given or ParallelismConfig()
    found: dict[str, Any] = {
        name: environment.whole(f"PARALLELISM_CONFIG_{name.upper()}", at_least=1) for name in _SIZES
    }
    missing = {name: size for name, size in found.items() if size is not None and getattr(given, name) is None}
    return replace(given, **missing) if missing else given

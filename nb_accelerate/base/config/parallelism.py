"""How ranks are laid out: which of them hold copies of a model, shards of one, or parts of its layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from nb_accelerate.base.config.checks import check_choice, check_flag, check_options, check_whole, shown
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.options import Options, fields_in
from nb_accelerate.base.config.variables import MESH, USE_MESH
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_VARIABLES = {size: MESH[f"parallelism_config_{size}"] for size in _SIZES}
# Dimensions of the mesh, outermost first: neighbouring ranks compute one layer together.
_MESH_ORDER = ("dp_replicate", "dp_shard", "tp")

_NOT_YET = {"cp_size": "context parallelism", "sp_size": "sequence parallelism"}


@dataclass
class TorchTensorParallelConfig(Options):
    """Say which layers tensor parallelism applies to, and how.

    Examples:
        ```python
        plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        parallelism = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
        accelerator = Accelerator(parallelism_config=parallelism)
        ```

    Attributes:
        enable_async_tp: not supported, as in accelerate.
        plan: styles by the names of layers, in which ``*`` stands for any part between two dots. A style is one of
            `torch.distributed.tensor.parallel`, ``ColwiseParallel()`` say, or what plans of transformers call it:
            ``"colwise"``. Default: the plan that the model brings, as those of transformers do (``_tp_plan``).

    Raises:
        ConfigError: a value is not supported.
    """

    enable_async_tp: bool = False
    plan: Mapping[str, ParallelStyle | str] | None = None

    @override
    def _check(self) -> None:
        if check_flag("enable_async_tp", self.enable_async_tp):
            raise ConfigError("enable_async_tp=True (asynchronous tensor parallelism) is not supported. Leave it out.")
        if self.plan is not None and not isinstance(self.plan, Mapping):
            raise ConfigError(
                f"plan={shown(self.plan)} is not a dict of styles by the names of layers. Write "
                'plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, with the names of your layers.'
            )


@dataclass
class TorchTensorParallelPlugin(Options):
    """Ask for tensor parallelism alone: ``Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))``.

    ``ParallelismConfig(tp_size=2)`` asks for the same, and takes a plan.

    Attributes:
        tp_size: number of ranks that compute each layer together. Must be the number of all ranks, unless a
            `ParallelismConfig` or its variables give other sizes too.
        torch_device_mesh: not supported: the `Accelerator` makes it.

    Raises:
        ConfigError: a value is not supported.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | Any = None

    _checks: ClassVar[dict[str, Any]] = {"tp_size": partial(check_whole, at_least=1)}

    @override
    def _check(self) -> None:
        super()._check()
        if self.torch_device_mesh is not None:
            raise ConfigError(
                "torch_device_mesh was given, and the Accelerator makes the mesh itself. Leave it out; "
                "accelerator.torch_device_mesh is the one that is made."
            )


@dataclass
class ParallelismConfig(Options):
    """Lay ranks out as a mesh: ``Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, ...))``.

    Ranks of one tensor-parallel group compute each layer together and read the same rows. Such groups, or single ranks,
    hold shards of one model (FSDP), and shard groups hold copies of it (HSDP). Neighbouring ranks are in one
    tensor-parallel group, then in one shard group, so that on machines of equal size what is exchanged most need not
    leave a machine. Names are accelerate's. Sizes that are not given are those of ``PARALLELISM_CONFIG_*`` variables,
    else 1.

    Attributes:
        dp_replicate_size: copies of the model.
        dp_shard_size: ranks, or tensor-parallel groups, that hold a copy together.
        tp_size: ranks that compute each layer together.
        cp_size: not supported in this version, as ``sp_size``.
        cp_backend: see ``cp_size``.
        sp_size: see ``cp_size``.
        sp_backend: see ``cp_size``.
        tp_handler: which layers are parallelized, and how; by default as the model says.
        cp_handler: see ``cp_size``.
        sp_handler: see ``cp_size``.

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
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: Any = None
    sp_handler: Any = None

    _checks: ClassVar[dict[str, Any]] = {
        **dict.fromkeys(_VARIABLES, partial(check_whole, at_least=1)),
        "cp_backend": partial(check_choice, choices=("torch",)),
        "sp_backend": partial(check_choice, choices=("deepspeed",)),
    }

    @override
    def __post_init__(self) -> None:
        for name, size in fields_in(Environment(), self, _VARIABLES).items():
            self._set(name, size)
        super().__post_init__()

    @override
    def _check(self) -> None:
        super()._check()
        for name, what in _NOT_YET.items():
            if getattr(self, name) not in {None, 1}:
                raise ConfigError(
                    f"{name}={getattr(self, name)} asks for {what}, which is not supported in this version. Shard the "
                    "model instead, and checkpoint activations: dp_shard_size, or parallelize its layers: tp_size."
                )
        check_options("tp_handler", self.tp_handler, TorchTensorParallelConfig)

    @property
    def sizes(self) -> dict[str, int]:
        """The length of each dimension of the mesh by its name, outermost first, those of length 1 included."""
        return {name: getattr(self, f"{name}_size") or 1 for name in _MESH_ORDER}

    @property
    def total_size(self) -> int:
        """The number of ranks that this is a layout of."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """The number of groups of ranks that get rows of their own."""
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that get the same rows."""
        return self.tp_size or 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies of the model."""
        return (self.dp_replicate_size or 1) > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether a copy is sharded."""
        return (self.dp_shard_size or 1) > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether several ranks compute each layer together."""
        return (self.tp_size or 1) > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split for attention: never."""
        return (self.cp_size or 1) > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split by DeepSpeed: never."""
        return (self.sp_size or 1) > 1

    @property
    def dp_dim_names(self) -> list[str]:
        """The names of dimensions, longer than 1, along which ranks get rows of their own."""
        return [name for name in ("dp_replicate", "dp_shard") if self.sizes[name] > 1]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The names of dimensions, longer than 1, along which ranks get the same rows."""
        return ["tp"] if self.tp_enabled else []

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The names of dimensions, longer than 1, along which a copy is sharded."""
        return ["dp_shard"] if self.dp_shard_enabled else []

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The names of dimensions, longer than 1, along which losses differ."""
        return self.dp_dim_names

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The names of dimensions, longer than 1, along which FSDP works, copies included."""
        return self.dp_dim_names

    @property
    def active_mesh_dims(self) -> list[str]:
        """The names of the mesh's dimensions that are longer than 1."""
        return [*self.dp_dim_names, *self.non_dp_dim_names]

    def to_json(self) -> str:
        """Return the sizes and backends as JSON."""
        names = [field.name for field in fields(self) if "handler" not in field.name]
        return json.dumps({name: getattr(self, name) for name in names})

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return a new mesh of this layout, for code that needs one without an `Accelerator`. Collective.

        Args:
            device_type: torch's name for the type of device, ``"cuda"`` say.

        Returns:
            None if no dimension is longer than 1.
        """
        from torch.distributed.device_mesh import init_device_mesh

        if not self.active_mesh_dims:
            return None
        names, shape = self._get_mesh()
        return init_device_mesh(device_type, shape, mesh_dim_names=names)

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Return the names and lengths of the mesh's dimensions. Programs use it: accelerate has it by this name."""
        names = tuple(self.active_mesh_dims)
        return names, tuple(self.sizes[name] for name in names)

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Do what `build_device_mesh` does; an `Accelerator` has its own: ``accelerator.torch_device_mesh``.

        Raises:
            ConfigError: no type of device was given.
        """
        if device_type is None:
            raise ConfigError(
                "get_device_mesh needs the type of device: get_device_mesh('cuda'). The mesh that models are trained "
                "on is accelerator.torch_device_mesh."
            )
        return self.build_device_mesh(device_type)

    def check_ranks(self, world_size: int) -> None:
        """Raise `ConfigError` for another number of ranks than this is a layout of."""
        if self.total_size != world_size:
            sizes = [f"{name}_size={size}" for name, size in self.sizes.items() if size > 1 or name != "tp"]
            raise ConfigError(
                f"ParallelismConfig lays out {self.total_size} ranks ({' x '.join(sizes)}), and there are "
                f"{world_size}. Write sizes whose product is {world_size}, or start {self.total_size} ranks."
            )


def resolve_parallelism(
    config: ParallelismConfig | None, plugin: TorchTensorParallelPlugin | None, environment: Environment
) -> ParallelismConfig | None:
    """Choose how ranks are laid out: the argument, then ``PARALLELISM_CONFIG_*`` variables; None if nothing says."""
    layout = check_options("parallelism_config", config, ParallelismConfig)
    tensor = check_options("torch_tp_plugin", plugin, TorchTensorParallelPlugin)
    if tensor is not None:
        if layout is not None and layout.tp_size not in {None, tensor.tp_size}:
            raise ConfigError(
                f"torch_tp_plugin says tp_size={tensor.tp_size}, and parallelism_config tp_size={layout.tp_size}. "
                "Leave torch_tp_plugin out."
            )
        layout = replace(layout or ParallelismConfig(), tp_size=tensor.tp_size)
    if layout is None and not environment.flag(USE_MESH):
        return None
    layout = layout or ParallelismConfig()
    values = fields_in(environment, layout, _VARIABLES)
    return replace(layout, **values) if values else layout

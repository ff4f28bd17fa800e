"""Train with shards of the model on every rank: FSDP2, torch's ``fully_shard``.

Sharding changes a model in place: its class becomes one of torch's, and every parameter is replaced by a DTensor; see
`training.strategies.dtensors`. Checkpoints are made of shards unless whole states are asked for
(`training.checkpoint.sharded`).
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from packaging.version import parse
from typing_extensions import override

from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.base.config.env import Environment
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.comm.data_parallel import share_random_numbers
from nb_accelerate.training.process.devices import device_kind
from nb_accelerate.training.strategies.averaging import AveragesGradients, GradientAverage
from nb_accelerate.training.strategies.blocks import find_blocks
from nb_accelerate.training.strategies.dtensors import DTensorStrategy, has_groups, use_shards
from nb_accelerate.training.strategies.model_memory import measure
from nb_accelerate.training.strategies.sharding import (
    CheckpointedForward,
    Filler,
    Policies,
    check_weights,
    ignored_parameters,
    is_shard,
    is_sharded,
    kept_precise,
    note_replaced,
)
from nb_accelerate.training.strategies.tensor_parallel import TensorParallelizer
from nb_accelerate.training.strategies.unwrapping import flattened, innermost, parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch.distributed as dist
    from torch import nn

    from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin
    from nb_accelerate.base.progress_page import RankMemory
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.precision import Precision
    from nb_accelerate.training.strategies.dtensors import MeshLayout
    from nb_accelerate.training.strategies.strategy import ModelRequest


class FSDPStrategy(DTensorStrategy):
    """Train with FSDP2, after layers of a plan have been parallelized (see `TensorParallelizer`)."""

    refusals: ClassVar[Mapping[str, str]] = {
        "LocalSGD": "a rank has a part of the model only. Leave LocalSGD out, or fsdp_plugin.",
        "join_uneven_inputs": (
            "every forward and backward needs the shards of all ranks. Write "
            "DataLoaderConfiguration(even_batches=True), the default, instead."
        ),
        "create_graph": (
            "backward keeps no graph for gradients of gradients, and frees the weights that it has gathered. Leave "
            "fsdp_plugin out, and train with DDP."
        ),
    }

    def __init__(
        self,
        device: torch.device,
        collectives: Collectives,
        *,
        options: FullyShardedDataParallelPlugin,
        layout: MeshLayout,
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(device, collectives, DistributedType.FSDP, layout=layout)
        self._options = options
        self._plan = plan
        self._dtype: torch.dtype | None = None
        if options.cpu_ram_efficient_loading:
            Environment.set_rank_0_loading()
        self._no_sync_depth: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._holding: WeakSet[nn.Module] = WeakSet()  # may hold gradients that were not exchanged

    @override
    def model_memory(self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> RankMemory:
        models = list(models)
        # While a block is gathered, its parameters are the whole ones, and the shards are held besides.
        shards = [record.sharded_param for model in map(innermost, models) for record in _fsdp_parameters(model)]
        return measure(models, optimizers, parameters=shards)

    # -- preparation

    @override
    def adapt_precision(self, precision: Precision) -> Precision:
        self._dtype = precision.dtype
        return precision

    @override
    def prepare_model(self, request: ModelRequest) -> nn.Module:
        if request.training:
            return self.wrap(request.model)  # which moves it, a block at a time
        return super().prepare_model(request)

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        inner = innermost(model)
        if is_sharded(inner):
            meshes = (getattr(weight, "device_mesh", None) for weight in inner.parameters())
            mesh = next((mesh for mesh in meshes if mesh is not None), None)
            if mesh is not None and not has_groups(mesh):  # shards of ranks that are gone are lost
                raise ConfigError(
                    f"This {type(inner).__name__} was sharded over a process group that has ended, so its shards "
                    "cannot be gathered. Make the model again and load a checkpoint: model = "
                    "accelerator.prepare(Model()), accelerator.load_state(...)."
                )
            return model
        self._shard(inner)
        share_random_numbers(self.data_collectives)
        return model

    def _shard(self, model: nn.Module) -> None:
        """Shard a model in place, a block at a time, and then the rest. Collective."""
        # Each block gets memory on the device and the weights of rank 0, and is sharded: no model needs to fit there.
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        options, mesh = self._options, self.mesh
        check_weights(model, self.collectives)
        blocks = find_blocks(model, options)
        fill = Filler(self.collectives, self.device)
        with note_replaced(model):
            if self.layout.tp > 1:
                TensorParallelizer(mesh["tp"], self._plan).parallelize(model, fill)
            names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
            arguments: dict[str, Any] = {"mesh": mesh[names], "ignored_params": ignored_parameters(model, options)}
            if isinstance(options.cpu_offload, CPUOffloadPolicy):
                arguments["offload_policy"] = options.cpu_offload
            elif options.cpu_offload:
                arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=device_kind(self.device.type).pins_memory)
            policies = Policies(options, self._dtype)
            reshard = options.reshard_after_forward
            of_blocks = arguments if reshard is None else {**arguments, "reshard_after_forward": reshard}
            for block in (*blocks, model):
                for part in kept_precise(block, policies.converts):
                    fill(part)
                    fully_shard(part, mp_policy=policies.precise, **of_blocks)
                fill(block)
                if block is model:  # what is outside of blocks stays gathered
                    fully_shard(block, mp_policy=policies.of_root, **arguments)
                    continue
                if options.activation_checkpointing:
                    offload = bool(options.activation_checkpointing_offload)
                    block.forward = CheckpointedForward(
                        block.forward, offload=offload, kind=device_kind(self.device.type)
                    )
                fully_shard(block, mp_policy=policies.of_blocks, **of_blocks)
        if options.forward_prefetch:
            order = [part for part in model.modules() if part is not model and is_sharded(part)]
            for block, following in itertools.pairwise(order):
                block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]  # FSDPModule's

    # -- gradients

    @override
    def no_sync(self, models: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any]:
        block = contextlib.ExitStack()
        for model in flattened(models):
            inner = innermost(model)
            for part in [inner] if is_sharded(inner) else inner.modules():  # of nested ones, each counts by itself
                if is_sharded(part):
                    block.enter_context(self._without_sync(part))
        return block

    @contextlib.contextmanager
    def _without_sync(self, model: Any) -> Iterator[None]:
        self._no_sync_depth[model] = self._no_sync_depth.get(model, 0) + 1
        self._holding.add(model)
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._no_sync_depth[model] -= 1
            model.set_requires_gradient_sync(not self._no_sync_depth[model])

    @override
    @contextlib.contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        inner: Any = innermost(model)
        if not is_sharded(inner):
            yield
            return
        inner.set_requires_gradient_sync(True)
        try:
            yield
        finally:
            inner.set_requires_gradient_sync(not self._no_sync_depth.get(inner, 0))

    @override
    def explain_backward(self, error: RuntimeError) -> None:
        if "setStorage" in str(error):  # a second backward reads weights that the first has freed
            self.check_supports("create_graph")

    @override
    def average_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[bool], None] | None:
        def sharded() -> list[AveragesGradients]:
            of_models = [list(model.parameters()) for model in models if is_sharded(innermost(model))]
            return [
                AveragesGradients(filter(is_shard, parameters), itertools.filterfalse(is_shard, parameters))
                for parameters in of_models
            ]

        return GradientAverage(optimizer, self.collectives, sharded, renew=use_shards)

    @override
    def drop_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[], None] | None:
        """Drop the whole gradients of an accumulation window that was left in its middle, by an interrupt say."""
        # torch keeps gradients whole until they are exchanged, and `zero_grad` does not reach them. Those of other
        # optimizers stay: their window may close after this one's.

        def drop() -> None:
            if not self._holding:
                return
            of_optimizer = set(map(id, parameters_of(optimizer)))
            for model in list(self._holding):
                held = [parameter for parameter in _fsdp_parameters(model) if _holds_gradient(parameter)]
                for parameter in held:
                    if id(parameter.sharded_param) in of_optimizer:
                        parameter.unsharded_accumulated_grad = None
                        if _holds_gradient(parameter):
                            parameter._unsharded_param.grad = None  # noqa: SLF001 - torch's
                if not any(map(_holds_gradient, held)):
                    self._holding.discard(model)

        return drop

    # -- state

    @property
    @override
    def saves_shards(self) -> bool:  # type: ignore[override]
        return self._options.saves_shards


def check_averaging(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Refuse gloo of PyTorch before 2.9, whose reduce_scatter adds up gradients where it should average them."""
    if group is None or parse(torch.__version__).release >= (2, 9):
        return
    backend: Any = group._get_backend(device)  # noqa: SLF001 - the one for this device, of maybe several
    if type(backend).__name__ == "ProcessGroupGloo":  # the group of a rehearsal has no name
        raise ConfigError(
            f"FSDP was asked for (fsdp_plugin, parallelism_config or ACCELERATE_USE_FSDP) on CPUs with PyTorch "
            f"{torch.__version__}, which adds up the gradients of ranks there instead of averaging them, so the model "
            "would train wrongly. Install a newer one (pip install 'torch>=2.9'), or leave FSDP out and train with DDP."
        )


def _fsdp_parameters(model: nn.Module) -> list[Any]:
    """Return torch's records of the parameters of a sharded model. There is no public way to them."""
    parts: list[Any] = [part for part in model.modules() if is_sharded(part)]
    groups = [part._get_fsdp_state()._fsdp_param_group for part in parts]  # noqa: SLF001
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def _holds_gradient(parameter: Any) -> bool:
    """Return whether torch's record of a parameter has a whole gradient that was not exchanged."""
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)

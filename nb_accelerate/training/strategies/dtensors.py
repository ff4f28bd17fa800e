"""`DTensorStrategy`: what strategies share whose models hold parts of parameters, as torch's `DTensor`.

Such a strategy replaces parameters of a model in place. Who held them before (an optimizer, a list of the user's) is
told by an attribute on the old ones, whichever was prepared first::

    prepare(model)      old parameter --_sharded_as--> new parameter
    prepare(optimizer)  old parameters in its groups are replaced by the new ones, and its state is sharded likewise

Whole weights and states are collected tensor by tensor into host memory, and have the form that an unsharded model
would save. Either kind of checkpoint, whole or of shards, can be loaded with any strategy, on any number of ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from typing_extensions import override

from nb_accelerate.training.comm.data_parallel import between_groups
from nb_accelerate.training.strategies.ddp import is_alive
from nb_accelerate.training.strategies.sharding import (
    SHARDED_AS,
    gather_whole,
    is_split,
    local_part,
    settled,
    shard_like,
    shard_state,
)
from nb_accelerate.training.strategies.strategy import Strategy
from nb_accelerate.training.strategies.unwrapping import parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from nb_accelerate.base.config.distributed import DistributedType
    from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin
    from nb_accelerate.base.config.parallelism import ParallelismConfig
    from nb_accelerate.base.topology import Topology
    from nb_accelerate.training.comm import Collectives


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """How many ranks each dimension of a mesh has, outermost first. Their product is the number of ranks."""

    dp_replicate: int = 1  # copies of the model
    dp_shard: int = 1  # ranks, or tensor-parallel groups, that hold the shards of one copy
    tp: int = 1  # ranks that compute each layer together

    def make(self, device_type: str) -> DeviceMesh:
        """Return a mesh of the dimensions longer than 1, innermost neighbours beside each other. Collective."""
        # With `dp_replicate` it has `dp_shard` in any case: torch's `fully_shard` takes no mesh of replicas alone.
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        kept = {name: size for name, size in sizes.items() if size > 1}
        if self.dp_replicate > 1 or not kept:
            kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
        if len(kept) == 1:
            assert dist.group.WORLD is not None  # there are several ranks
            return DeviceMesh.from_group(dist.group.WORLD, device_type, mesh_dim_names=tuple(kept))
        return init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def layout_for_fsdp(options: FullyShardedDataParallelPlugin, topology: Topology) -> MeshLayout:
    """Return how ranks are laid out for FSDP if nobody has said."""
    is_hybrid = (options.sharding_strategy or "").startswith("HYBRID")
    replicas = topology.world_size // topology.local_world_size if is_hybrid else 1  # one on each machine
    return MeshLayout(dp_replicate=replicas, dp_shard=topology.world_size // replicas)


def layout_of(parallelism: ParallelismConfig, topology: Topology) -> MeshLayout:
    """Return the layout that was asked for, if it is one of all ranks."""
    parallelism.check_ranks(topology.world_size)
    return MeshLayout(**parallelism.sizes)


def has_groups(mesh: DeviceMesh) -> bool:
    """Return whether the process groups of a mesh can still be used."""
    try:
        return is_alive(mesh.get_group(0))
    except (KeyError, ValueError, RuntimeError):  # torch has forgotten the group
        return False


class DTensorStrategy(Strategy):
    """Train models whose parameters are distributed: each rank holds a part."""

    is_replicated: ClassVar[bool] = False

    def __init__(
        self, device: torch.device, collectives: Collectives, distributed_type: DistributedType, *, layout: MeshLayout
    ) -> None:
        super().__init__(device, collectives, distributed_type)
        self.layout = layout
        self.data_collectives = between_groups(collectives, layout.tp)
        self._mesh = layout.make(device.type)

    @property
    @override
    def mesh(self) -> DeviceMesh:
        if not has_groups(self._mesh):
            self._mesh = self.layout.make(self.device.type)
        return self._mesh

    # -- preparation

    @override
    def adopt_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        use_shards(optimizer)

    @abstractmethod
    @override
    def wrap(self, model: nn.Module) -> nn.Module: ...

    # -- gradients

    @override
    def current_parameters(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        return [getattr(parameter, SHARDED_AS, parameter) for parameter in parameters]

    @override
    def grad_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        from torch.distributed.tensor import DTensor

        # torch's own norm of DTensors fails on ranks whose shard is empty (norm_type=inf), for DTensors beside plain
        # tensors, and for those of several meshes. So each kind of sharding is summed up by itself.
        by_sharding: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            gradient: Any = parameter.grad
            if gradient is not None:
                parameter.grad = gradient = settled(gradient)
                sharding = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
                by_sharding.setdefault(sharding, []).append(local_part(gradient))
        is_max = norm_type == float("inf")
        op = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
        norms = []
        for sharding, gradients in by_sharding.items():
            norm = nn.utils.get_total_norm([part for part in gradients if part.numel()], norm_type).to(self.device)
            if sharding is not None:
                mesh, placements = sharding
                part = norm if is_max else norm**norm_type
                for dimension, placement in enumerate(placements):
                    if is_split(placement):
                        dist.all_reduce(part, op, group=mesh.get_group(dimension))
                norm = part if is_max else part ** (1 / norm_type)
            norms.append(norm)
        return nn.utils.get_total_norm(norms, norm_type)

    @override
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        norm = self.grad_norm(parameters, norm_type)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_ computes it
        for parameter in parameters:
            if parameter.grad is not None:
                local = local_part(parameter.grad)
                local.mul_(factor.to(local.device))
        return norm

    @override
    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = settled(parameter.grad)
                local_part(parameter.grad).clamp_(-clip_value, clip_value)

    # -- state

    @override
    def model_state(self, model: nn.Module, *, keep: bool = True) -> dict[str, Any]:
        gathered: dict[int, Any] = {}  # tied weights stay one tensor
        state = model.state_dict(keep_vars=True)
        for value in state.values():
            if id(value) not in gathered:
                gathered[id(value)] = gather_whole(value, keep=keep)
        return {name: gathered[id(value)] for name, value in state.items()} if keep else {}

    @override
    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], **kwargs: Any) -> None:
        now = model.state_dict()
        model.load_state_dict({name: shard_like(value, now.get(name)) for name, value in state.items()}, **kwargs)

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> dict[str, Any]:
        whole: dict[str, Any] = tree_map(lambda value: gather_whole(value, keep=keep), optimizer.state_dict())
        return whole if keep else {}

    @override
    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        parameters = parameters_of(optimizer)
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        sharded = dict(state["state"])
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in sharded:
                sharded[number] = shard_state(sharded[number], parameter)
        optimizer.load_state_dict({**state, "state": sharded})


def use_shards(optimizer: torch.optim.Optimizer) -> None:
    """Replace, in the groups and in the state of an optimizer, parameters that were sharded since it was made."""
    # A group with parameters on several meshes, or on one and on none, is stepped one by one: torch's loops over many
    # parameters at once (`foreach`, `fused`) take no such mix.
    for group in optimizer.param_groups:
        # In place: schedulers, and users who set rates, hold these dictionaries and lists.
        for number, old in enumerate(group["params"]):
            new = getattr(old, SHARDED_AS, None)
            if new is not None:
                group["params"][number] = new
                if old in optimizer.state:
                    optimizer.state[new] = shard_state(optimizer.state.pop(old), new)
        meshes = {getattr(parameter, "device_mesh", None) for parameter in group["params"]}
        if len(meshes) > 1 and "foreach" in group:
            group["foreach"] = False
            if group.get("fused"):
                group["fused"] = False

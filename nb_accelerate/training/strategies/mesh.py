"""Lay the ranks of a run out as a `DeviceMesh`, over which models are replicated, sharded and computed in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from nb_accelerate.training.strategies.ddp import is_alive

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin
    from nb_accelerate.base.config.parallelism import ParallelismConfig
    from nb_accelerate.base.topology import Topology


@dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """How many ranks each dimension of a mesh has, outermost first. Their product is the number of ranks."""

    dp_replicate: int = 1  # copies of the model
    dp_shard: int = 1  # ranks, or tensor-parallel groups, that hold the shards of one copy
    tp: int = 1  # ranks that compute each layer together

    def make(self, device_type: str) -> DeviceMesh:
        """Return a mesh of the dimensions that are longer than 1, innermost neighbours beside each other. Collective.

        With ``dp_replicate`` it has ``dp_shard`` in any case: torch's ``fully_shard`` takes no mesh of replicas alone.
        """
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

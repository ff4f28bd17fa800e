"""Lay the ranks of a run out as a `DeviceMesh`, over which models are sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from nb_accelerate.config.fsdp import FullyShardedDataParallelPlugin
    from nb_accelerate.config.parallelism import ParallelismConfig
    from nb_accelerate.topology import Topology


def num_copies(
    options: FullyShardedDataParallelPlugin, parallelism: ParallelismConfig | None, topology: Topology
) -> int:
    """Return how many copies of a model the ranks of a run hold together.

    Raises:
        ConfigError: the layout is one of another number of ranks.
    """
    if parallelism is not None:
        parallelism.check_ranks(topology.world_size)
        return parallelism.dp_replicate_size or 1
    if (options.sharding_strategy or "").startswith("HYBRID"):
        return topology.world_size // topology.local_world_size  # one on each machine
    return 1


def make_mesh(device_type: str, copies: int) -> DeviceMesh:
    """Lay all ranks out, those of one copy beside each other. Collective if there are several copies.

    Args:
        device_type: torch's name for the type of device.
        copies: of a model.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if copies == 1:
        assert dist.group.WORLD is not None  # there are several ranks
        return DeviceMesh.from_group(dist.group.WORLD, device_type, mesh_dim_names=("dp_shard",))
    shape = (copies, dist.get_world_size() // copies)
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def axes(mesh: DeviceMesh) -> str:
    """Return the axes of a mesh in words: ``dp_replicate 2 x dp_shard 4``."""
    names = mesh.mesh_dim_names or [f"axis {number}" for number in range(mesh.ndim)]
    return " x ".join(f"{name} {size}" for name, size in zip(names, mesh.shape, strict=True))

"""Start the runtime of XLA in this process, and number the process as the runtime does."""

from __future__ import annotations

import atexit
import os
from dataclasses import replace

import torch

from nb_accelerate.devices.xla import is_started
from nb_accelerate.errors import ConfigError
from nb_accelerate.topology import Topology

_LEFT_BY_IMAGES = {"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"}
"""Variables that Kaggle's image sets for one process that has all chips. Ranks would not find one another with them."""


def start_runtime(told: Topology) -> Topology:
    """Start the runtime in this process as ``xmp.spawn`` does in each of its own; see `DeviceKind.start_runtime`.

    ``xmp.spawn`` itself would run the user's function in a thread, where no interrupt reaches it.

    Args:
        told: what the environment says about this process.

    Raises:
        ConfigError: the runtime knows another number of ranks than the launcher has started, or this process has
            several devices that take part in one run.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla import runtime
    from torch_xla._internal import pjrt

    if not is_started():
        # It was registered where torch_xla was imported, maybe in the notebook, whose handlers a forked rank drops.
        atexit.unregister(torch_xla._prepare_to_exit)  # noqa: SLF001 - there is no other name
        atexit.register(torch_xla._prepare_to_exit)  # noqa: SLF001
        if told.local_world_size > 1:
            for name, value in _LEFT_BY_IMAGES.items():
                if os.environ.get(name) == value:
                    del os.environ[name]
            pjrt.initialize_multiprocess(told.local_rank, told.local_world_size)
        else:
            pjrt.initialize_singleprocess()
        xm.set_rng_state(torch.initial_seed() % 2**63)  # as the generators of other devices follow torch.manual_seed
    # The engine of a process that was forked after a backward has no place for devices that came later.
    torch.autograd.set_multithreading_enabled(False)
    rank, world_size = runtime.global_ordinal(), runtime.world_size()
    if world_size > 1 and runtime.addressable_device_count() > 1:
        raise ConfigError(
            f"This process has {runtime.addressable_device_count()} of {world_size} XLA devices, each of which would "
            "be a rank in a thread of its own (TPU v2 and v3, or CPU_NUM_DEVICES). Ranks are processes here: use a "
            "TPU with one device for each chip (v4 and newer), and leave CPU_NUM_DEVICES out."
        )
    if told.world_size not in (1, world_size):
        raise ConfigError(
            f"This process was started as one of {told.world_size} (WORLD_SIZE), but the XLA runtime on "
            f"{runtime.device_type()} knows {world_size}, so each would train by itself. Start as many processes as "
            "there are chips, with notebook_launcher(train) say; PJRT's CPU device is always alone."
        )
    if told.world_size == world_size:
        return replace(told, rank=rank, node_rank=rank // told.local_world_size)
    local = runtime.local_process_count()
    return Topology(
        rank=rank,
        local_rank=rank % local,
        node_rank=rank // local,
        world_size=world_size,
        local_world_size=local,
        num_nodes=max(1, world_size // local),
    )

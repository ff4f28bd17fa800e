"""Start the runtime of XLA in this process, and number its ranks as the runtime does.

``xmp.spawn`` is torch_xla's way to start ranks. A launch from a notebook keeps its own processes, which it can
interrupt, read and end, and does in each what ``xmp.spawn`` does:

============================  ======================================================================================
one rank                      ``xmp.spawn(nprocs=1)`` itself, which sets up the process that calls it
a process for each chip       ``initialize_multiprocess``, which ``xmp.spawn`` calls in each of its processes, and what
                              it stores for Dynamo; there is no public name for it
one rank with all chips       nothing: ``torch_xla.runtime.use_spmd()`` was called, and XLA cuts programs by itself
a thread for each device of   ``xmp.spawn`` itself, called by the user: a thread cannot be interrupted nor ended, so
a process (TPU v2 and v3)     a launch does not start any. `Accelerator` in such a thread is a rank
============================  ======================================================================================
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import threading
from dataclasses import replace

import torch

from nb_accelerate.base.devices.xla import is_started
from nb_accelerate.base.topology import Topology
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process import context

# Variables that Kaggle's image sets for one process that has all chips. Ranks would not find one another with them.
_LEFT_BY_IMAGES = {"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"}


def start_runtime(told: Topology) -> Topology:
    """Start the runtime in this process, unless it was started, and return the numbers of this rank.

    See `DeviceKind.start_runtime`.
    """
    import torch_xla.core.xla_model as xm
    from torch_xla import runtime

    if not is_started():
        try:
            _initialize(told)
        except (RuntimeError, OSError) as error:
            raise ConfigError(_why_not_started(error)) from error
        xm.set_rng_state(torch.initial_seed() % 2**63)  # as the generators of other devices follow torch.manual_seed
    # The engine of a process that was forked after a backward has no place for devices that came later.
    torch.autograd.set_multithreading_enabled(False)
    rank, world_size = runtime.global_ordinal(), runtime.world_size()
    of_process = runtime.addressable_device_count()
    if world_size > 1 and of_process > 1:
        if threading.current_thread() is threading.main_thread():
            raise ConfigError(
                f"This process has {of_process} of {world_size} XLA devices, each of which would be a rank in a thread "
                "of its own (TPU v2 and v3, or CPU_NUM_DEVICES). Ranks are processes here, which threads are not. "
                "Leave CPU_NUM_DEVICES out; on TPU v2 and v3 start the threads by torch_xla: "
                "torch_xla.launch(train, start_method='fork')."
            )
        # A thread of `xmp.spawn`: what this package knows about a process is its own from here on.
        context.become_rank()
    elif told.world_size not in (1, world_size):
        raise ConfigError(
            f"This process was started as one of {told.world_size} (WORLD_SIZE), but the XLA runtime on "
            f"{runtime.device_type()} knows {world_size}, so each would train by itself. Start as many processes as "
            "there are chips, with notebook_launcher(train) say; PJRT's CPU device is always alone."
        )
    if told.world_size == world_size:
        return replace(told, rank=rank, node_rank=rank // told.local_world_size)
    local = min(world_size, runtime.local_process_count() * of_process)
    return Topology(
        rank=rank,
        local_rank=rank % local,
        node_rank=rank // local,
        world_size=world_size,
        local_world_size=local,
        num_nodes=max(1, world_size // local),
    )


def current_device() -> int:
    """Return the number that this process gives to the device of this rank."""
    import torch_xla

    return int(torch_xla.device().index)


def _initialize(told: Topology) -> None:
    import torch_xla
    from torch_xla import runtime
    from torch_xla._internal import pjrt
    from torch_xla.distributed import xla_multiprocessing as xmp

    # It was registered where torch_xla was imported, maybe in the notebook, whose handlers a forked rank drops.
    atexit.unregister(torch_xla._prepare_to_exit)  # noqa: SLF001 - there is no other name
    atexit.register(torch_xla._prepare_to_exit)  # noqa: SLF001
    if runtime.is_spmd():
        if told.world_size > 1:
            raise ConfigError(
                f"torch_xla.runtime.use_spmd() was called in one of {told.world_size} processes, but with it one "
                "process has all devices. Write num_processes=1, or leave use_spmd() out."
            )
        return
    if told.local_world_size == 1:
        xmp.spawn(lambda _rank: None, nprocs=1)
        return
    for name, value in _LEFT_BY_IMAGES.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    pjrt.initialize_multiprocess(told.local_rank, told.local_world_size)
    runtime._init_world_size_ordinal()  # noqa: SLF001 - Dynamo would break graphs where it is asked for


def _why_not_started(error: Exception) -> str:
    """Return what torch_xla said, which library it has used, and what to do about it."""
    import torch_xla

    version = torch_xla.__version__.split("+")[0]
    install = f"pip install 'torch_xla[tpu]=={version}'"
    path = os.environ.get("TPU_LIBRARY_PATH")
    library = f"the libtpu of TPU_LIBRARY_PATH={path}" if path else "the libtpu that is installed beside it"
    if path:
        advice = (
            "An image may have left that variable for another framework, and its libtpu may be too old. Remove the "
            "variable before torch_xla is imported: del os.environ['TPU_LIBRARY_PATH']"
        )
    elif importlib.util.find_spec("libtpu") is None:
        advice = f"There is none. Install the one that fits: {install}"
    else:
        advice = (
            "If another process holds the TPU (a second notebook, or this one's kernel), end it: only one can. If not, "
            f"install the libtpu that fits: {install}"
        )
    message = str(error).strip().partition("\n")[0]
    return f"The XLA runtime could not be started ({message}). This is torch_xla {version} with {library}. {advice}."

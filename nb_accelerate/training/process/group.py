"""Make the default process group, and destroy it."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nb_accelerate.base.devices import DEVICE_KINDS, GLOO, backend_named
from nb_accelerate.base.topology.master_address import master_address
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process import context

if TYPE_CHECKING:
    from nb_accelerate.base.config.env import Environment
    from nb_accelerate.base.config.kwargs import InitProcessGroupKwargs
    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.base.topology import Topology

logger = logging.getLogger(__name__)

_GLOO_RELEASE = 0.001  # seconds in which a thread of gloo's drops its last reference to a Python object


def create(
    topology: Topology,
    kind: DeviceKind,
    device: torch.device,
    *,
    options: InitProcessGroupKwargs,
    environment: Environment,
) -> None:
    """Make the default process group. Blocks until all ranks are there.

    The group ends with `close`, at the latest when the interpreter ends: a rank that leaves without destroying
    its gloo groups sometimes aborts on the way out.
    """
    backend = options.backend or (kind.backend.name if kind.backend else None)
    if backend is None:
        raise ConfigError(
            f"{kind.name} devices cannot exchange tensors between ranks. Write Accelerator(cpu=True), or start "
            "one rank."
        )
    address = None if environment.has_rendezvous else master_address(environment.variables, topology)
    if options.init_method is None and not environment.has_rendezvous and address is None:
        raise ConfigError(
            f"This is rank {topology.rank} of {topology.world_size}, but MASTER_ADDR and MASTER_PORT do not say where "
            "the ranks meet. Export both (the host of rank 0 and a free port there), or start the ranks with "
            "notebook_launcher, nb-accelerate launch or torchrun, which set them."
        )
    binds_device = backend_named(backend).binds_device
    uuid = kind.uuid(device.index) if binds_device and device.index is not None else None
    url = "env://" if address is None else f"tcp://{address[0]}:{address[1]}"
    if options.init_method is not None or not (environment.has_agent_store or uuid):
        meeting: dict[str, Any] = {"init_method": options.init_method or url}
    else:
        meeting = {"store": _store(url, topology, options, is_of_agent=environment.has_agent_store)}
        if uuid:
            claim(meeting["store"], topology.rank, kind, device, uuid)
    dist.init_process_group(
        backend=backend,
        **meeting,
        timeout=options.timeout,
        rank=topology.rank,
        world_size=topology.world_size,
        # Binding the device at once lets nccl fail early, and keeps barriers from guessing a device.
        device_id=device if binds_device else None,
    )
    atexit.register(close)


def create_alone(kind: DeviceKind, device: torch.device) -> None:
    """Make the default process group of a single process. It listens on no port, and ends with `close`."""
    from torch._C._distributed_c10d import HashStore  # missing where torch was built without torch.distributed

    backend = kind.backend or GLOO
    bound = None
    if backend.binds_device:  # torch refuses a device without a number
        bound = torch.device(kind.name, kind.current_device() if device.index is None else device.index)
    dist.init_process_group(backend=backend.name, store=HashStore(), rank=0, world_size=1, device_id=bound)
    atexit.register(close)


def _store(url: str, topology: Topology, options: InitProcessGroupKwargs, *, is_of_agent: bool) -> Any:
    """Return the store at which ranks meet. The store of torchrun's agent outlives a group: each group gets a part."""
    # In one part for all, torch would look for the second group's addresses under the names that the first has left.
    from torch._C._distributed_c10d import PrefixStore  # not where torch was built without it

    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    timeout = options.timeout or rendezvous.default_pg_timeout
    store, _, _ = next(rendezvous.rendezvous(url, topology.rank, topology.world_size, timeout=timeout))
    if not is_of_agent:
        return store
    # Counted in the store, so that all ranks of a new store begin again at 1.
    number = store.add(f"nb_accelerate/groups of rank {topology.rank}", 1)
    return PrefixStore(f"nb_accelerate/group {number}", store)


def claim(store: Any, rank: int, kind: DeviceKind, device: torch.device, uuid: str) -> None:
    """Claim a device for this rank. Where two ranks use one, the error of the backend may not say so."""
    owner = int(store.compare_set(f"device {uuid}", "", str(rank)))
    if owner != rank:
        raise ConfigError(
            f"Rank {rank} and rank {owner} use the same {kind.label} ({device}, {uuid}), and each needs one "
            f"of its own. Start as many ranks as there are {kind.label}s, let every rank see all of them or another "
            f"one ({kind.visibility}), or train on the CPU with Accelerator(cpu=True)."
        )


def abort() -> None:
    """Abort the collectives of this process' groups, where their backend can. The groups are of no use afterwards."""
    # Destroying a group waits for its collectives, and one of nccl that another rank never joins does not end. Backends
    # that cannot abort have no collective that outlives the call.
    if context.default_group() is None:
        return
    used = str(dist.get_backend()).split(",")  # "nccl", or for each type of device one: "cpu:gloo,cuda:nccl"
    backends = [backend_named(name.rpartition(":")[2]) for name in used]
    kind = next((kind for kind in DEVICE_KINDS if kind.backend in backends and kind.backend.can_abort), None)
    if kind is None:
        return
    module: Any = dist.distributed_c10d
    names = module._world.pg_names  # noqa: SLF001 - there is no public list of groups
    # All in one, newest first, as torch's own _abort_process_group does, or one abort would wait for another. That one
    # also forgets the groups, and nobody could tell any more which models belong to them.
    whole: Any = dist.group.WORLD
    backend = whole._get_backend(torch.device(kind.name))  # noqa: SLF001 - as `_abort_process_group` does
    backend._group_start()  # noqa: SLF001 - as `_abort_process_group` does
    try:
        for group in sorted(names, key=names.get, reverse=True):
            with contextlib.suppress(RuntimeError):  # it is being torn down already
                group.abort()
    finally:
        backend._group_end()  # noqa: SLF001 - as `_abort_process_group` does


def close() -> None:
    """Destroy every process group of this process, and forget its context.

    Called by a rank when it ends. Never raises, and does nothing where there is no group.
    """
    atexit.unregister(close)
    context.leave()
    if dist.is_available() and dist.is_initialized():
        # A thread of gloo's may be about to drop the last collective, and needs the interpreter for the Python object
        # in it. If the interpreter ends before, torch aborts the process. Nothing tells when the thread has done so.
        time.sleep(_GLOO_RELEASE)
        try:
            dist.destroy_process_group()
        except Exception:  # at the end of the process nobody can handle it
            logger.debug("a process group could not be destroyed", exc_info=True)
    if dist.is_available() and not dist.is_initialized():
        # Forget groups whose creation was interrupted, as `destroy_process_group` forgets complete ones. Ranks meet
        # under the name of a group, which is its number. torch keeps the number and the name of one that failed: this
        # rank would wait for the others under another number than they do, or find the name taken.
        for group in list(dist.distributed_c10d._world.pg_names):  # noqa: SLF001 - there is no public list of groups
            with contextlib.suppress(Exception):
                group.shutdown()
        _clear()


def _clear() -> None:
    module: Any = dist.distributed_c10d
    world = module._world  # noqa: SLF001 - torch forgets them nowhere
    for table in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(world, table).clear()
    module._unregister_all_process_groups()  # noqa: SLF001 - torch forgets them nowhere
    world.group_count = 0


# Groups of the process that this one was forked from. What destroys one waits for its threads, which are not here.
_inherited: list[Any] = []


def forget() -> None:
    """Forget the groups that this process has from the one it was forked from."""
    module: Any = dist.distributed_c10d
    _inherited.extend(module._world.pg_map.items())  # noqa: SLF001 - there is no public list of groups
    module._update_default_pg(None)  # noqa: SLF001 - as `destroy_process_group` does
    _clear()


def close_owned() -> None:
    """Destroy the process group if we made it; leave one that was adopted as it is."""
    process = context.current()
    if process is not None and process.owns_group:
        close()
    else:
        context.leave()

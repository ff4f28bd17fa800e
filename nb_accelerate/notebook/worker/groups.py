"""Open the store of a rank's process groups, and abort and close the groups.

What belongs to the training half is reached by a dotted name when it is needed, and never imported from here.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any, Protocol, cast

from nb_accelerate.base.devices import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.notebook.protocol.messages import StoreSpec

_HANDLER = "nb_accelerate.training.process.rendezvous:RendezvousHandler"
"""The class by which `init_process_group` finds the other ranks."""

_CLOSE = "nb_accelerate.training.process.group:close"
"""The function that destroys every process group."""


class StoreAccess(Protocol):
    """What the worker needs of a `training.process.rendezvous.RendezvousHandler`."""

    served: object

    def give_up(self) -> None:
        """End waits of this process for other ranks; called in another thread."""


def named(dotted: str) -> Any:
    """Import a module, and return what it holds.

    Args:
        dotted: ``module:name``.
    """
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)


def has_group() -> bool:
    """Return whether a default process group is open in this process. Imports nothing to find out."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def abort_groups() -> None:
    """Abort the collectives of this process' groups, where their backend can. The groups are of no use afterwards.

    Destroying a group waits for its collectives, and one of nccl that another rank never joins does not end. Backends
    that cannot abort have no collective that outlives the call.
    """
    if not has_group():
        return
    distributed: Any = sys.modules["torch.distributed"]
    used = str(distributed.get_backend())  # several of them may be in it: "cpu:gloo,cuda:nccl"
    backend = next((row for row in BACKENDS if row.can_abort and row.name in used), None)
    if backend is None:
        return
    torch: Any = sys.modules["torch"]
    names = distributed.distributed_c10d._world.pg_names  # noqa: SLF001 - there is no public list of groups
    with contextlib.suppress(Exception):  # it is being torn down already
        # All in one, newest first, as torch's own _abort_process_group does, or one abort would wait for another. That
        # one also forgets the groups, and nobody could tell any more which models belong to them.
        own = distributed.group.WORLD._get_backend(torch.device(backend.device))  # noqa: SLF001 - as `_abort_process_group` does
        own._group_start()  # noqa: SLF001 - as `_abort_process_group` does
        try:
            for group in sorted(names, key=names.get, reverse=True):
                group.abort()
        finally:
            own._group_end()  # noqa: SLF001 - as `_abort_process_group` does


def close_groups() -> None:
    """Destroy every process group, and forget the rank and device that this process had in them."""
    named(_CLOSE)()


def reach_store(store: StoreSpec, fd: int, is_given_up: Callable[[], bool] = lambda: False) -> StoreAccess:
    """Make every process group that this process opens from now on meet the other ranks through a store.

    Args:
        fd: the descriptor that belongs to it, taken over; -1 if there is none.
        is_given_up: called while this rank waits for others; True ends the wait.

    Returns:
        What must be kept as long as the groups.
    """
    is_file = store.kind == "file"
    handler = named(_HANDLER)(
        store.address,
        store.port,
        store_port=store.store_port,
        file=fd if is_file else None,
        polls=store.polls,
        part=store.part,
        is_given_up=is_given_up,
    )
    if store.kind == "server":
        from torch._C._distributed_c10d import TCPStore

        # On a socket that the kernel has bound: no port to guess, and none open to more than it has to be.
        handler.served = TCPStore(
            store.address,
            store.store_port,
            store.world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=fd,
        )
    handler.install()
    return cast("StoreAccess", handler)


def collectives_of_groups() -> dict[str, int]:
    """Return how many collectives each process group has seen, by its name. Ranks in step have the same numbers."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return {}
    world = distributed.distributed_c10d._world  # noqa: SLF001 - there is no public list of groups
    found = {}
    for group, name in world.pg_names.items():
        with contextlib.suppress(Exception):  # a backend that does not count
            found[name] = group._get_sequence_number_for_group()  # noqa: SLF001 - no public way
    return found

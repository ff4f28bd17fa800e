"""Connect once more to the store of a process group, for a thread of its own."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_prefixes = {"default_pg"}
"""Prefixes that `_prefix_of` tries besides those of groups: this one is of torch's init_process_group."""


def prefix_store(prefix: str, store: Store) -> PrefixStore:
    """Return a store that puts a prefix before each key, and that `clone_store` can clone with any PyTorch."""
    _prefixes.add(prefix)
    return PrefixStore(prefix, store)


def clone_store(store: Any) -> Any:
    """Return a store with the same keys whose calls do not wait for those of ``store``.

    PyTorch before 2.8 has no ``Store.clone``. There, a store is opened once more; where that cannot be done, ``store``
    itself is returned.
    """
    if hasattr(store, "clone"):
        return store.clone()
    if isinstance(store, PrefixStore):
        prefix = _prefix_of(store)
        return store if prefix is None else PrefixStore(prefix, clone_store(store.underlying_store))
    if isinstance(store, FileStore):
        opened: Any = store  # torch's stub lacks `path`
        clone: Any = FileStore(opened.path, -1)  # not counted as a user of the file, and does not remove it
    elif isinstance(store, TCPStore):
        clone = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    else:
        return store
    clone.set_timeout(store.timeout)
    return clone


def _prefix_of(store: PrefixStore) -> str | None:
    """Find out the prefix of a store, which PyTorch 2.6 does not tell; None if it is none that is known."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    groups = dist.distributed_c10d._world.pg_names.values()  # noqa: SLF001 - there is no public list of groups
    known = {*_prefixes, f"/worker/attempt_{attempt}", *(f"{name}/" for name in groups)}
    key = f"nb_accelerate/prefix {uuid.uuid4().hex}"
    store.set(key, "")
    try:
        return next((prefix for prefix in known if store.underlying_store.check([f"{prefix}/{key}"])), None)
    finally:
        store.delete_key(key)

"""Connect once more to the store of a process group, for a thread of its own."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_prefixes = {"default_pg"}  # of torch's init_process_group
_numbers = itertools.count()


def prefixed(prefix: str, store: Store) -> PrefixStore:
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
    known = {*_prefixes, f"/worker/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"}  # torchrun's
    key = f"nb_accelerate/prefix of {os.getpid()} {next(_numbers)}"
    store.set(key, "")
    try:
        return next((prefix for prefix in known if store.underlying_store.check([f"{prefix}/{key}"])), None)
    finally:
        store.delete_key(key)

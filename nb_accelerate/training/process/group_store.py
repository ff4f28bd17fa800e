"""Let `init_process_group` find the other ranks of a launch, called by this package, by torch or by any library.

::

    init_process_group() --> env:// or tcp://MASTER_ADDR:MASTER_PORT --> handler of torch's, replaced here
        --> a part of the store for this process group alone --> wait until all ranks are there --> gloo or nccl

On one machine the store is a file without a name, whose descriptor only the ranks have: nothing listens, so no other
user of the machine can write keys or garbage into it. Where torch cannot open such a file, it is torch's own, which a
rank serves; on several machines the launcher of the first does.

Each process group of all ranks has a part of the store to itself. In one part for all, the second group would find the
addresses that the first one left there.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from typing_extensions import override

from nb_accelerate.base.progress_page import here
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.training.process import loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nb_accelerate.base.seam import StoreSpec

logger = logging.getLogger(__name__)

# Not by an import statement: the package has a function of that name.
_torch: Any = importlib.import_module("torch.distributed.rendezvous")

# Seconds a rank between the first two looks for a key, the factor by which each interval grows, and seconds at most.
# The looks of many ranks that wait would keep those from coming for which they wait.
_FIRST_POLL, _POLL_GROWTH, _LONGEST_POLL = 0.0001, 1.2, 0.01

_WARN_AFTER = 30.0  # seconds of waiting after which a warning names the ranks that are missing

_GIVE_UP_TIMEOUT = timedelta(milliseconds=1)  # timeout of the store that makes waits in torch's code fail at once


class RendezvousHandler:
    """Gives stores to code that makes a process group of all ranks. One per rank, in use from `install` on.

    Requests for another address than the store's are left to torch. Waits for keys of a file poll in Python if
    the specification says so: that takes a fraction of a millisecond, and can be interrupted, where torch looks every
    10 ms. Not for nccl, whose own threads use the store: they would have to wait for Python.

    Args:
        fd: the descriptor that comes with the store; a file's has to stay open as long as this process lives.
        is_given_up: called while this rank waits; True ends the wait.
    """

    def __init__(self, spec: StoreSpec, fd: int, is_given_up: Callable[[], bool]) -> None:
        self._spec = spec
        self._is_given_up = is_given_up
        # Without a number of workers: with one, the last of them would remove the file.
        self._file = FileStore(f"/proc/self/fd/{fd}", -1) if spec.kind == "file" else None
        self._groups: Counter[int] = Counter()
        # Torch holds on to the part of a store that is written in C++, and not to the rest.
        self._kept: list[Store] = []
        if spec.kind == "server":
            # On a socket that the kernel has bound: no port to guess, and none open to more than it has to be.
            server = TCPStore(
                spec.address,
                spec.store_port,
                spec.world_size,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=fd,
            )
            self._kept.append(server)

    def install(self) -> None:
        """Answer ``env://`` and ``tcp://`` from now on. Replaces one that was installed before."""
        if self._file is not None:
            loopback.install(self._file.path)  # type: ignore[attr-defined] # no stub
        # register_rendezvous_handler refuses a scheme that is known already.
        handlers = _torch._rendezvous_handlers  # noqa: SLF001 - no public way
        for scheme, original in (
            ("env", _torch._env_rendezvous_handler),  # noqa: SLF001 - no public way
            ("tcp", _torch._tcp_rendezvous_handler),  # noqa: SLF001 - no public way
        ):
            handlers[scheme] = functools.partial(self._answer, original)

    def give_up(self) -> None:
        """Make waits of this process that are in torch's code fail soon; called in another thread."""
        if self._file is not None:
            self._file.set_timeout(_GIVE_UP_TIMEOUT)

    def _answer(
        self,
        original: Callable[..., Iterator[tuple[Store, int, int]]],
        url: str,
        timeout: timedelta = _torch.default_pg_timeout,
        **options: Any,
    ) -> Iterator[tuple[Store, int, int]]:
        """Yield the store, the rank and the number of ranks, as torch's rendezvous handlers do."""
        asked = _parse(url)
        if asked is None or asked[0] != (self._spec.address, self._spec.port):
            here().note_other_group()
            yield from original(url, timeout=timeout, **options)
            return
        _, rank, world_size = asked
        spec = self._spec
        store = self._file or TCPStore(
            spec.address, spec.store_port, is_master=False, wait_for_workers=False, timeout=timeout
        )
        yield self._meet(store, rank, world_size, timeout), rank, world_size
        raise RuntimeError("the ranks of this group are connected already. To connect them again, make another group")

    def _meet(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Announce this rank, wait for the others, and return the part of the store for this process group."""
        number = self._groups[world_size]
        self._groups[world_size] += 1
        part = PrefixStore(f"{self._spec.part} {world_size} ranks, group {number}", store)
        part.set_timeout(timeout)
        # Counted and not set: only so does the second of two that take themselves for one rank hear of the first.
        if part.add(_key(rank), 1) > 1:
            raise dist.DistStoreError(
                f"two processes take themselves for rank {rank} of {world_size}, and make a process group as such. "
                "Does code in a rank start processes that make one too? Remove RANK from their environment"
            )
        polling = _PollingStore(part, rank, world_size, self._is_given_up)
        polling.set_timeout(timeout)
        # At once for all: who makes the group waits for one rank after the other.
        polling.wait([_key(other) for other in range(world_size)])
        if not self._spec.polls:
            return part
        self._kept.append(polling)
        return polling


def _key(rank: int) -> str:
    return f"rank {rank} is here"


class _PollingStore(Store):
    """A store whose waits poll in Python: they end soon after a key was set, and can be interrupted and given up.

    Args:
        store: where the keys are.
        rank: of this process, of `world_size`.
    """

    def __init__(self, store: Store, rank: int, world_size: int, is_given_up: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._is_given_up = is_given_up
        self._clones: list[Store] = []  # see `RendezvousHandler`

    @property
    def underlying_store(self) -> Store:
        """The store that is polled, as `PrefixStore` has it."""
        return self._store

    def clone(self) -> Store:
        store: Store = self._store.clone()  # type: ignore[attr-defined] # no stub
        clone = _PollingStore(store, self._rank, self._world_size, self._is_given_up)
        clone.set_timeout(self.timeout)  # type: ignore[attr-defined] # no stub
        self._clones.append(clone)
        return clone

    @override
    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    @override
    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    @override
    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    @override
    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        return self._store.compare_set(key, expected_value, desired_value)

    @override
    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    @override
    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    @override
    def num_keys(self) -> int:
        return self._store.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - as torch calls them from C++

    @override
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = (self.timeout if timeout is None else timeout).total_seconds()  # type: ignore[attr-defined] # no stub
        began = time.monotonic()
        pause = min(_FIRST_POLL * self._world_size, _LONGEST_POLL)
        warn_after = _WARN_AFTER
        while not self.check(keys):
            if self._is_given_up():
                raise dist.DistStoreError("the ranks do not wait for one another any more: remote process exited")
            waited = time.monotonic() - began
            if waited >= limit:
                raise dist.DistStoreError(self._explain(keys, limit))
            if waited >= warn_after:
                warn_after = math.inf
                if missing := self._missing():
                    logger.warning("rank %d has waited %.0f s for %s to come", self._rank, waited, missing)
            time.sleep(pause)
            pause = min(pause * _POLL_GROWTH, _LONGEST_POLL)

    def _explain(self, keys: list[str], limit: float) -> str:
        missing = self._missing()
        if not missing:
            keys = [key for key in keys if not self.check([key])]
            return f"rank {self._rank} has waited {limit:.0f} s for what other ranks did not say: {', '.join(keys)}"
        return (
            f"{missing} of {self._world_size} did not come within {limit:.0f} s to the process group that rank "
            f"{self._rank} makes. Every rank has to make it, with Accelerator() or init_process_group(), and as often "
            f"as the others"
        )

    def _missing(self) -> str:
        """Return ``rank 1`` or ``ranks 1 and 2``, or "" if all are there."""
        ranks = [rank for rank in range(self._world_size) if not self.check([_key(rank)])]
        return named(ranks) if ranks else ""


def _parse(url: str) -> tuple[tuple[str | None, int | None], int, int] | None:
    """Return the address, the rank and the number of ranks in a URL, or None if one of them is missing."""
    parts = urlparse(url)
    query = dict(parse_qsl(parts.query))
    variables: Mapping[str, str] = os.environ if parts.scheme == "env" else {}
    try:
        host, port = parts.hostname, parts.port
        if variables:
            host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        rank = query["rank"] if "rank" in query else variables["RANK"]
        world_size = query["world_size"] if "world_size" in query else variables["WORLD_SIZE"]
        return (host, port), int(rank), int(world_size)
    except (KeyError, ValueError):
        return None  # which torch explains

"""Let `init_process_group` find the other ranks of a launch, whoever calls it: this package, torch, any library.

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

logger = logging.getLogger(__name__)

_torch: Any = importlib.import_module("torch.distributed.rendezvous")
"""Not by an import statement: the package has a function of that name."""

_FIRST_POLL, _POLL_GROWTH, _LONGEST_POLL = 0.0002, 1.2, 0.01
"""Seconds between the first two looks for a key, the factor by which each interval grows, and seconds at most."""

_WARN_AFTER = 30.0
"""Seconds of waiting after which a warning names the ranks that are missing."""

_GIVE_UP_TIMEOUT = timedelta(milliseconds=1)
"""Timeout of the store that makes waits in torch's code fail at once."""


def _never() -> bool:
    return False


class RendezvousHandler:
    """Gives stores to whoever makes a process group of all ranks. One per rank, in use from `install` on.

    Args:
        address: of the store, as ``MASTER_ADDR`` has it. Requests for another address are left to torch.
        port: of the store, as ``MASTER_PORT`` has it.
        store_port: where the store listens, if it is no file.
        file: descriptor of the file that is the store, which has to stay open as long as this process lives; None on
            several machines.
        polls: wait for keys in Python, which can be interrupted. Of a file that takes a fraction of a millisecond, and
            torch looks every 10 ms. Not for nccl, whose own threads use the store: they would have to wait for Python.
        part: of the store, for the ranks of one start, if several use it.
        is_given_up: called while this rank waits; True ends the wait.

    Attributes:
        served: the server of the store, if this rank is the one that serves it: it lives as long as this object.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        store_port: int = 0,
        file: int | None = None,
        polls: bool = False,
        part: str = "",
        is_given_up: Callable[[], bool] = _never,
    ) -> None:
        self._part = part
        self._address = (address, port)
        self._store_address = (address, store_port)
        self._polls = polls
        self._is_given_up = is_given_up
        # Without a number of workers: with one, the last of them would remove the file.
        self._file = None if file is None else FileStore(f"/proc/self/fd/{file}", -1)
        self._groups: Counter[int] = Counter()
        self.served: object = None
        # Torch holds on to the part of a store that is written in C++, and not to the rest.
        self._parts: list[Store] = []

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
        if asked is None or asked[0] != self._address:
            here().note_other_group()
            yield from original(url, timeout=timeout, **options)
            return
        _, rank, world_size = asked
        store = self._file or TCPStore(*self._store_address, is_master=False, wait_for_workers=False, timeout=timeout)
        yield self._meet(store, rank, world_size, timeout), rank, world_size
        raise RuntimeError("the ranks of this group are connected already. To connect them anew, make another group")

    def _meet(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
        """Announce this rank, wait for the others, and return the part of the store for this process group."""
        number = self._groups[world_size]
        self._groups[world_size] += 1
        part = PrefixStore(f"{self._part} {world_size} ranks, group {number}", store)
        part.set_timeout(timeout)
        if part.add(_key(rank), 1) > 1:
            raise dist.DistStoreError(
                f"two processes take themselves for rank {rank} of {world_size}, and make a process group as such. "
                "Does code in a rank start processes that make one too? Remove RANK from their environment"
            )
        waiting = _Waiting(part, rank, world_size, self._is_given_up)
        if not self._polls:
            waiting.wait([_key(other) for other in range(world_size)], timeout)
            return part
        polling = _PollingStore(part, waiting)
        polling.set_timeout(timeout)
        self._parts.append(polling)
        return polling


def _key(rank: int) -> str:
    """Return the key that a rank sets when it comes."""
    return f"rank {rank} is here"


class _Waiting:
    """Waits for keys of a store, and names the ranks that have not come."""

    def __init__(self, store: Store, rank: int, world_size: int, is_given_up: Callable[[], bool]) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._is_given_up = is_given_up

    def of(self, store: Store) -> _Waiting:
        """Return one that waits for keys of another store."""
        return _Waiting(store, self._rank, self._world_size, self._is_given_up)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Poll until all keys are there."""
        limit = timeout.total_seconds()
        began = time.monotonic()
        pause = _FIRST_POLL
        was_said = False
        while not self._store.check(keys):
            if self._is_given_up():
                raise dist.DistStoreError("the ranks do not wait for one another any more: remote process exited")
            waited = time.monotonic() - began
            if waited >= limit:
                raise dist.DistStoreError(self._explain(keys, limit))
            if waited >= _WARN_AFTER and not was_said:
                was_said = True
                if missing := self._missing():
                    logger.warning("rank %d has waited %.0f s for %s to come", self._rank, waited, missing)
            time.sleep(pause)
            pause = min(pause * _POLL_GROWTH, _LONGEST_POLL)

    def _explain(self, keys: list[str], limit: float) -> str:
        missing = self._missing()
        if not missing:
            keys = [key for key in keys if not self._store.check([key])]
            return f"rank {self._rank} has waited {limit:.0f} s for what other ranks did not say: {', '.join(keys)}"
        return (
            f"{missing} of {self._world_size} did not come within {limit:.0f} s to the process group that rank "
            f"{self._rank} makes. Every rank has to make it, with Accelerator() or init_process_group(), and as often "
            f"as the others"
        )

    def _missing(self) -> str:
        """Return ``rank 1`` or ``ranks 1 and 2``, or "" if all are there."""
        ranks = [rank for rank in range(self._world_size) if not self._store.check([_key(rank)])]
        return named(ranks) if ranks else ""


class _PollingStore(Store):
    """A store whose waits poll in Python: they end soon after a key was set, and can be interrupted and given up."""

    def __init__(self, store: Store, waiting: _Waiting) -> None:
        super().__init__()
        self._store = store
        self._waiting = waiting
        self._clones: list[Store] = []  # see `RendezvousHandler`

    @property
    def underlying_store(self) -> Store:
        """The store that is polled, as `PrefixStore` has it."""
        return self._store

    def clone(self) -> Store:
        store: Store = self._store.clone()  # type: ignore[attr-defined] # no stub
        clone = _PollingStore(store, self._waiting.of(store))
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
        self._waiting.wait(keys, self.timeout if timeout is None else timeout)  # type: ignore[attr-defined] # no stub


def _parse(url: str) -> tuple[tuple[str | None, int | None], int, int] | None:
    """Return the address, the rank and the number of ranks in a URL, or None if one of them is missing."""
    parts = urlparse(url)
    given = dict(parse_qsl(parts.query))
    variables: Mapping[str, str] = os.environ if parts.scheme == "env" else {}
    try:
        host, port = parts.hostname, parts.port
        if variables:
            host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        rank = given["rank"] if "rank" in given else variables["RANK"]
        world_size = given["world_size"] if "world_size" in given else variables["WORLD_SIZE"]
        return (host, port), int(rank), int(world_size)
    except (KeyError, ValueError):
        return None  # which torch explains

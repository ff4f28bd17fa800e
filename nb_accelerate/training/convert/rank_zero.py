"""What is rank 0's in a converted cell: the clock, answers of the user, and files that are written.

Ranks of one cell would read other times, and each would write the same file. So all see the clock of rank 0; and where
all of them change the same file or folder, rank 0 does, when all have come there. What they find on disk in between is
the same for all::

    rank 0: open("log.txt", "a") --- all are here ---> the file           ---> all go on
    rank 1: open("log.txt", "a") --- all are here ---> writes to nothing  ---> all go on
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import random
import re
import sys
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from nb_accelerate.errors.traceback_lines import is_users_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.convert.order import Order

_NUMBERS = [
    *((time, name + unit) for name in ("time", "perf_counter", "monotonic", "process_time") for unit in ("", "_ns")),
    (os, "getpid"),
]
"""Functions whose numbers are those of rank 0 where a user's line calls them."""

_SEEDS: list[tuple[Any, str]] = [(random, "seed"), (np.random, "seed"), (np.random, "default_rng")]
"""Functions that take a seed from the system if they are given none."""

_CHANGES = ("mkdir", "rmdir", "remove", "unlink", "rename", "replace")
"""Functions of `os` that change folders; those of shutil and pathlib call them."""


class RankZero:
    """Puts functions in the place of Python's whose results are not the same on all ranks.

    Args:
        names: of the cell, which may have imported some of them.
    """

    def __init__(self, names: dict[str, Any], order: Order, collectives: Collectives) -> None:
        self._names, self._order, self._collectives = names, order, collectives
        self._written = set[str]()
        self._is_on = False
        plain = {(owner, name): getattr(owner, name) for owner, name in [*_NUMBERS, *_SEEDS]}
        self._ours: dict[tuple[Any, str], Any] = {
            **{place: self._number(function) for place, function in plain.items() if place in _NUMBERS},
            **{place: self._seeded(function) for place, function in plain.items() if place in _SEEDS},
            **{(os, name): self._change(getattr(os, name)) for name in _CHANGES},
            (builtins, "input"): self._input(builtins.input),
            (builtins, "open"): self._open(builtins.open),
        }
        self._ours[io, "open"] = self._ours[builtins, "open"]
        self._plain = {(owner, name): getattr(owner, name) for owner, name in self._ours}

    def begin(self) -> None:
        """Put the functions in place, also where a cell has imported them by name."""
        self._is_on = True
        self._exchange(self._plain, self._ours)

    def end(self) -> None:
        """Take them away."""
        self._is_on = False
        self._exchange(self._ours, self._plain)

    def _exchange(self, old: dict[tuple[Any, str], Any], new: dict[tuple[Any, str], Any]) -> None:
        for (owner, name), function in new.items():
            setattr(owner, name, function)
        by_id = {id(function): new[place] for place, function in old.items()}
        for name, value in list(self._names.items()):
            if id(value) in by_id:
                self._names[name] = by_id[id(value)]

    @property
    def _counts(self) -> bool:
        """Whether what is done now is done by all ranks, in the same order."""
        return self._is_on and not self._order.is_inside and self._order.is_here

    def _is_asked(self) -> bool:
        """Whether a user's line has called the function that asks this."""
        return is_users_file(sys._getframe(2).f_code.co_filename) and self._counts  # noqa: SLF001 - as `warnings` does

    def _number(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def number_of_rank_0() -> Any:
            value = plain()
            if not self._is_asked():
                return value
            return type(value)(self._order.meet(plain.__name__, value=value)[0])

        return number_of_rank_0

    def _seeded(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            if (args or kwargs) or not self._is_asked():
                return plain(*args, **kwargs)
            mine = int.from_bytes(os.urandom(4), "little")
            return plain(int(self._order.meet(f"{plain.__name__} without a seed", value=mine)[0]))

        return seeded

    def _input(self, plain: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(plain)
        def answer_of_rank_0(*args: Any) -> str:
            if not self._is_asked():
                return plain(*args)
            self._order.meet("input")
            answer = plain(*args) if self._collectives.rank == 0 else ""
            return str(self._collectives.broadcast_objects([answer], 0)[0])

        return answer_of_rank_0

    def is_same(self, what: str, path: str, folder: int | None = None) -> bool:
        """Wait for all ranks; return whether all mean the same file. Numbers in its name may be times and processes."""
        inode = "" if folder is None else os.fstat(folder).st_ino
        mine = zlib.crc32((re.sub(r"\d+", "", path) + f" in {inode}").encode(errors="surrogateescape"))
        return len(set(self._order.meet(what, value=mine))) == 1

    def _change(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def change(*args: Any, **kwargs: Any) -> None:
            given = [os.fsdecode(arg) for arg in args if isinstance(arg, (str, bytes, os.PathLike))]
            paths = [os.path.abspath(path) for path in given]  # noqa: PTH100 - text
            if not (self._counts and paths):
                return plain(*args, **kwargs)
            if not self.is_same(f"os.{plain.__name__}", "\n".join(paths), kwargs.get("dir_fd")):
                return plain(*args, **kwargs)
            error: OSError | None = None
            if self._collectives.rank == 0:
                try:
                    plain(*args, **kwargs)
                except OSError as caught:
                    error = caught
            error = self._collectives.broadcast_objects([error], 0)[0]
            if error is not None:
                raise error
            return None

        return change

    def _open(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            writes = bool(set(mode) & set("wax+"))
            nothing = functools.partial(plain, os.devnull, mode.replace("x", "w"), *args, **kwargs)
            if not isinstance(file, (str, bytes, os.PathLike)) or kwargs.get("opener") is not None:
                return plain(file, mode, *args, **kwargs)
            if not self._counts:
                # Ranks cannot wait for another thread, of a writer for TensorBoard say.
                in_thread = self._is_on and self._order.is_in_another_thread
                return (
                    nothing() if in_thread and writes and self._collectives.rank else plain(file, mode, *args, **kwargs)
                )
            path = os.fsdecode(os.path.realpath(file))
            if not writes:
                if path in self._written:
                    self._order.meet("a file that was written")
                return plain(file, mode, *args, **kwargs)
            if not self.is_same("open for writing", path):
                return plain(file, mode, *args, **kwargs)
            self._written.add(path)
            opened = plain(file, mode, *args, **kwargs) if self._collectives.rank == 0 else nothing()
            self._order.meet("open for writing")
            return opened

        return open_

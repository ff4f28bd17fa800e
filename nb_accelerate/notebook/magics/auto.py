"""Auto mode: every cell is a ``%%distributed`` cell, except cells that opt out."""

from __future__ import annotations

import contextlib
import itertools
import sys
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from IPython.core.interactiveshell import InteractiveShell

# Cell magics about Python code, which is the ranks'. All others, ``%%bash`` say, are the notebook's.
_ON_RANKS = ("%%time", "%%timeit", "%%prun", "%%capture")

_OURS = ("%%distributed", "%%rank", "%%local")

_HERE = ("%distributed", "%load_ext", "%unload_ext", "%reload_ext")

_DEBUG = ["%distributed debug\n"]  # in the place of ``%debug``: one debugger, not as many as there are ranks

# Installing a package, which ranks would do at the same time, in the same place.
_ONCE = ("%pip", "%conda", "%mamba", "%micromamba", "%uv", "!pip", "!conda", "!mamba", "!micromamba", "!uv")


class AutoMode:
    """An input transformer; `register` it, `unregister` it."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self.is_on = False  # whether plain cells run on the ranks
        self._is_paused = False

    def register(self) -> None:
        """Add the input transformer to the shell."""
        self._shell.input_transformers_cleanup.append(self._route)

    def unregister(self) -> None:
        """Remove the input transformer from the shell."""
        with contextlib.suppress(ValueError):
            self._shell.input_transformers_cleanup.remove(self._route)

    def runs_here(self, cell: str) -> bool:
        """Return whether a cell, as it was written, runs in the notebook and not on the ranks."""
        lines = list(itertools.dropwhile(str.isspace, cell.splitlines(keepends=True)))  # as IPython does
        routed = "".join(route(lines, everything=self.is_on)[:1])
        return not routed.startswith(("%%distributed", "%%rank"))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _route(self, lines: list[str]) -> list[str]:
        if self._is_paused:
            return lines
        if "".join(lines).strip() == "%debug" and _failed_on_ranks():
            return _DEBUG
        return route(lines, everything=self.is_on)


def _failed_on_ranks() -> bool:
    """Whether the last traceback that the notebook showed is from a cell which failed on the ranks."""
    error = getattr(sys, "last_value", None)
    if error is None or "nb_accelerate.notebook.pool.group" not in sys.modules:
        return False
    from nb_accelerate.notebook import pool as pools
    from nb_accelerate.notebook.pool.group import result_of

    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1] is result_of.__code__ and pools.current().failed_rank is not None


def route(lines: list[str], *, everything: bool) -> list[str]:
    """Decide where a cell runs. Pure."""
    first = lines[0].split() if lines else []
    word = first[0] if first else ""
    if word in _OURS and not "".join(lines[1:]).strip():
        return [*lines, "pass\n"]  # IPython refuses a cell magic without a body, also one that only asks for help
    if word == "%%local" and len(first) == 1:
        return ["#\n", *lines[1:]]  # an ordinary cell, with the same line numbers
    if everything and "".join(lines).strip() == "%debug":
        return _DEBUG
    if all(line.lstrip().startswith((*_ONCE, "#")) or not line.strip() for line in lines):
        return lines
    if not everything or not word or word in _HERE or (word.startswith("%%") and word not in _ON_RANKS):
        return lines
    return ["%%distributed --inserted\n", *lines]

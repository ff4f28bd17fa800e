"""Folders that are replaced as a whole: a save that is cut off leaves what was there before.

::

    files are written        a list of what is to be       each is moved into
    into .incoming-<rank> -> removed, .complete, says   -> the folder; .incoming
    inside the folder        that all of them are there    is removed

A crash before ``.complete`` is there changes nothing; after it, `settle` finishes the move.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_COMPLETE = ".complete"
_NUMBERED = re.compile(r"checkpoint_(\d+)")


@contextlib.contextmanager
def replacing(
    folder: str | os.PathLike[str], rank: int = 0, *, outdated: Callable[[str], bool] = lambda _: False
) -> Iterator[Path]:
    """A block that gets an empty folder; when it ends well, what is in there is moved into ``folder``.

    Ranks that write to one folder have such a block each. Nothing happens to ``folder`` if the block raises.

    Args:
        folder: made if it is not there.
        rank: of this process.
        outdated: whether a file that is in ``folder``, and that the block did not write, is to be removed.

    Raises:
        ConfigError: there is a file of that name.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file. Give the name of a folder for the checkpoint.")
    settle(folder, rank)
    incoming = _incoming(folder, rank)
    incoming.mkdir(parents=True)
    try:
        yield incoming
        _flush_to_disk(incoming)
        new = {entry.name for entry in incoming.iterdir()}
        old = [entry.name for entry in folder.iterdir() if entry.name not in new and outdated(entry.name)]
        partial = incoming / f"{_COMPLETE}.partial"
        partial.write_text(json.dumps(old))
        _flush_to_disk(incoming)
        partial.rename(incoming / _COMPLETE)
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise
    settle(folder, rank)


def settle(folder: Path, rank: int) -> None:
    """Finish or forget a save of this rank that was cut off."""
    incoming = _incoming(folder, rank)
    if not incoming.is_dir():
        return
    if (incoming / _COMPLETE).exists():
        for name in json.loads((incoming / _COMPLETE).read_text()):
            (folder / name).unlink(missing_ok=True)
        for entry in incoming.iterdir():
            if entry.name != _COMPLETE:
                _move(entry, folder / entry.name)
    shutil.rmtree(incoming, ignore_errors=True)  # what is left counts for nothing, and the disk may be read-only


def settle_all(folder: Path) -> None:
    """Do so for all ranks that ever wrote to the folder: nobody may be writing to it."""
    for incoming in folder.glob(".incoming-*"):
        settle(folder, int(incoming.name.rpartition("-")[2]))


def numbered(parent: Path) -> list[tuple[int, Path]]:
    """Return the numbers and paths of the folders ``checkpoint_<number>`` that hold something, by number."""
    found = [
        (int(match[1]), entry)
        for entry in (parent.iterdir() if parent.is_dir() else ())
        if (match := _NUMBERED.fullmatch(entry.name)) and holds_something(entry)
    ]
    return sorted(found)


def holds_something(folder: Path) -> bool:
    """Return whether there is more in a folder than what a save that was cut off has left."""
    if not folder.is_dir():
        return folder.exists()
    return any(not entry.name.startswith(".incoming-") or (entry / _COMPLETE).exists() for entry in folder.iterdir())


def _incoming(folder: Path, rank: int) -> Path:
    return folder / f".incoming-{rank}"


def _move(source: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif source.is_dir():
        target.unlink(missing_ok=True)  # a folder takes the place of another one only
    source.replace(target)


def _flush_to_disk(folder: Path) -> None:
    """A rename may reach the disk before what was written: without this, a power cut leaves empty files."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

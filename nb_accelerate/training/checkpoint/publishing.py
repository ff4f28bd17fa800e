"""Folders that are published as a whole: one sees all that was saved, or what was there before.

::

    Staging.begin               all ranks write          Staging.publish, when all have written
    .<name>.nb_accelerate-...   -> rank-0/, rank-1/, ... -> everything in one folder, and then one rename:
      beside the target, or                               there is no target yet: this becomes it
      in it if it is there                                else: it is committed as <target>/.nb_accelerate-state-<n>/,
                                                                and its files replace those in the target

`published` finds what was committed, also if a kill has kept its files from getting to their places; it holds all of
them until they have. Only saving changes a folder, and moves nothing but what the same save has written: what others
have put there, links and odd names too, is neither followed nor moved.

What a save that was killed has left is locked by nobody; the next save removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.checkpoint.names import IN_SHARDS, OF_A_MODEL, OF_A_STATE, OF_SHARDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Literal

    Kind = Literal["state", "model"]

_OURS = {"state": OF_A_STATE, "model": OF_A_MODEL}
_STAGED = re.compile(r"(\..+)?\.nb_accelerate-([0-9a-f]{4})[0-9a-f]{12}")
_A_DAY = 86400.0  # seconds after which what a save on another machine has left is taken to be abandoned
_COMMITTED = re.compile(r"\.nb_accelerate-(state|model)-(\d{1,9})")


class Staging:
    """A folder in which a save is written before it is published as `target`, which is no link. Made by `begin`."""

    def __init__(self, target: Path, path: Path, kind: Kind) -> None:
        self.target = target
        self.path = path
        self._kind: Kind = kind
        self._lock: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # some network disks have no locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def begin(cls, folder: str | os.PathLike[str], kind: Kind) -> Staging:
        """Make an empty folder to write to, and remove what saves that were killed have left."""
        _refuse_planted(Path(folder).expanduser())
        target = Path(os.path.realpath(Path(folder).expanduser()))
        if target.exists() and not target.is_dir():
            raise ConfigError(f"{folder} is a file. Give the name of a folder for the checkpoint.")
        name = new_name()
        # In the target, where that is: it may be a mount, or in a folder that is read-only.
        path = target / name if target.is_dir() else target.parent / f".{target.name}{name}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for parent in (target.parent, target):
                remove_leftovers(parent)
            path.mkdir()
        except OSError as error:
            raise CheckpointError(f"Nothing can be saved as {folder}: {error}") from error
        return cls(target, path, kind)

    def join(self, ranks: int) -> None:
        """Put what ranks wrote into one folder. Where several wrote the same file, the lowest rank's counts."""
        for rank in reversed(range(ranks)):
            part = folder_of(self.path, rank)
            if part.is_dir():
                _move_into(part, self.path)

    def publish(self) -> None:
        """Make this what is in the target, in one step."""
        try:
            # Its names first: if the rename came to the disk before them, an empty folder would be there after a power
            # cut.
            sync(self.path)
            if os.path.lexists(self.target):
                self._commit_inside()
            else:
                self.path.rename(self.target)
            sync(self.target.parent)
        except OSError as error:
            raise CheckpointError(f"{self.target} could not be replaced by what was saved: {error}") from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove what was not published."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)  # what is left counts for nothing; the next save removes it
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a process that was forked meanwhile would go on holding it
            os.close(self._lock)
            self._lock = None

    def _commit_inside(self) -> None:
        """Rename this to a hidden folder of the target, and then replace the files of the target by its files."""
        new = {entry.name for entry in self.path.iterdir()}
        in_the_way = [name for name in new if (self.path / name).is_file() and (self.target / name).is_dir()]
        if in_the_way:
            raise IsADirectoryError(f"{self.target / in_the_way[0]} is a folder, and a file is to be saved there")
        before = [number for number, _ in _committed(self.target, self._kind)]
        committed = self.target / f".nb_accelerate-{self._kind}-{max(before, default=0) + 1}"
        trash = self.target / new_name()
        trash.mkdir()
        try:
            self.path.rename(committed)
            sync(self.target)  # from here on the new one counts, even if the process is killed in what follows
            for name in sorted(new):
                _put_copy(committed / name, self.target / name, trash)
            # What is ours and not in the new one: files of more ranks, say, or weights in the other format.
            for entry in list(os.scandir(self.target)):
                if entry.name in new:
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    if _OURS[self._kind].fullmatch(entry.name):
                        Path(entry).unlink()
                elif self._kind == "state" and OF_SHARDS.fullmatch(entry.name):
                    with os.scandir(entry.path) as shards:  # with nothing in it that is not ours
                        is_ours = all(s.is_file(follow_symlinks=False) and IN_SHARDS.fullmatch(s.name) for s in shards)
                    if is_ours:
                        Path(entry).rename(trash / entry.name)
            sync(self.target)
            for number, folder in _committed(self.target, self._kind):
                folder.rename(trash / str(number))  # the oldest first: the newest counts
        finally:
            shutil.rmtree(trash, ignore_errors=True)


def _refuse_planted(folder: Path) -> None:
    """Refuse what another user has put where a folder is to be saved, in one that everybody can write to."""
    # Linux refuses such links too (`fs.protected_symlinks`), but not to a process that reads where they point to. A
    # link anywhere in the path counts, and the folder itself: its owner can replace what is saved there.
    path = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow the links
    for part in (path, *path.parents[:-1]):
        with contextlib.suppress(OSError):  # it is not there yet
            status, around = part.lstat(), part.parent.stat()
            is_open = around.st_mode & stat.S_ISVTX and around.st_mode & stat.S_IWOTH
            if is_open and status.st_uid not in (os.geteuid(), around.st_uid):
                what = "link" if stat.S_ISLNK(status.st_mode) else "folder"
                if what == "link" or part == path:
                    raise CheckpointError(
                        f"Nothing is saved as {folder}: the {what} {part} belongs to another user (user id "
                        f"{status.st_uid}), in a folder that everybody can write to. Give another name."
                    )


def folder_of(staging: Path, rank: int) -> Path:
    """Return where a rank writes, in the folder of a `Staging`, which another process may have made."""
    return staging / f"rank-{rank}"


def published(folder: Path, kind: Kind) -> Path:
    """Return where the files are that were published last in a folder: there, unless a save was killed in between."""
    return max(_committed(folder, kind), default=(0, folder))[1]


def remove_leftovers(folder: Path) -> None:
    """Remove what saves of this user have left in a folder, if their processes are gone."""
    # Those of another machine, whose locks are not seen here on some network disks, have to be a day old.
    for entry in _entries(folder):
        match = _STAGED.fullmatch(entry.name)
        if match is None or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # it is another user's, or gone again
            continue
        if match[2] != _of_this_machine() and time.time() - os.fstat(descriptor).st_mtime < _A_DAY:
            os.close(descriptor)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.geteuid():
                shutil.rmtree(entry.path, ignore_errors=True)
        except OSError:  # it is being written to, or this disk has no locks
            pass
        finally:
            os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a folder so that no half of it is ever to be seen. What a link points to stays."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    # Renamed in one step, since to remove its files takes a while, in which half of them would be found.
    trash = folder.parent / f".{folder.name}{new_name()}"
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def sync(path: Path) -> None:
    """Make sure that a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Make sure that what is in a folder reaches the disk: without this, a power cut leaves empty files."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            sync(path)


def _committed(folder: Path, kind: Kind) -> list[tuple[int, Path]]:
    """Return the numbers and paths of what was committed inside of a folder, by number."""
    folders = []
    for entry in _entries(folder):
        match = _COMMITTED.fullmatch(entry.name)
        if match and match[1] == kind and entry.is_dir(follow_symlinks=False):
            folders.append((int(match[2]), Path(entry.path)))
    return sorted(folders)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from entries


def _move_into(source: Path, target: Path) -> None:
    for entry in list(os.scandir(source)):
        path = target / entry.name
        if entry.is_dir(follow_symlinks=False) and path.is_dir() and not path.is_symlink():
            _move_into(Path(entry.path), path)
        else:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif entry.is_dir(follow_symlinks=False):
                path.unlink(missing_ok=True)  # a folder takes the place of another one only
            Path(entry).replace(path)
    source.rmdir()


def _put_copy(source: Path, path: Path, trash: Path) -> None:
    """Hard-link a file, or all files of a folder, to a path; copy them where the file system has no hard links."""
    new, old = trash / f"{source.name}.new", trash / f"{source.name}.old"
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, new, symlinks=True, copy_function=_link_or_copy)
        if os.path.lexists(path):
            path.rename(old)
    else:
        _link_or_copy(source, new)
    new.replace(path)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
        with Path(target).open("rb") as file:
            os.fsync(file.fileno())


def new_name() -> str:
    """Return a name for a folder that is written: of this machine, and nobody else's."""
    return f".nb_accelerate-{_of_this_machine()}{secrets.token_hex(6)}"


def _of_this_machine() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()) & 0xFFFF:04x}"

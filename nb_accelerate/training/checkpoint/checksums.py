"""Checksums of the files of a checkpoint: taken after a file was written, compared while it is loaded.

There is a CRC-32 for each 16 MiB of a file, so that several threads (and several ranks of a machine) share the work.
They are there to notice damage, not forgery, for which files would have to be signed.
"""

from __future__ import annotations

import os
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

BLOCK = 1 << 24  # bytes that one checksum stands for
_CHUNK = 1 << 20  # bytes that are read at once: they stay in the cache of a core
_MOST_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written."""

    size: int
    crc32: tuple[int, ...] | None  # of each 16 MiB, in order; None in manifests that had other checksums


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Return what all files in a folder and below are, when all of it has reached the disk.

    Those of hooks of the user's are among them. Links, and what is in the folders that they point to, do not belong to
    a checkpoint.
    """
    begun = []
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS) + 1, "nb-checksums") as pool:
        for where, _, names in os.walk(folder):
            for path in (Path(where, name) for name in names):
                if stat.S_ISREG(path.lstat().st_mode):
                    size, synced = path.stat().st_size, pool.submit(sync, path)
                    blocks = [pool.submit(_checksum, path, start) for start in range(0, size, BLOCK)]
                    begun.append((path, size, synced, blocks))
            sync(Path(where))
    records = {}
    for path, size, synced, blocks in begun:
        try:
            synced.result()
            crc32 = tuple(block.result() for block in blocks)
        except OSError as error:
            raise CheckpointError(f"{path} could not be written: {error}") from error
        records[path.relative_to(folder).as_posix()] = FileRecord(size, crc32)
    return records


class Verification:
    """Compares blocks of some files with what they were, in threads, while the files are loaded.

    The ranks of a machine share the blocks; ``rank`` is the number of this one there.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileRecord], *, rank: int = 0, num_ranks: int = 1) -> None:
        num_threads = max(1, min((os.cpu_count() or 1) // num_ranks, _MOST_THREADS))
        self._pool = ThreadPoolExecutor(num_threads, "nb-checksums")
        blocks = [(name, *block) for name in sorted(files) for block in enumerate(files[name].crc32 or ())]
        self._checksums = [
            (folder / name, crc32, self._pool.submit(_checksum, folder / name, index * BLOCK))
            for name, index, crc32 in blocks[rank::num_ranks]
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave out what was not compared yet, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def result(self) -> list[str]:
        """Return a sentence for each file that is not as it was written, as far as this rank has compared them."""
        found = set()
        for path, crc32, checksum in self._checksums:
            try:
                if checksum.result() != crc32:
                    found.add(f"{path} is not as it was saved: damaged or replaced, its checksum differs.")
            except OSError as error:
                found.add(f"{path} cannot be read: {error}.")
        return sorted(found)


def obvious_damage(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Return a sentence for each file that is missing, is a link, or has another size, without reading any."""
    found = []
    for name, was in files.items():
        path = folder / name
        try:
            _refuse_links(folder, name)
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
            if size != was.size or (was.crc32 is not None and len(was.crc32) != -(-was.size // BLOCK)):
                found.append(f"{path} has {size} bytes, and had {was.size} when saved: cut off or replaced.")
        except FileNotFoundError:
            found.append(f"{path} is missing.")
        except OSError as error:
            found.append(f"{path} cannot be read: {error}.")
    return found


def open_file(path: str | Path) -> Any:
    """Open a file for reading bytes: no link, and nothing that one would have to wait for."""
    # A pipe would be waited for without O_NONBLOCK, which files do not know.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _refuse_links(folder: Path, name: str) -> None:
    for part in [*(folder / name).relative_to(folder).parents][:-1]:
        if (folder / part).is_symlink():
            raise OSError(f"{folder / part} is a link")


def sync(path: Path) -> None:
    """Make sure that a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path, start: int) -> int:
    """Return the checksum of the block of a file that begins at ``start``, in bytes."""
    buffer = memoryview(bytearray(_CHUNK))
    crc = 0
    with open_file(path) as file:
        for offset in range(start, start + BLOCK, _CHUNK):
            count = os.preadv(file.fileno(), [buffer], offset)
            crc = zlib.crc32(buffer[:count], crc)
            if count < _CHUNK:
                break
    return crc

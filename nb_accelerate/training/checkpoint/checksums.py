"""Checksums of the files of a checkpoint: a CRC-32 for each 16 MiB, so that several threads and ranks share the work.

They notice damage, not forgery. They are taken when a file has been written, while it goes to the disk, and compared
while it is loaded: what one of both reads is in memory for the other. Nothing here needs torch.
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
from nb_accelerate.training.checkpoint.publishing import sync

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from typing_extensions import Self

BLOCK = 1 << 24  # bytes that one checksum stands for
_WINDOW = 1 << 19  # bytes that are read at once: they are in the cache of a core when their checksum is taken
_MOST_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written."""

    size: int
    crc32: tuple[int, ...]  # of each 16 MiB, in order


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Return what all files in a folder and below are, when all of it has reached the disk.

    Links, and what is in the folders that they point to, do not belong to a checkpoint.
    """
    files: dict[str, tuple[int, list[Future[int]]]] = {}
    with ThreadPoolExecutor(_threads_for(1), "nb-checksums") as pool:
        for where, _, names in os.walk(folder):
            for path in (Path(where, name) for name in names):
                try:
                    size = path.lstat().st_size
                    if stat.S_ISREG(path.lstat().st_mode):
                        blocks = [pool.submit(_crc32_of, path, start) for start in range(0, size, BLOCK)]
                        files[path.relative_to(folder).as_posix()] = size, blocks
                        sync(path)
                except OSError as error:
                    raise CheckpointError(f"{path} could not be written: {error}") from error
            sync(Path(where))
        return {
            name: FileRecord(size, tuple(block.result() for block in blocks)) for name, (size, blocks) in files.items()
        }


class Verification:
    """Compares blocks of some files with what they were, in threads, while others load the files.

    The ranks of a machine share the blocks; ``rank`` is the number of this one there.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileRecord], *, rank: int = 0, num_ranks: int = 1) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(_threads_for(num_ranks), "nb-checksums")
        blocks = [(name, index, crc32) for name in sorted(files) for index, crc32 in enumerate(files[name].crc32)]
        self._blocks = [
            (folder / name, crc32, self._pool.submit(_crc32_of, folder / name, index * BLOCK))
            for name, index, crc32 in blocks[rank::num_ranks]
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave out what was not compared yet, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def result(self) -> list[str]:
        """Return a sentence for each file that is not as it was written, as far as this rank has compared them."""
        damage = set()
        for path, crc32, block in self._blocks:
            try:
                if block.result() != crc32:
                    damage.add(f"{path} is not as it was saved: damaged or replaced, its checksum differs.")
            except OSError as error:
                damage.add(f"{path} cannot be read: {error}.")
        return sorted(damage)


def obvious_damage(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Return a sentence for each file that is missing, is a link, or has another size, without reading any."""
    damage = []
    for name, was in files.items():
        path = folder / name
        try:
            for part in [*(folder / name).relative_to(folder).parents][:-1]:
                if (folder / part).is_symlink():
                    raise OSError(f"{folder / part} is a link")
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
            if size != was.size:
                damage.append(f"{path} has {size} bytes, and had {was.size} when saved: cut off or replaced.")
        except FileNotFoundError:
            damage.append(f"{path} is missing.")
        except OSError as error:
            damage.append(f"{path} cannot be read: {error}.")
    return damage


def open_file(path: str | Path) -> Any:
    """Open a file for reading bytes: no link, and nothing that one would have to wait for."""
    # A pipe would be waited for without O_NONBLOCK, which files do not know.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _threads_for(num_ranks: int) -> int:
    return max(1, min((os.cpu_count() or 1) // num_ranks, _MOST_THREADS))


def _crc32_of(path: Path, start: int) -> int:
    """Return the checksum of the block of a file that begins at ``start``."""
    crc32, buffer = 0, memoryview(bytearray(_WINDOW))
    with open_file(path) as file:
        for at in range(start, start + BLOCK, _WINDOW):
            crc32 = zlib.crc32(buffer[: os.preadv(file.fileno(), [buffer], at)], crc32)
    return crc32

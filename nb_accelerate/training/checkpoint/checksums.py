"""Checksums of the files of a checkpoint: taken while a file is written, compared while it is read.

There is a CRC-32 for each 16 MiB of a file, so that several threads (and several ranks of a machine) share the work:
about 2 GB/s on a core. They are there to notice damage, not forgery, for which files would have to be signed.
"""

from __future__ import annotations

import os
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from typing_extensions import Buffer, Self

BLOCK = 1 << 24  # bytes that one checksum stands for
_CHUNK = 1 << 20  # bytes that are read at once: they stay in the cache of a core
_IN_LINE = 1 << 18  # bytes of a write whose checksum takes less time than to wake up a thread
_FLUSH_EVERY = 1 << 27  # bytes after which the disk is told to begin: else it is idle until the end of the file
_MOST_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written.

    Attributes:
        size: in bytes.
        crc32: of each 16 MiB of the file, in order; None in manifests that had other checksums.
    """

    size: int
    crc32: tuple[int, ...] | None


class RecordingFile:
    """A new file whose checksums are computed while it is written. Made by `Recorder.open`.

    Args:
        path: of the file; must not be there.
    """

    def __init__(self, path: Path, pool: ThreadPoolExecutor, waiting: ThreadPoolExecutor) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._pool = pool
        self._waiting = waiting
        self._size = 0
        self._crc32: list[int] = []
        self._digested = 0
        self._flushed = 0
        self._flush: Future[None] | None = None
        self._closed: Future[None] | None = None
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = self._waiting.submit(self._close)

    def wait(self) -> None:
        """Wait until all of the file, which was left, has reached the disk.

        Raises:
            CheckpointError: it could not be written.
        """
        assert self._closed is not None
        try:
            self._closed.result()
        except OSError as error:
            raise CheckpointError(f"{self._path} could not be written: {error}") from error

    def _close(self) -> None:
        try:
            os.fsync(self._descriptor)
        finally:
            if self._flush is not None:
                wait((self._flush,))  # it uses the descriptor until then
            os.close(self._descriptor)
        if self._flush is not None:
            self._flush.result()  # the system tells an error of the disk once: here, and no more to the last fsync

    @property
    def record(self) -> FileRecord:
        """What was written so far."""
        return FileRecord(self._size, tuple(self._crc32))

    def write(self, data: Buffer) -> int:
        """Write bytes, and return how many they are.

        Raises:
            OSError: the disk is full, say.
        """
        view = memoryview(data).cast("B")
        if len(view) <= _IN_LINE:
            self._digest(view)
            self._write(view)
        else:
            digested = self._pool.submit(self._digest, view)
            try:
                self._write(view)
            finally:
                digested.result()  # it reads memory that belongs to the caller
        self._size += len(view)
        if self._size - self._flushed >= _FLUSH_EVERY and (self._flush is None or self._flush.done()):
            if self._flush is not None:
                self._flush.result()
            self._flushed = self._size
            self._flush = self._waiting.submit(os.fsync, self._descriptor)
        return len(view)

    def flush(self) -> None:
        """Do nothing, for those who ask a file to: there is no buffer."""

    def _write(self, view: memoryview) -> None:
        while view:
            view = view[os.write(self._descriptor, view[: 1 << 26]) :]

    def _digest(self, view: memoryview) -> None:
        """Add the next bytes of the file to the checksums of their blocks."""
        while view:
            filled = self._digested % BLOCK
            piece = view[: BLOCK - filled]
            if not filled:
                self._crc32.append(0)
            self._crc32[-1] = zlib.crc32(piece, self._crc32[-1])
            self._digested += len(piece)
            view = view[len(piece) :]


class Recorder:
    """The files that one rank writes into its folder, and what is known about them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = _threads()
        self._waiting = ThreadPoolExecutor(_MOST_THREADS, "nb-disk")
        self._written: dict[str, RecordingFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._waiting.shutdown()

    def open(self, path: Path) -> RecordingFile:
        """Open a new file in the folder, once. `records` waits until all of it has reached the disk."""
        file = RecordingFile(path, self._pool, self._waiting)
        self._written[path.relative_to(self._folder).as_posix()] = file
        return file

    def records(self) -> dict[str, FileRecord]:
        """Return what all files in the folder and below are, and make sure that all of it reaches the disk.

        Those that others have written there, hooks of the user's say, are read again. Links, and what is in the folders
        that they point to, do not belong to a checkpoint.
        """
        files = {}
        for folder, _, names in os.walk(self._folder):
            for path in (Path(folder, name) for name in names):
                name = path.relative_to(self._folder).as_posix()
                if name in self._written:
                    self._written[name].wait()
                    files[name] = self._written[name].record
                elif stat.S_ISREG(path.lstat().st_mode):
                    with open_file(path) as file:
                        os.fsync(file.fileno())
                        size = os.fstat(file.fileno()).st_size
                        starts = range(0, size, BLOCK)
                        files[name] = FileRecord(size, tuple(_checksum(file.fileno(), start) for start in starts))
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return files


class Verification:
    """Compares a part of the blocks of some files with what they were, in threads of its own, while they are loaded.

    Args:
        num_ranks: how many there are on the machine; each reads its part of the blocks.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileRecord], *, rank: int = 0, num_ranks: int = 1) -> None:
        num_threads = max(1, min((os.cpu_count() or 1) // num_ranks, _MOST_THREADS))
        self._pool = ThreadPoolExecutor(num_threads, "nb-checksums")
        blocks = [(name, *block) for name in sorted(files) for block in enumerate(files[name].crc32 or ())]
        self._compared = [
            self._pool.submit(_compare, folder / name, index, crc32) for name, index, crc32 in blocks[rank::num_ranks]
        ]

    def result(self) -> list[str]:
        """Return a sentence for each file that is not as it was written, as far as this rank has looked."""
        try:
            return sorted({sentence for one in self._compared if (sentence := one.result())})
        finally:
            self.close()

    def close(self) -> None:
        """Leave out what was not compared yet, and end the threads."""
        self._pool.shutdown(cancel_futures=True)


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
    """Open a file for reading bytes: no link, and nothing that one would have to wait for.

    Raises:
        OSError: it is not there, or something else.
    """
    # A pipe would be waited for without O_NONBLOCK, which files do not know.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _compare(path: Path, index: int, crc32: int) -> str:
    """Return what is wrong with a block of a file; nothing if it is as it was."""
    try:
        with open_file(path) as file:
            if _checksum(file.fileno(), index * BLOCK) != crc32:
                return f"{path} is not as it was saved: damaged or replaced, its checksum differs."
    except OSError as error:
        return f"{path} cannot be read: {error}."
    return ""


def _refuse_links(folder: Path, name: str) -> None:
    for part in [*(folder / name).relative_to(folder).parents][:-1]:
        if (folder / part).is_symlink():
            raise OSError(f"{folder / part} is a link")


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS) + 1, "nb-checksums")


def _checksum(descriptor: int, start: int) -> int:
    """Return the checksum of the block of a file that begins at ``start``, in bytes."""
    buffer = memoryview(bytearray(_CHUNK))
    crc = 0
    for offset in range(start, start + BLOCK, _CHUNK):
        count = os.preadv(descriptor, [buffer], offset)
        crc = zlib.crc32(buffer[:count], crc)
        if count < _CHUNK:
            break
    return crc

"""Checksums of the files of a checkpoint: taken while a file is written, compared while it is read.

There is one for each 16 MiB of a file, so that several threads (and several ranks of a machine) share the work::

    16 KiB -> the sum of its 64-bit words, each times the       16 MiB -> the CRC-32 of its 1024 sums
              odd number of its place, modulo 2**64

A CRC-32 of all bytes, as format 2 of the manifest has it, takes five times as long: 2 GB/s on a core, sums 10.
They are there to notice damage, not forgery, for which files would have to be signed: bits that flip, pieces that are
missing, zeros, at another place, or of another file. One changed word always changes its sum.
"""

from __future__ import annotations

import os
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nb_accelerate.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from typing_extensions import Buffer, Self

BLOCK = 1 << 24  # bytes that one checksum stands for
_ROW = 1 << 14  # bytes that one sum stands for
_CHUNK = 1 << 20  # bytes that are read at once: they stay in the cache of a core
_IN_LINE = 1 << 18  # bytes of a write whose checksum takes less time than to wake up a thread
_FLUSH_EVERY = 1 << 27  # bytes after which the disk is told to begin: else it is idle until the end of the file
_MOST_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written.

    Attributes:
        size: in bytes.
        crc32: of each 16 MiB of the file, in order.
        of_sums: whether they are CRC-32 of sums; else of all bytes.
    """

    size: int
    crc32: tuple[int, ...]
    of_sums: bool = True


class RecordingFile:
    """A new file whose checksums are computed while it is written. Made by `Recorder.open`.

    Args:
        path: of the file; must not be there.
        pool: of threads that compute.
        waiting: others, that wait for the disk.
    """

    def __init__(self, path: Path, pool: ThreadPoolExecutor, waiting: ThreadPoolExecutor) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._pool = pool
        self._waiting = waiting
        self._size = 0
        self._crc32: list[int] = []
        self._digested = 0
        self._row = bytearray()  # the end of what was written, as far as it fills no row
        self._flushed = 0
        self._flush: Future[None] | None = None
        self._closed: Future[None] | None = None
        self._path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._add(memoryview(self._row))
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
        if self._row:
            missing = _ROW - len(self._row)
            self._row += view[:missing]
            view = view[missing:]
            if len(self._row) < _ROW:
                return
            self._add(memoryview(self._row))
        whole = len(view) // _ROW * _ROW
        self._add(view[:whole])
        self._row = bytearray(view[whole:])

    def _add(self, rows: memoryview) -> None:
        """Add whole rows, or the end of the file, to the checksums of their blocks."""
        while rows:
            filled = self._digested % BLOCK
            piece = rows[: BLOCK - filled]
            if not filled:
                self._crc32.append(0)
            self._crc32[-1] = zlib.crc32(_sums(piece), self._crc32[-1])
            self._digested += len(piece)
            rows = rows[len(piece) :]


class Recorder:
    """The files that one rank writes into its folder, and what is known about them.

    Args:
        folder: where it writes.
    """

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


class BlockSums:
    """The checksum of one block, from pieces of it that are whole rows, but for the last.

    Attributes:
        crc32: of what was added.
    """

    def __init__(self) -> None:
        self.crc32 = 0

    def add(self, piece: memoryview) -> None:
        """Add the next piece."""
        self.crc32 = zlib.crc32(_sums(piece), self.crc32)


class Verification:
    """Compares a part of the blocks of some files with what they were, in threads of its own.

    With files in folders below, of which each rank reads a part, it begins when it is made, so that they can be read
    meanwhile. Whoever reads all of a file anyway may `take` it, and compare while reading. `result` compares the rest.

    Args:
        folder: where the files are.
        files: what they were.
        rank: of this process on its machine.
        num_ranks: how many there are on the machine; each reads its part of the blocks.

    Attributes:
        num_threads: processors of the machine that each of its ranks may use.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileRecord], *, rank: int = 0, num_ranks: int = 1) -> None:
        self.num_threads = max(1, min((os.cpu_count() or 1) // num_ranks, _MOST_THREADS))
        self._pool = ThreadPoolExecutor(self.num_threads, "nb-checksums")
        self._folder = folder
        self._files = files
        blocks = [(name, index) for name in sorted(files) for index in range(len(files[name].crc32))]
        self._blocks = blocks[rank::num_ranks]
        self._compared = {block: self._submit(*block) for block in self._blocks if "/" in block[0]}
        self._settled: dict[str, bool] = {}

    def take(self, name: str) -> dict[int, int]:
        """Leave this rank's part of a file to the caller, who is to `settle` it.

        What is taken and never settled is compared in the end.

        Returns:
            The checksums of the blocks that belong to it, by number; none of a file in an old format.
        """
        record = self._files.get(name)
        if record is None or not record.of_sums:
            return {}
        return {index: record.crc32[index] for other, index in self._blocks if other == name}

    def settle(self, name: str, *, is_whole: bool) -> None:
        """Say whether what was taken of a file is as it was written."""
        self._settled[name] = is_whole

    def result(self) -> list[str]:
        """Return a sentence for each file that is not as it was written, as far as this rank has looked."""
        try:
            for block in self._blocks:
                if block not in self._compared and block[0] not in self._settled:
                    self._compared[block] = self._submit(*block)
            found = [sentence for one in self._compared.values() if (sentence := one.result())]
            found += [_differs(self._folder / name) for name, is_whole in self._settled.items() if not is_whole]
            return sorted(set(found))
        finally:
            self.close()

    def close(self) -> None:
        """Leave out what was not compared yet, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, name: str, index: int) -> Future[str]:
        return self._pool.submit(_compare, self._folder / name, self._files[name], index)


def obvious_damage(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Return a sentence for each file that is missing, is a link, or has another size, without reading any.

    Args:
        folder: where the files are.
        files: what they were.
    """
    found = []
    for name, was in files.items():
        path = folder / name
        try:
            _refuse_links(folder, name)
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
            if size != was.size or len(was.crc32) != -(-was.size // BLOCK):
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


def _compare(path: Path, was: FileRecord, index: int) -> str:
    """Return what is wrong with a block of a file; nothing if it is as it was."""
    try:
        with open_file(path) as file:
            if _checksum(file.fileno(), index * BLOCK, of_sums=was.of_sums) != was.crc32[index]:
                return _differs(path)
    except OSError as error:
        return f"{path} cannot be read: {error}."
    return ""


def _differs(path: Path) -> str:
    return f"{path} is not as it was saved: damaged or replaced, its checksum differs."


def _refuse_links(folder: Path, name: str) -> None:
    for part in [*(folder / name).relative_to(folder).parents][:-1]:
        if (folder / part).is_symlink():
            raise OSError(f"{folder / part} is a link")


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS) + 1, "nb-checksums")


def _checksum(descriptor: int, start: int, *, of_sums: bool = True) -> int:
    """Return the checksum of the block of a file that begins at ``start``, in bytes."""
    buffer = memoryview(bytearray(_CHUNK))
    crc = 0
    for offset in range(start, start + BLOCK, _CHUNK):
        count = os.preadv(descriptor, [buffer], offset)
        crc = zlib.crc32(_sums(buffer[:count]) if of_sums else buffer[:count], crc)
        if count < _CHUNK:
            break
    return crc


def _factors() -> Any:
    """Return an odd number for each word of a row, with bits as if drawn at random: those of SplitMix64."""
    bits = np.arange(1, _ROW // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31)) | np.uint64(1)


_FACTORS = _factors()  # part of format 3 of the manifest


def _sums(data: memoryview) -> bytes:
    """Return the sums of the rows of some bytes, 8 bytes each; zeros fill up the last row."""
    whole = len(data) // _ROW * _ROW
    words = np.frombuffer(data[:whole], "<u8") if whole else np.zeros(0, "<u8")
    sums: bytes = np.einsum("ij,j->i", words.reshape(-1, _ROW // 8), _FACTORS).astype("<u8", copy=False).tobytes()
    if whole < len(data):
        sums += _sums(memoryview(bytes(data[whole:]).ljust(_ROW, b"\0")))
    return sums

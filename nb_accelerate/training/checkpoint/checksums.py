"""Checksums of the files of a checkpoint: taken from what is written, and from what is read, beside the disk.

A CRC-32 for each 16 MiB of a file, so that several threads (and several ranks of a machine) share the work. They notice
damage, not forgery::

    save   a buffer of torch's --> the disk            load   the disk --> memory of a tensor, or a mapped file
                               --> a thread: CRC-32                        --> the thread that has read it: CRC-32

What others have written, or what nobody reads, is read here. Nothing here needs torch.
"""

from __future__ import annotations

import functools
import io
import itertools
import os
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.publishing import sync

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future

    from typing_extensions import Buffer, Self

BLOCK = 1 << 24  # bytes that one checksum stands for
_PIECE = 1 << 21  # bytes that a thread reads: a block has a whole number of them
_WINDOW = 1 << 19  # bytes that are read at once: they are in the cache of a core when their checksum is taken
_IN_LINE = 1 << 18  # bytes whose checksum takes less time than to wake up a thread
_FLUSH_EVERY = 1 << 27  # bytes after which the disk is asked to begin: else it is idle until the end of the file
_MOST_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written."""

    size: int
    crc32: tuple[int, ...] | None  # of each 16 MiB, in order; None in manifests that had other checksums


class Recorder:
    """The files that a rank writes into its folder, and what they are when they have reached the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._summing = ThreadPoolExecutor(_threads_for(1), "nb-checksums")
        self._waiting = ThreadPoolExecutor(_MOST_THREADS, "nb-disk")
        self._files: dict[Path, RecordedFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._summing.shutdown()
        self._waiting.shutdown()

    def open(self, path: Path) -> RecordedFile:
        """Open a new file in the folder for writing."""
        file = self._files[path] = RecordedFile(path, self._summing, self._waiting)
        return file

    def records(self) -> dict[str, FileRecord]:
        """Return what all files in the folder and below are, when all of it has reached the disk.

        Those of hooks of the user's are among them. Links, and what is in the folders that they point to, do not belong
        to a checkpoint.
        """
        records = {}
        for where, _, names in os.walk(self._folder):
            for path in (Path(where, name) for name in names):
                try:
                    if path in self._files:
                        record = self._files[path].record()
                    elif stat.S_ISREG(path.lstat().st_mode):
                        sync(path)
                        record = self._read(path)
                    else:
                        continue
                except OSError as error:
                    raise CheckpointError(f"{path} could not be written: {error}") from error
                records[path.relative_to(self._folder).as_posix()] = record
            sync(Path(where))
        return records

    def _read(self, path: Path) -> FileRecord:
        with open_file(path) as file:
            descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
            blocks = [(descriptor, start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]
            return FileRecord(size, tuple(self._summing.map(_crc32_of, *zip(*blocks, strict=True)) if blocks else ()))


class RecordedFile(io.RawIOBase):
    """A new file whose checksums are taken while it is written. Made by `Recorder.open`."""

    def __init__(self, path: Path, summing: ThreadPoolExecutor, waiting: ThreadPoolExecutor) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._summing, self._waiting = summing, waiting
        self._size = self._num_flushed = 0
        self._crc32: list[int] = []
        self._flushes: list[Future[None]] = []

    @override
    def writable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._size

    @override
    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        if len(view) <= _IN_LINE:
            self._take(view)
            self._write(view)
        else:
            taken = self._summing.submit(self._take, view)
            try:
                self._write(view)
            finally:
                taken.result()  # it reads memory that belongs to the caller
        self._size += len(view)
        if self._size - self._num_flushed >= _FLUSH_EVERY and all(flush.done() for flush in self._flushes):
            self._num_flushed = self._size
            self._flushes.append(self._waiting.submit(os.fsync, self._descriptor))
        return len(view)

    @override
    def close(self) -> None:
        if not self.closed:
            super().close()
            self._flushes.append(self._waiting.submit(self._close, self._flushes[:]))

    def record(self) -> FileRecord:
        """Return what was written, when all of it has reached the disk. The file is closed."""
        for flush in self._flushes:  # the system tells an error of the disk to one of them only
            flush.result()
        return FileRecord(self._size, tuple(self._crc32))

    def _write(self, view: memoryview) -> None:
        while view:
            view = view[os.write(self._descriptor, view) :]

    def _take(self, view: memoryview) -> None:
        at = self._size
        while view:
            piece = view[: BLOCK - at % BLOCK]
            if at % BLOCK == 0:
                self._crc32.append(0)
            self._crc32[-1] = zlib.crc32(piece, self._crc32[-1])
            at, view = at + len(piece), view[len(piece) :]

    def _close(self, flushes: list[Future[None]]) -> None:
        try:
            os.fsync(self._descriptor)
        finally:
            wait(flushes)  # they use the descriptor until then
            os.close(self._descriptor)


class Verification:
    """Compares blocks of some files with what they were, while they are read by `open`, or taken from by `see`.

    `result` reads what nobody has read. Files in folders below, which ranks read in parts, are read here at once.
    The ranks of a machine share the blocks; ``rank`` is the number of this one there.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileRecord], *, rank: int = 0, num_ranks: int = 1) -> None:
        self._folder = folder
        self._files = files
        self._pool = ThreadPoolExecutor(_threads_for(num_ranks), "nb-checksums")
        blocks = [(name, index) for name in sorted(files) for index in range(len(files[name].crc32 or ()))]
        self._own = dict.fromkeys(blocks[rank::num_ranks])
        self._seen: dict[tuple[str, int], list[tuple[int, int, int]]] = {}  # begin, end and CRC-32 of parts of a block
        self._begun = {block: self._pool.submit(self._is_whole, *block) for block in self._own if "/" in block[0]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave out what was not compared yet, and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def open(self, path: Path) -> ComparedFile:
        """Open one of the files for reading."""
        return ComparedFile(self, path)

    def see(self, path: Path, start: int, memory: memoryview, descriptor: int | None = None) -> int:
        """Compare memory that holds bytes of a file, from ``start``; fill it from a descriptor first, if there is one.

        Return how many bytes were read: fewer where the file has ended.
        """
        name = path.relative_to(self._folder).as_posix()
        end = start + len(memory)
        cuts = [start, *range(start // _PIECE * _PIECE + _PIECE, end, _PIECE), end]
        done = [
            self._pool.submit(self._see, name, begin, memory[begin - start : stop - start], descriptor)
            for begin, stop in itertools.pairwise(cuts)
        ]
        wait(done)  # they use memory that belongs to the caller
        return sum(piece.result() for piece in done)

    def result(self) -> list[str]:
        """Return a sentence for each file that is not as it was written, as far as this rank has compared them."""
        found = set()
        compared = {block: self._begun.get(block) or self._pool.submit(self._is_whole, *block) for block in self._own}
        for (name, _), is_whole in compared.items():
            path = self._folder / name
            try:
                if not is_whole.result():
                    found.add(f"{path} is not as it was saved: damaged or replaced, its checksum differs.")
            except OSError as error:
                found.add(f"{path} cannot be read: {error}.")
        return sorted(found)

    def _see(self, name: str, start: int, piece: memoryview, descriptor: int | None) -> int:
        block = name, start // BLOCK
        crc, at = 0, start
        while piece:
            window = piece[:_WINDOW]
            if descriptor is not None:
                window = window[: os.preadv(descriptor, [window], at)]
            if block in self._own:
                crc = zlib.crc32(window, crc)
            at, piece = at + len(window), piece[len(window) :]
            if not window:
                break
        if block in self._own:
            self._seen.setdefault(block, []).append((start, at, crc))
        return at - start

    def _is_whole(self, name: str, index: int) -> bool:
        was = self._files[name]
        at, crc, end = index * BLOCK, 0, min(index * BLOCK + BLOCK, was.size)
        with open_file(self._folder / name) as file:
            for begin, stop, of_part in [*sorted(self._seen.get((name, index), ())), (end, end, 0)]:
                if begin >= at:  # else it was seen twice
                    crc = _joined(_crc32_of(file.fileno(), at, begin, crc), of_part, stop - begin)
                    at = stop
        return was.crc32 is not None and crc == was.crc32[index]


class ComparedFile(io.RawIOBase):
    """A file of a checkpoint, which is compared while it is read. Made by `Verification.open`."""

    def __init__(self, verification: Verification, path: Path) -> None:
        self._verification, self._path = verification, path
        self._file = open_file(path)
        self._at = 0

    @override
    def close(self) -> None:
        self._file.close()
        super().close()

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, os.fstat(self._file.fileno()).st_size)[whence]
        return self._at

    @override
    def readinto(self, buffer: Any) -> int:
        view, descriptor = memoryview(buffer).cast("B"), self._file.fileno()
        if len(view) <= _IN_LINE:  # headers; some are read twice
            count = os.preadv(descriptor, [view], self._at)
        else:
            count = self._verification.see(self._path, self._at, view, descriptor)
        self._at += count
        return count


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


def _threads_for(num_ranks: int) -> int:
    return max(1, min((os.cpu_count() or 1) // num_ranks, _MOST_THREADS))


def _crc32_of(descriptor: int, start: int, end: int, crc: int = 0) -> int:
    """Return the checksum of what a file has from ``start`` to ``end``, after bytes whose checksum is ``crc``."""
    buffer = memoryview(bytearray(min(_WINDOW, end - start)))
    while start < end:
        count = os.preadv(descriptor, [buffer[: end - start]], start)
        if not count:
            raise OSError("it has become shorter")
        crc, start = zlib.crc32(buffer[:count], crc), start + count
    return crc


def _joined(first: int, second: int, length: int) -> int:
    """Return the checksum of two parts joined; ``length`` is the number of bytes of the second.

    As zlib's crc32_combine, which Python does not have: polynomials modulo 2, the highest power in the lowest bit.
    """
    power = 0
    while length >> power:
        if length >> power & 1:
            first = _product(_power_of_x(power + 3), first)
        power += 1
    return first ^ second


@functools.cache
def _power_of_x(exponent: int) -> int:
    """Return x to the power of ``2**exponent``."""
    return _product(_power_of_x(exponent - 1), _power_of_x(exponent - 1)) if exponent else 1 << 30


def _product(one: int, other: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (0xEDB88320 if other & 1 else 0)
    return product

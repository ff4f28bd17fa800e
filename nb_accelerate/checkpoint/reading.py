"""Read large files by several threads, with their checksums compared on the way.

What `torch.save` wrote is read into new memory::

    torch maps the file and makes tensors in the mapping --> which bytes of the file belong to which storage
    windows of 512 KiB, in order: inside one storage     --> read straight into its new memory --+--> sums of the window
                                else                     --> read, then copied to where it goes -+    --> of the block

Each byte is read once, and its sum taken while it is in the cache of the core that has read it.

Weights in safetensors are copied into the model later, from the mapping of the file. Their sums are taken in this
mapping: what is compared is what will be copied, and the pages are in place by then.
"""

from __future__ import annotations

import bisect
import copy
import ctypes
import json
import os
import struct
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from nb_accelerate.checkpoint.checksums import BLOCK, BlockSums, open_file
from nb_accelerate.checkpoint.files import bytes_of, read
from nb_accelerate.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from nb_accelerate.checkpoint.checksums import Verification

_WINDOW = 1 << 19
"""Bytes that are read at once: with their copy they stay in the cache of a core until their sums are taken."""

_MOST_THREADS = 8

_POPULATE = 23
"""Advice to the system, MADV_POPULATE_WRITE of Linux 5.14: give all of a range its memory at once."""

_LOCAL_HEADER = 30
"""Bytes of the header before each file of a zip archive, without its name and extra field."""


@dataclass(frozen=True)
class _Piece:
    """Bytes of the file that belong to one storage.

    Attributes:
        start: where they begin in the file.
        memory: where they go to, or are.
    """

    start: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.start + len(self.memory)


def read_in_memory(path: Path, *, if_trusted: str, compared: Verification | None = None, **kwargs: Any) -> Any:
    """Return what `torch.load` makes of a file, on the CPU.

    Nothing of it depends on the file any more, which may be removed or replaced.

    Args:
        path: of the file.
        if_trusted: what to write to allow a file to run any code.
        compared: is told whether the file is as it was written; not used with ``kwargs``, or if the file is of the
            old format, which is no zip archive.
        **kwargs: those of `torch.load`.

    Raises:
        CheckpointError: the file would run code, or was damaged.
    """
    if kwargs or not zipfile.is_zipfile(path):  # they may change what torch maps; the old format cannot be mapped
        return read(path, "cpu", if_trusted=if_trusted, **kwargs)
    mapped = read(path, "cpu", if_trusted=if_trusted, mmap=True)
    own: dict[tuple[int, int], torch.UntypedStorage] = {}
    pieces: list[tuple[int, memoryview]] = []  # addresses in the mapping, and where these bytes go to
    kept: list[Any] = []  # the mapping, until all has been read
    in_memory: dict[int, torch.Tensor] = {}  # by the tensor that was mapped, which may occur more than once

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in in_memory:
            in_memory[id(leaf)] = move(leaf) if is_plain(leaf) else copy.deepcopy(leaf)
            kept.append(leaf)  # else another one may get its id
        return in_memory[id(leaf)]

    def is_plain(leaf: torch.Tensor) -> bool:
        is_view = leaf.is_conj() or leaf.is_neg()  # of a storage with other values
        return type(leaf) in {torch.Tensor, torch.nn.Parameter} and leaf.layout is torch.strided and not is_view

    def move(leaf: torch.Tensor) -> torch.Tensor:
        storage = leaf.untyped_storage()
        key = storage.data_ptr(), storage.nbytes()
        if key not in own:
            fresh = torch.empty(storage.nbytes(), dtype=torch.uint8)
            own[key] = fresh.untyped_storage()
            if storage.nbytes():
                memory: Any = fresh.numpy()
                pieces.append((storage.data_ptr(), memoryview(memory)))
        kept.append(leaf.data)
        with torch.no_grad():
            leaf.data = torch.empty(0, dtype=leaf.dtype).set_(
                own[key], leaf.storage_offset(), leaf.shape, leaf.stride()
            )
        return leaf

    found = tree_map(moved, mapped)
    try:
        with open_file(path) as file:
            placed = _placed(pieces, file.fileno(), path)
            if placed is None:
                return read(path, "cpu", if_trusted=if_trusted)
            _read_blocks(file.fileno(), placed, path.name, compared)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return found


def compare_tensors(path: Path, tensors: Mapping[str, Any], compared: Verification) -> None:
    """Compare the part of a file of weights that belongs to this rank, where its tensors are.

    Args:
        path: of the file. Only safetensors are compared here; `Verification.result` compares all others.
        tensors: all that `nb_accelerate.checkpoint.files.load_state_dict` has returned for it.
        compared: is told whether the file is as it was written.

    Raises:
        CheckpointError: it cannot be read any more.
    """
    if path.suffix != ".safetensors" or any(one.device.type != "cpu" for one in tensors.values()):
        return
    try:
        with open_file(path) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            starts = {name: 8 + length + header[name]["data_offsets"][0] for name in tensors}
            pieces = [_Piece(starts[name], bytes_of(one)) for name, one in tensors.items() if one.numel()]
            pieces.sort(key=lambda piece: piece.start)
            _read_blocks(file.fileno(), pieces, path.name, compared, is_there=True)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _read_blocks(
    descriptor: int, pieces: list[_Piece], name: str, compared: Verification | None, *, is_there: bool = False
) -> None:
    """Read all of a file into its places, and compare what belongs to this rank.

    Args:
        descriptor: of the open file.
        pieces: the places, in the order of the file.
        name: of the file in its checkpoint.
        compared: is told whether the file is as it was written; None if nobody asks.
        is_there: the pieces hold their bytes already, and are only compared.
    """
    expected = compared.take(name) if compared is not None else {}
    size = os.fstat(descriptor).st_size
    # Threads of torch would do it too, and spin while they wait for each other: twice the time of the processors.
    num_threads = min(os.cpu_count() or 1, _MOST_THREADS) if compared is None else compared.num_threads
    with ThreadPoolExecutor(num_threads, "nb-reading") as pool:
        blocks = {
            index: pool.submit(
                _read_block,
                descriptor,
                index * BLOCK,
                size,
                pieces,
                with_sums=index in expected,
                is_there=is_there,
            )
            for index in range(-(-size // BLOCK))
            if index in expected or not is_there
        }
    sums = {index: block.result() for index, block in blocks.items()}
    if compared is not None and expected:
        compared.settle(name, is_whole=all(sums.get(index) == expected[index] for index in expected))


def _placed(pieces: list[tuple[int, memoryview]], descriptor: int, path: Path) -> list[_Piece] | None:
    """Convert addresses in the mapping of a file to offsets in it; None if they fit no beginning of the mapping.

    The mapping begins with the first byte of the file, at a multiple of the page size, and each storage where a record
    of the zip archive begins.
    """
    pieces.sort(key=lambda piece: piece[0])
    if not pieces:
        return []
    starts = set(_starts_of_records(descriptor, path))
    addresses = [address for address, _ in pieces]
    page = os.sysconf("SC_PAGE_SIZE")
    bases = {addresses[0] - start for start in starts}
    for base in sorted(bases):
        if base % page == 0 and all(address - base in starts for address in addresses):
            return [_Piece(address - base, memory) for address, memory in pieces]
    return None


def _starts_of_records(descriptor: int, path: Path) -> list[int]:
    with zipfile.ZipFile(path) as archive:
        headers = [record.header_offset for record in archive.infolist()]
    starts = []
    for header in headers:
        lengths = os.pread(descriptor, 4, header + _LOCAL_HEADER - 4)
        name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
        starts.append(header + _LOCAL_HEADER + name + extra)
    return starts


def _read_block(
    descriptor: int, start: int, size: int, pieces: list[_Piece], *, with_sums: bool, is_there: bool
) -> int:
    """Read a block of a file of so many bytes into its places, and return its checksum, or 0 without sums.

    Raises:
        OSError: it cannot be read, or has become shorter.
    """
    sums = BlockSums()
    scratch = memoryview(bytearray(_WINDOW))
    index = max(bisect.bisect_right(pieces, start, key=lambda piece: piece.start) - 1, 0)
    for offset in range(start, min(start + BLOCK, size), _WINDOW):
        while index < len(pieces) and pieces[index].end <= offset:
            index += 1
        count = min(_WINDOW, size - offset)
        first = pieces[index] if index < len(pieces) else None
        is_inside = first is not None and first.start <= offset and offset + count <= first.end
        window = first.memory[offset - first.start :][:count] if first is not None and is_inside else scratch[:count]
        if not (is_inside and is_there):
            if is_inside:
                _populate(window)
            if os.preadv(descriptor, [window], offset) != count:
                raise OSError("it has become shorter")
        if not is_inside and not is_there:
            stop = bisect.bisect_left(pieces, offset + count, key=lambda piece: piece.start)
            for piece in pieces[index:stop]:
                begin, end = max(piece.start, offset), min(piece.end, offset + count)
                piece.memory[begin - piece.start : end - piece.start] = window[begin - offset : end - offset]
        if with_sums:
            sums.add(window)
    return sums.crc32


def _populate(memory: memoryview) -> None:
    """Ask the system for the pages of some memory at once, where it can: else each page costs a page fault."""
    if sys.platform == "linux":
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        page = os.sysconf("SC_PAGE_SIZE")
        begin = address // page * page
        _C_LIBRARY.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + len(memory) - begin), _POPULATE)


_C_LIBRARY = ctypes.CDLL(None)

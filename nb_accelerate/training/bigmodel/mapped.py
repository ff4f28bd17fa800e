"""Weights as views of safetensors files. Each file is mapped once.

::

    file     | header | a.weight | a.bias | b.weight |
                           ^         ^        ^            private and copy-on-write: one copy in memory for all
    tensors            files["a.weight"] ...               processes, until one of them changes its numbers

A weight at a place that does not fit its dtype, and the weights of files on a network, where page faults are slow, are
read into memory instead, when they are first asked for.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import math
import mmap
import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from typing_extensions import override

from nb_accelerate.base.devices import CPU
from nb_accelerate.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator


_LONGEST = 100_000_000  # bytes of a header, at most: the limit of the format's own library

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip

_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name)
    for code, name in _NAMES.items()
    if hasattr(torch, name)  # the last two came with torch 2.7 and 2.8
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a weight is."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file at which it begins
    end: int  # byte after its last


def read_header(file: Path, descriptor: int) -> dict[str, TensorEntry]:
    """Return the weights of an open file, in the order in which they follow each other.

    The format ([safetensors](https://github.com/huggingface/safetensors#format)): the length of the header in 8 bytes,
    a header in JSON, and the numbers of all weights without gaps.
    """
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LONGEST):
            raise ValueError(f"it has {size} bytes, and its first 8 announce a header of {length}")
        header = json.loads(os.pread(descriptor, length, 8))
        kind = (header.pop("__metadata__", None) or {}).get("format", "pt")
        entries = {name: _entry(file, 8 + length, name, fields) for name, fields in header.items()}
        entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
        before = 8 + length
        for name, entry in entries.items():
            if entry.start != before:
                raise ValueError(f"{name} does not begin where the weight before it ends")
            before = entry.end
        if before != size:
            raise ValueError(f"it has {size} bytes, and its header says {before}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read, it may have been cut off or damaged: {error}") from error
    if kind != "pt":
        raise CheckpointError(f"{file} was saved by {kind}, and not by PyTorch.")
    return entries


def _entry(file: Path, data: int, name: str, fields: dict[str, Any]) -> TensorEntry:
    (start, end), shape = fields["data_offsets"], fields["shape"]
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise ValueError(f"{name} has a shape or offsets that are no sizes")
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"{name} is of dtype {fields['dtype']!r}, which this torch ({torch.__version__}) has not")
    dtype = _DTYPES[fields["dtype"]]
    if fields["dtype"] == "F4":  # two numbers a byte
        shape = [*shape[:-1], shape[-1] // 2]
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} of shape {shape} and {dtype} does not take {end - start} bytes")
    return TensorEntry(file, dtype, tuple(shape), data + start, data + end)


_WILLNEED = 3
_POPULATE_READ = 22  # Linux 5.14
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

# Seconds after which the system is asked again. It takes longer to answer than all else that precedes a block.
_ASKED_AGAIN = 0.1


class MajorFaults:
    """How often this process has had to wait for a page of a file."""

    def __init__(self) -> None:
        self._number = 0
        self._asked = -math.inf  # seconds

    @property
    def number(self) -> int:
        """The number, at most a tenth of a second old."""
        now = time.monotonic()
        if now >= self._asked + _ASKED_AGAIN:
            self._asked, self._number = now, resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        return self._number


def make_present(begin: int, end: int) -> None:
    """Bring all pages of a mapped range into memory, without the GIL, which `mmap.madvise` would keep.

    Where the system cannot, each page comes when it is read.
    """
    if _LIBC is None:
        return
    at, length = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
    # The first asks the disk for everything, however little the system reads ahead, and the second waits for it.
    if _LIBC.madvise(at, length, _WILLNEED) or _LIBC.madvise(at, length, _POPULATE_READ):
        error = ctypes.get_errno()
        if error not in (errno.EINVAL, errno.ENOSYS):  # what an older kernel says
            raise OSError(error, os.strerror(error))


_BLOCK = 8 << 20  # bytes that a thread reads at once

_THREADS = 4

_ALIGNMENT = 64  # bytes: weights that are read begin at multiples of it, as torch's own do

# File systems whose page faults wait for a network, or for another process. `fuse.NAME` too.
_REMOTE = {
    "9p", "afpfs", "afs", "beegfs", "ceph", "cifs", "fuse", "gpfs", "lustre", "macfuse", "ncpfs", "nfs", "nfs4",
    "osxfuse", "smb3", "smbfs", "webdav",
}  # fmt: skip

# Memory of a map that is not written to needs no reserve: a file may be larger than the memory. Python 3.13 has a name.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0

_owners: weakref.WeakValueDictionary[int, WeightFiles] = weakref.WeakValueDictionary()  # whose weight is at an address


def files_of(tensor: torch.Tensor) -> WeightFiles | None:
    """Return the files that a tensor is a view of; None for any other tensor. `WeightFiles.name_of` is its name."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    return _owners.get(tensor.untyped_storage().data_ptr())


def check_files(tensors: Iterable[Any]) -> None:
    """Check the files of those of some objects that are views of any, before their numbers are read."""
    for tensor in tensors:
        files = files_of(tensor) if isinstance(tensor, torch.Tensor) else None
        if files is not None:
            files.check([files.name_of(tensor)])


class WeightFiles(Mapping[str, torch.Tensor]):
    """The weights of safetensors files by name, without reading them.

    A weight is a CPU tensor at the same place each time. Numbers that are written to it stay in memory: the files never
    change. The files stay mapped as long as there is one of their tensors.

    Args:
        files: they may be removed or replaced afterwards, and must not be changed or cut off in place.
        mmap: whether to map them; else weights are read into memory when they are first asked for. By default files
            on a network are read if they fit into memory.

    Attributes:
        faults: how often this process has had to wait for a page, of any file.
    """

    def __init__(self, files: Iterable[Path], *, mmap: bool | None = None) -> None:
        self._given = tuple(Path(file) for file in files), mmap
        maps = _are_better_mapped(self._given[0]) if mmap is None else mmap
        self._files = [_File(file, self, maps=maps) for file in self._given[0]]
        self._at = {name: file for file in self._files for name in file.entries}
        self._names = {file.addresses[name]: name for name, file in self._at.items() if self.nbytes([name])}
        self.faults = MajorFaults()
        _owners.update(dict.fromkeys(self._names, self))

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        files, mmap = self._given
        return _open, (files, mmap)

    @override
    def __getitem__(self, name: str) -> torch.Tensor:
        return self._at[name].tensor(name)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._at

    @override
    def __len__(self) -> int:
        return len(self._at)

    def entry(self, name: str) -> TensorEntry:
        return self._at[name].entries[name]

    def name_of(self, tensor: torch.Tensor) -> str:
        """Return the name that one of these weights has in its file."""
        return self._names[tensor.untyped_storage().data_ptr()]

    def nbytes(self, names: Iterable[str]) -> int:
        """Return the bytes that weights take in their files."""
        return sum(self.entry(name).end - self.entry(name).start for name in names)

    def check(self, names: Collection[str]) -> None:
        """Check that the files of weights are as they were when they were opened. What is in memory needs none.

        Called whenever a block computes, so it takes microseconds.
        """
        for file in dict.fromkeys(self._at[name] for name in names):
            file.check(names)

    def fetch(self, names: Iterable[str]) -> None:
        """Bring weights into memory, without the GIL."""
        groups: dict[_File, list[str]] = {}
        for name in names:
            groups.setdefault(self._at[name], []).append(name)
        for file, group in groups.items():
            file.fetch(sorted(group, key=lambda name: self.entry(name).start))  # in the order in which they lie there


def _open(files: tuple[Path, ...], mmap: bool | None) -> WeightFiles:
    return WeightFiles(files, mmap=mmap)


class _Memory(mmap.mmap):
    """Memory that tensors are views of. They keep it alive, and with it all that belongs to it."""

    owner: WeightFiles

    @property
    def address(self) -> int:
        return torch.frombuffer(self, dtype=torch.uint8).data_ptr()


class _File:
    """One file: mapped, as far as its weights can be used where they are, and memory for the others."""

    def __init__(self, path: Path, owner: WeightFiles, *, maps: bool) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
        weakref.finalize(self, os.close, self._descriptor)
        self._identity = self._stat()
        self.entries = read_header(path, self._descriptor)
        self._mapped = {name for name, entry in self.entries.items() if maps and not entry.start % entry.dtype.itemsize}
        self.addresses: dict[str, int] = {}
        self._memory: dict[str, tuple[_Memory, int]] = {}
        self._place(owner)
        self._unread = self.entries.keys() - self._mapped
        self._reading = threading.Lock()

    def _place(self, owner: WeightFiles) -> None:
        """Decide where each weight is: in the map of the file, or in memory of its own."""
        if self._mapped:
            whole = self._make(self._descriptor, self._identity[0], owner)
            self._memory = {name: (whole, self.entries[name].start) for name in self._mapped}
        own = [entry for entry in self.entries.items() if entry[0] not in self._mapped]
        sizes = [-(-(entry.end - entry.start) // _ALIGNMENT) * _ALIGNMENT for _, entry in own]
        if sum(sizes):
            room = self._make(-1, sum(sizes), owner)
            places = itertools.accumulate(sizes, initial=0)
            self._memory |= {name: (room, place) for (name, _), place in zip(own, places, strict=False)}
        self.addresses = {name: memory.address + place for name, (memory, place) in self._memory.items()}

    def _make(self, descriptor: int, length: int, owner: WeightFiles) -> _Memory:
        flags = mmap.MAP_PRIVATE | _NORESERVE | (mmap.MAP_ANONYMOUS if descriptor < 0 else 0)
        memory = _Memory(descriptor, length, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        memory.owner = owner
        return memory

    def tensor(self, name: str) -> torch.Tensor:
        entry = self.entries[name]
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self._read([name])
        memory, place = self._memory[name]
        flat = torch.frombuffer(memory, dtype=entry.dtype, count=math.prod(entry.shape), offset=place)
        return flat.view(entry.shape)

    def _stat(self) -> tuple[int, int]:
        """Return size and time of the file that was opened, also if its name belongs to another one now, or to none."""
        try:
            now = os.fstat(self._descriptor)
        except OSError as error:  # removed on a network disk
            raise CheckpointError(f"{self.path} cannot be read any more: {error.strerror}") from error
        return now.st_size, now.st_mtime_ns

    def check(self, names: Collection[str]) -> None:
        if self._stat() == self._identity:
            return
        used = [name for name in names if name in self._mapped or name in self._unread]
        if not used:
            return
        was, now = self._identity[0], self._stat()[0]
        what = f"cut off from {was} to {now} bytes" if now < was else "changed"
        raise CheckpointError(
            f"{self.path} was {what} after it had been opened, and {used[0]} comes from there. Load the model again, "
            "and leave the file as it is while the model is in use."
        )

    def fetch(self, names: list[str]) -> None:
        self.check(names)
        self._read(names)
        try:
            for span in self._spans(names):
                make_present(*span)
        except OSError as error:
            self.check(names)  # cut off just now?
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error

    def _spans(self, names: list[str]) -> list[tuple[int, int]]:
        """Return the addresses, begin and end, of the pages of mapped weights. Neighbours are in one range."""
        spans: list[tuple[int, int]] = []
        for name in names:
            if name in self._mapped:
                begin = self.addresses[name] // mmap.PAGESIZE * mmap.PAGESIZE
                end = -(-(self.addresses[name] + self._length(name)) // mmap.PAGESIZE) * mmap.PAGESIZE
                if spans and begin <= spans[-1][1]:
                    begin = spans.pop()[0]
                spans.append((begin, end))
        return spans

    def _length(self, name: str) -> int:
        return self.entries[name].end - self.entries[name].start

    def _read(self, names: Iterable[str]) -> None:
        """Read those weights that are not mapped into their memory, unless they are there."""
        # One thread at a time: another one would take the weight as read while half of its numbers are there.
        with self._reading:
            wanted = self._unread.intersection(names)
            if not wanted:
                return
            blocks = [
                (name, offset, min(_BLOCK, self._length(name) - offset))
                for name in wanted
                for offset in range(0, self._length(name), _BLOCK)
            ]
            if len(blocks) == 1:
                self._read_block(*blocks[0])
            else:
                with ThreadPoolExecutor(_THREADS, "nb-weights") as pool:
                    list(pool.map(self._read_block, *zip(*blocks, strict=True)))
            self.check(wanted)
            self._unread -= wanted

    def _read_block(self, name: str, offset: int, length: int) -> None:
        memory, place = self._memory[name]
        with memoryview(memory)[place + offset : place + offset + length] as room:
            done = 0
            while done < length:
                count = os.preadv(self._descriptor, [room[done:]], self.entries[name].start + offset + done)
                if not count:
                    self.check([name])
                    raise CheckpointError(f"{self.path} ends before {name} does.")
                done += count


def _are_better_mapped(files: Iterable[Path]) -> bool:
    """Return whether page faults of files are fast, or they are too large to be read into memory."""
    places = [file.resolve() for file in files]  # of links in a cache of downloads, where they lead to
    is_remote = False
    for folder in {place.parent for place in places}:
        around = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
        around.sort(key=lambda part: len(part.mountpoint))  # of several at one place, the last covers the others
        is_remote |= bool(around) and around[-1].fstype.partition(".")[0].lower() in _REMOTE
    return not is_remote or sum(place.stat().st_size for place in places if place.is_file()) > CPU.memory_left(1)

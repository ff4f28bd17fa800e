"""What a checkpoint consists of: its files with their sizes and checksums, and what else is known about it.

It is the file ``checkpoint.json``. Checksums are taken after a file was written, and compared while it is loaded: a
CRC-32 for each 16 MiB, so that several threads (and several ranks of a machine) share the work. They notice
damage, not forgery. Nothing here needs torch, so that a notebook can list checkpoints without it.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from nb_accelerate.base.version import __version__
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.names import MANIFEST_NAME, is_plain
from nb_accelerate.training.checkpoint.publishing import published, sync

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


_FORMAT = 4  # 3: other checksums of files, which are not compared; 2: as 4; 1: no checksum of the manifest
_LARGEST = 1 << 28  # bytes of JSON that are read at most


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known about a checkpoint."""

    step: int  # batches in the current accumulation window
    num_processes: int
    ranks: list[int]  # those that saved: all, or the main one if only that called `save_state`, or those of one machine
    epochs: list[int]  # that of each loader, from 0
    seeds: list[int | None]  # with which it shuffles; None where it has no seed
    positions: list[int] | None = None  # batches of that epoch that each rank had; None in files of older versions
    # of all ranks together; None where it has no fixed size
    rows_per_step: list[int | None] = field(default_factory=list)
    # of its dataset; None where it does not say, and none in files of older versions
    num_rows: list[int | None] = field(default_factory=list)
    # batches that each rank has trained with since the beginning; None if nobody has counted
    global_step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # the class of what was saved, by file
    files: dict[str, FileRecord] = field(default_factory=dict)
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "nb_accelerate": __version__,
            "torch": str(getattr(sys.modules.get("torch"), "__version__", "")),
            "python": ".".join(map(str, sys.version_info[:3])),
        }
    )
    # processes, or groups that share rows, that read rows of their own; None: each process did
    num_readers: int | None = None
    # ids of the launch of the run, one for each machine; none in files of older versions
    launches: list[str] = field(default_factory=list)
    # in UTC. For people: clocks may be set
    saved_at: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="milliseconds"))

    @property
    def readers(self) -> int:
        """Processes, or groups of them that share rows, that read rows of their own."""
        return self.num_processes if self.num_readers is None else self.num_readers

    def write(self, folder: Path) -> None:
        """Write this into a folder, through to the disk."""
        content = {"format": _FORMAT, **asdict(self)}
        content["crc32"] = _checksum_of(content)
        with (folder / MANIFEST_NAME).open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return what is known about a checkpoint, or None for one that says nothing, as those of accelerate."""
        path = folder / MANIFEST_NAME
        if not os.path.lexists(path):
            return None
        try:
            with open_file(path) as file:
                content: Any = json.loads(file.read(_LARGEST))
            found = content.pop("format")
            if found in (2, 3, _FORMAT) and content.pop("crc32") != _checksum_of({"format": found, **content}):
                raise ValueError("its checksum is not that of its content")
            if found in (1, 2, 3, _FORMAT):  # a list, say, is in no set
                return _checked(content, has_crc32=found != 3)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}). Load another checkpoint, or an intact copy of "
                "this one."
            ) from error
        raise CheckpointError(
            f"{path} is of format {found!r}, which nb_accelerate {__version__} does not know. It is damaged, or a "
            "newer nb_accelerate has written it, which can read it."
        )


def examine(folder: Path) -> tuple[Path, Manifest | None, list[str]]:
    """Examine a checkpoint without reading more than its manifest.

    Return where its files are, what is known about it, and a sentence for each file that is obviously damaged.
    """
    where = published(folder, "state")
    try:
        manifest = Manifest.read(where)
    except CheckpointError as error:
        return where, None, [str(error)]
    return where, manifest, [] if manifest is None else obvious_damage(where, manifest.files)


def _checksum_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _checked(content: dict[str, Any], *, has_crc32: bool) -> Manifest:
    """Return what was read, if everything is of the kind that is written."""
    # What older versions did not write.
    content = {"files": {}, "versions": {}, "saved_at": "", **content}
    content.setdefault("ranks", list(range(min(content["num_processes"], 1 << 20))))
    if not _is_a(content["files"], dict[str, dict[str, int | list[int]]]):
        raise TypeError("its files are no records")
    content["files"] = {
        name: FileRecord(file["size"], tuple(file["crc32"]) if has_crc32 else None)
        for name, file in content["files"].items()
    }
    odd = [name for name in content["files"] if not is_plain(name)]
    if odd:
        raise ValueError(f"{odd[0]!r} is not the name of a file in this folder")
    kinds = {name: kind for name, kind in get_type_hints(Manifest).items() if name in content}
    for name, kind in kinds.items():
        if name != "files" and not _is_a(content[name], kind):
            raise TypeError(f"its {name} is {content[name]!r:.60}")
    return Manifest(**{name: content[name] for name in kinds})


def _is_a(value: Any, kind: Any) -> bool:
    """Return whether a value of JSON is of a type such as ``dict[str, int | None]``."""
    of = get_args(kind)
    if isinstance(kind, UnionType):
        return any(_is_a(value, member) for member in of)
    if get_origin(kind) is list:
        return type(value) is list and all(_is_a(item, of[0]) for item in value)
    if get_origin(kind) is dict:
        return type(value) is dict and all(_is_a(item, of[1]) for item in value.values())
    return type(value) is kind

"""What a checkpoint consists of: its files with their sizes and checksums, and what else is known about it.

It is the file ``checkpoint.json``. Nothing here needs torch, so that a notebook can list checkpoints without it.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.version import __version__
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.checksums import FileRecord, obvious_damage, open_file
from nb_accelerate.training.checkpoint.names import MANIFEST_NAME, is_plain
from nb_accelerate.training.checkpoint.publishing import published

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_FORMAT = 4
_LARGEST = 1 << 28  # bytes of JSON that are read at most


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known about a checkpoint."""

    step: int  # batches in the current accumulation window
    num_processes: int
    ranks: list[int]  # which saved: all, the main one if no other called `save_state`, or the ranks of one machine
    epochs: list[int]  # of each loader, from 0
    seeds: list[int | None]  # with which it shuffles; None where it has no seed
    positions: list[int] = field(default_factory=list)  # batches of that epoch that each rank had
    # of all ranks together; None where it has no fixed size
    rows_per_step: list[int | None] = field(default_factory=list)
    num_rows: list[int | None] = field(default_factory=list)  # of its dataset; None where it does not say
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
    launches: list[str] = field(default_factory=list)  # ids of the launch of the run, one for each machine
    # in UTC. For people: clocks may be set
    saved_at: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="milliseconds"))

    @property
    def num_data_ranks(self) -> int:
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
            if content["format"] == _FORMAT:
                if content.pop("crc32") != _checksum_of(content):
                    raise ValueError("its checksum does not fit its content")
                odd = [name for name in content["files"] if not is_plain(name)]
                if odd:
                    raise ValueError(f"{odd[0]!r} is not the name of a file in this folder")
                content["files"] = {
                    name: FileRecord(file["size"], tuple(file["crc32"])) for name, file in content["files"].items()
                }
                return cls(**{field.name: content[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise CheckpointError(
                f"{path} is damaged ({type(error).__name__}: {error}). Load another checkpoint, or an intact copy of "
                "this one."
            ) from error
        raise CheckpointError(
            f"{path} is of format {content['format']!r}, which nb_accelerate {__version__} does not know. It is "
            "damaged, or a newer nb_accelerate has written it, which can read it."
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

"""Open a checkpoint: see what belongs to it, and compare its files with what they were while they are read."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.checksums import Verification
from nb_accelerate.training.checkpoint.files import read
from nb_accelerate.training.checkpoint.manifest import examine
from nb_accelerate.training.checkpoint.names import MANIFEST_NAME, METADATA_NAME, OF_A_STATE, OF_SHARDS
from nb_accelerate.training.checkpoint.shared_staging import gather_from_all_ranks, run_on_all_ranks
from nb_accelerate.training.checkpoint.state import RANDOM_NUMBERS, SAVED_BY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nb_accelerate.training.checkpoint.manifest import Manifest
    from nb_accelerate.training.checkpoint.shared_staging import ThisRank
    from nb_accelerate.training.comm import Collectives

T = TypeVar("T")

IF_TRUSTED = "write load_state(..., load_kwargs={'weights_only': False})."
"""What to write to allow files of a checkpoint to run any code."""

_RANDOM_NUMBERS = re.compile(RANDOM_NUMBERS.format(r"\d+"))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that can be read. Made by `open_checkpoint`."""

    folder: Path
    asked_for: Path  # the folder that was given, for messages
    there: frozenset[str]
    manifest: Manifest | None

    def has_shards(self, folder: str) -> bool:
        """Return whether a folder of it holds parts that each rank has written."""
        return f"{folder}/{METADATA_NAME}" in self.there

    def all_files(self) -> list[str]:
        """Return the names of all files, those in folders below too, as ``part/file``."""
        if self.manifest is not None and self.manifest.files:
            return list(self.manifest.files)
        return [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()]


def open_checkpoint(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Find the files of a checkpoint, without reading more than its manifest.

    Return the checkpoint, or a sentence for each file of it that is obviously damaged.
    """
    where, manifest, damage = examine(folder)
    if manifest is None and not damage:
        try:
            damage = _damage_without_manifest(where)
        except CheckpointError as error:
            damage = [str(error)]
    if damage:
        return None, damage
    # What is there besides is not part of it, and is not read.
    listed = manifest.files if manifest is not None else {}  # format 1 has listed none
    entries = (*where.iterdir(), *where.glob(f"*/{METADATA_NAME}"))
    there = frozenset(listed or [entry.relative_to(where).as_posix() for entry in entries])
    return Checkpoint(folder=where, asked_for=folder, there=there, manifest=manifest), []


def read_checkpoint(
    folder: Path, read: Callable[[Checkpoint], T], *, collectives: Collectives, this_rank: ThisRank
) -> tuple[T | None, list[str]]:
    """Read a checkpoint, by ``read``, which changes nothing, and compare its checksums meanwhile.

    All ranks call it together; those of one machine share the comparing. Return what ``read`` returned, or a sentence
    for each file of the checkpoint that is not as it was written, on this rank or another.
    """
    opened: list[Checkpoint | None] = []

    def open_here() -> list[str]:
        checkpoint, damage = open_checkpoint(folder)
        opened.append(checkpoint)
        return damage

    damage = _found_on_all(gather_from_all_ranks(collectives, open_here), folder)
    checkpoint = opened[0]
    if checkpoint is None or damage:
        return None, damage
    files = {} if checkpoint.manifest is None else checkpoint.manifest.files
    result: list[T] = []
    error: Exception | None = None
    with Verification(
        checkpoint.folder, files, rank=this_rank.local_rank, num_ranks=this_rank.local_world_size
    ) as compared:
        try:
            result.append(read(checkpoint))
        except Exception as caught:  # it may be the damage that is about to be found
            error = caught
        damage = _found_on_all(gather_from_all_ranks(collectives, compared.result), folder)
    if damage:
        return None, damage

    def raise_error() -> None:
        if error is not None:
            raise error

    run_on_all_ranks(collectives, raise_error)
    return result[0], []


def _found_on_all(damage: list[list[str]], folder: Path) -> list[str]:
    """Return the sentences of all ranks, each once, with a hint if there are several."""
    found = list(dict.fromkeys(sentence for of_rank in damage for sentence in of_rank))
    hint = f"Or {folder / MANIFEST_NAME}, which says how they were, is that of another checkpoint."
    return [*found, hint] if len(found) > 1 else found


def _damage_without_manifest(folder: Path) -> list[str]:
    """Return a sentence if a folder without a manifest cannot be a checkpoint of accelerate; else none."""
    known = sorted(entry.name for entry in folder.iterdir() if OF_A_STATE.fullmatch(entry.name))
    if not known and not any(OF_SHARDS.fullmatch(entry.name) for entry in folder.iterdir()):
        return [f"{folder} holds no checkpoint."]
    odd = [name for name in known if not stat.S_ISREG((folder / name).lstat().st_mode)]
    if odd:
        return [f"{folder / odd[0]} is a link, or no regular file. Put the file itself there."]
    for name in known:
        if _RANDOM_NUMBERS.fullmatch(name):
            states = read(folder / name, "cpu", if_trusted=IF_TRUSTED)
            if isinstance(states, dict) and SAVED_BY in states:
                return [f"{folder / MANIFEST_NAME} is missing, which says what belongs to this checkpoint."]
    return []

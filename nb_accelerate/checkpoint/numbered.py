"""Checkpoints that number themselves: ``checkpoint_0``, ``checkpoint_1``, ..."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from nb_accelerate.checkpoint.agreement import gather_from_all_ranks
from nb_accelerate.checkpoint.loading import damage_on_all_ranks
from nb_accelerate.checkpoint.manifest import Manifest, damage
from nb_accelerate.checkpoint.publishing import published, remove
from nb_accelerate.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from nb_accelerate.checkpoint.sharing import RankIdentity
    from nb_accelerate.comm import Collectives

logger = logging.getLogger("nb_accelerate")

_NUMBERED = re.compile(r"checkpoint_(\d{1,18})")


def numbered(parent: Path) -> list[tuple[int, Path]]:
    """Return the numbers and paths of the folders ``checkpoint_<number>`` that hold something, by number."""
    found = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        match = _NUMBERED.fullmatch(entry.name)
        if match and not entry.is_symlink() and entry.is_dir() and any(entry.iterdir()):
            found.append((int(match[1]), entry))
    return sorted(found)


def newest_whole(parent: Path, *, collectives: Collectives, identity: RankIdentity) -> tuple[Path, int]:
    """Return the newest checkpoint of which nothing is missing or damaged, on all ranks. All ranks call it together.

    A line says which were passed over, and why.

    Returns:
        Its folder, and the number of the next checkpoint, which none that was passed over has either.

    Raises:
        CheckpointError: there are some, and none is whole.
        ConfigError: there is none.
    """
    everywhere = gather_from_all_ranks(collectives, lambda: [number for number, _ in numbered(parent)])
    numbers = sorted(set(everywhere[0]).intersection(*everywhere), reverse=True)
    if not numbers:
        raise ConfigError(f"There is no checkpoint in {parent} yet.")
    passed_over: list[str] = []
    for number in numbers:
        folder = next(path for one, path in numbered(parent) if one == number)
        found = damage_on_all_ranks(folder, collectives=collectives, identity=identity)
        if not found:
            if passed_over and identity.local_rank == 0:
                logger.warning(
                    "%s is loaded, the newest that is whole. Passed over:\n%s", folder, "\n".join(passed_over)
                )
            return folder, max(map(max, everywhere)) + 1
        passed_over.append(f"{folder.name}: {' '.join(found)}")
    raise CheckpointError(f"No checkpoint in {parent} is whole:\n" + "\n".join(passed_over))


def keep_newest(saved: Path, limit: int) -> None:
    """Remove the oldest checkpoints.

    Args:
        saved: that which was saved just now, which stays.
        limit: how many stay. Those that are not whole do not count, so that they never push out one that is; they
            are removed when a newer one stays.
    """
    others = [(number, folder) for number, folder in numbered(saved.parent) if folder != saved]
    whole = [folder for _, folder in others if _looks_whole(folder)]
    stay = {saved, *whole[max(len(whole) - limit + 1, 0) :]}
    newest = max(number for number, folder in [*others, (_number_of(saved), saved)] if folder in stay)
    for number, folder in others:
        if folder not in stay and (folder in whole or number < newest):
            remove(folder)


def _number_of(folder: Path) -> int:
    match = _NUMBERED.fullmatch(folder.name)
    return int(match[1]) if match else -1


def _looks_whole(folder: Path) -> bool:
    """Whether all files are there, and none is cut off; without reading them."""
    where = published(folder, "state")
    try:
        manifest = Manifest.read(where)
    except CheckpointError:
        return False
    return manifest is None or not damage(where, manifest.files, only=())

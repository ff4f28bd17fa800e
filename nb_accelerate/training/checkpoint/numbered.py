"""Checkpoints that number themselves: ``checkpoint_0``, ``checkpoint_1``, ..."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, TypeVar, cast

from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.checkpoint.loading import read_checkpoint
from nb_accelerate.training.checkpoint.manifest import Manifest, examine
from nb_accelerate.training.checkpoint.publishing import published, remove
from nb_accelerate.training.checkpoint.shared_staging import gather_from_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from nb_accelerate.training.checkpoint.loading import Checkpoint
    from nb_accelerate.training.checkpoint.shared_staging import ThisRank
    from nb_accelerate.training.comm import Collectives

logger = logging.getLogger("nb_accelerate")

T = TypeVar("T")

_NUMBERED = re.compile(r"checkpoint_(\d{1,18})")


def checkpoints_in(parent: Path) -> list[tuple[int, Path]]:
    """Return the numbers and paths of the folders ``checkpoint_<number>`` that hold something, by number."""
    checkpoints = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        match = _NUMBERED.fullmatch(entry.name)
        if match and not entry.is_symlink() and entry.is_dir() and any(entry.iterdir()):
            checkpoints.append((int(match[1]), entry))
    return sorted(checkpoints)


def next_number(parent: Path, above: int) -> int:
    """Return the first number above ``above`` whose folder does not exist or is empty."""
    number = above + 1
    while is_taken(parent / f"checkpoint_{number}"):
        number += 1
    return number


def is_taken(folder: Path) -> bool:
    """Return whether something is where a checkpoint is to be saved: a link, a file, or a folder that is not empty."""
    if folder.is_symlink() or not folder.is_dir():
        return os.path.lexists(folder)
    return any(folder.iterdir())


def newest_of_others(parent: Path, launches: Iterable[str]) -> int:
    """Return the number of the newest checkpoint that none of ``launches`` has saved; -1 if there is none."""
    for number, folder in reversed(checkpoints_in(parent)):
        try:
            manifest = Manifest.read(published(folder, "state"))
        except CheckpointError:  # damaged; those below it tell
            continue
        if manifest is None or not set(launches).intersection(manifest.launches):
            return number
    return -1


def read_newest(
    parent: Path,
    read_content: Callable[[Checkpoint], T],
    *,
    collectives: Collectives,
    this_rank: ThisRank,
    first: int = 0,
) -> tuple[T, int]:
    """Read the newest checkpoint in which nothing is missing or damaged, on all ranks. Collective.

    Checkpoints below number ``first`` are not read. A line says which were passed over, and why. Return what was read,
    and the number of the next checkpoint, which none that was passed over has either.
    """
    everywhere = gather_from_all_ranks(
        collectives, lambda: [number for number, _ in checkpoints_in(parent) if number >= first]
    )
    numbers = sorted(set(everywhere[0]).intersection(*everywhere), reverse=True)
    if not numbers:
        raise ConfigError(f"There is no checkpoint in {parent} yet.")
    passed_over: list[str] = []
    for number in numbers:
        folder = dict(checkpoints_in(parent))[number]
        result, damage = read_checkpoint(folder, read_content, collectives=collectives, this_rank=this_rank)
        if not damage:
            if passed_over and this_rank.local_rank == 0:
                logger.warning(
                    "%s is loaded, the newest that is whole. Passed over:\n%s", folder, "\n".join(passed_over)
                )
            free = gather_from_all_ranks(collectives, lambda: next_number(parent, max(map(max, everywhere))))
            return cast("T", result), max(free)
        passed_over.append(f"{folder.name}: {' '.join(damage)}")
    raise CheckpointError(f"No checkpoint in {parent} is whole:\n" + "\n".join(passed_over))


def remove_old(
    saved: Path, limit: int, *, first: int = 0, worth: Callable[[Mapping[str, float]], float] | None = None
) -> None:
    """Remove the oldest checkpoints beside the one ``saved`` just now, or the worst.

    ``limit`` stay: the newest, or the best by ``worth`` of the values that were logged before. Incomplete ones do not
    count, so that they never push out a complete one; they go when a newer one stays. Checkpoints with a number
    below ``first`` are of an earlier run: they stay, and do not count. What cannot be removed stays too, and a line
    says so.
    """
    numbers = {folder: number for number, folder in checkpoints_in(saved.parent) if number >= first or folder == saved}
    others = [folder for folder in numbers if folder != saved]
    metrics: dict[Path, Mapping[str, float]] = {}  # of complete checkpoints: all files are there, and none is cut off
    for folder in others:
        _, manifest, damage = examine(folder)
        if not damage:
            metrics[folder] = {} if manifest is None else manifest.metrics
    whole = list(metrics)
    if worth is not None:
        whole.sort(key=lambda folder: worth(metrics[folder]))  # of equal ones the newest stays
    stay = {saved, *whole[max(len(whole) - limit + 1, 0) :]}
    newest = max(numbers[folder] for folder in stay)
    for folder in others:
        if folder not in stay and (folder in whole or numbers[folder] < newest):
            try:
                remove(folder)
            except OSError as error:  # what was saved is there: the run need not end for this
                logger.warning("%s is over the total_limit, and could not be removed: %s", folder, error)

"""Everything that a run needs to go on: a list of named parts, saved together, and loaded when all have been read.

::

    save   share a staging folder -> collect -> write -> all ranks have -> manifest -> publish it as a whole
    load   manifest -> parts -> random numbers -> weights -> checksums -> all fit, on all ranks -> they are applied
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nb_accelerate.training.checkpoint.background import CheckpointHandle, SaveGroup, saves
from nb_accelerate.training.checkpoint.checksums import record_files
from nb_accelerate.training.checkpoint.files import clean_state_dict_for_safetensors, saved_bytes, write
from nb_accelerate.training.checkpoint.fitting import class_of, number_of
from nb_accelerate.training.checkpoint.manifest import Manifest
from nb_accelerate.training.checkpoint.names import (
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
    shards_of,
)
from nb_accelerate.training.checkpoint.shared_staging import gather_from_all_ranks, run_on_all_ranks
from nb_accelerate.training.process import rng

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.storage import WriteResult

    from nb_accelerate.training.checkpoint.checksums import FileRecord
    from nb_accelerate.training.checkpoint.registry import HostCopies, Progress
    from nb_accelerate.training.checkpoint.sharded import ShardedFolder
    from nb_accelerate.training.checkpoint.shared_staging import GathersObjects, SharedStaging, ThisRank
    from nb_accelerate.training.comm import Collectives

RANDOM_NUMBERS = f"{RNG_STATE_NAME}_{{}}.pkl"
SAVED_BY = "saved_by"
"""A key in the file of random numbers of ours: a checkpoint that has it has a manifest too."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing with a state."""

    file: str
    thing: Any
    loader: int | None = None  # its number, if it is one: ranks have loaders in states that differ
    # looks whether a state fits, given its file, the state and the thing; None where nobody can know
    check: Callable[[str, Any, Any], None] | None = None

    @property
    def is_optimizer(self) -> bool:
        return self.file.startswith(OPTIMIZER_NAME)

    @property
    def folder(self) -> str:
        """The folder that an optimizer is in where each rank writes a part; empty for others, which are in none."""
        return shards_of(self.file) if self.is_optimizer else ""

    def name_on(self, rank: int) -> str:
        """Return the name of the file of a rank: the first one's has the plain name."""
        if self.loader is None or not rank:
            return self.file
        stem, _, ending = self.file.rpartition(".")
        return f"{stem}_rank{rank}.{ending}"


def name_of(first: str, number: int) -> str:
    """Return ``optimizer_2.bin`` for ``optimizer.bin`` and 2."""
    stem, _, ending = first.rpartition(".")
    return f"{stem}_{number}.{ending}" if number else first


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a rank writes, as it was at one moment."""

    weights: list[Mapping[str, Any]]  # of the models; none on ranks that write none
    states: list[tuple[str, Any]]  # the name of each other file, and what is in it
    folders: list[ShardedFolder]  # this rank writes a part of each
    manifest: Manifest  # without files
    safe_serialization: bool


def collect(
    shared: SharedStaging,
    this_rank: ThisRank,
    *,
    weights: Sequence[Mapping[str, Any]],
    folders: Sequence[ShardedFolder],
    parts: Sequence[Part],
    loaders: Sequence[Any],
    step: int,
    progress: Progress,
    safe_serialization: bool,
) -> Content:
    """Return what a rank is to write, without copies. Among planned ``folders`` may be weights and parts."""
    publishes = shared.staging is not None
    left = {id(state) for state in weights}  # by hooks, which may save weights in another way
    sharded = {id(folder.state) for folder in folders}
    names = {folder.name for folder in folders}
    states = [
        (part.name_on(this_rank.rank), part.thing.state_dict())
        for part in parts
        if (part.loader is not None or publishes) and part.folder not in names
    ]
    orders = [order and order.encoded() for order in (loader.order() for loader in loaders)]
    rng_state = rng.capture(this_rank.kind) | {"step": step, SAVED_BY: "nb_accelerate", "orders": orders}
    positions = [loader.epoch_and_batch for loader in loaders]
    seeds = [getattr(loader.get_sampler(), "initial_seed", None) for loader in loaders]
    manifest = Manifest(
        step=step,
        num_processes=this_rank.world_size,
        num_readers=None if this_rank.num_sharing == 1 else this_rank.num_data_ranks,
        ranks=shared.ranks,
        epochs=[epoch for epoch, _ in positions],
        seeds=[seed if type(seed) is int else None for seed in seeds],
        positions=[position for _, position in positions],
        rows_per_step=[number_of(loader, "total_batch_size") for loader in loaders],
        num_rows=[number_of(loader, "total_dataset_length") for loader in loaders],
        launches=progress.launches,
        global_step=progress.global_step,
        metrics=progress.read_metrics(),
        kinds={part.file: class_of(part.thing) for part in parts if part.check is not None},
    )
    return Content(
        weights=[state for state in weights if id(state) not in sharded] if publishes else [],
        states=[*states, (RANDOM_NUMBERS.format(this_rank.rank), rng_state)],
        folders=[folder for folder in folders if folder.content != "model" or id(folder.state) in left],
        manifest=manifest,
        safe_serialization=safe_serialization,
    )


def copied(content: Content, copies: HostCopies) -> Content:
    """Return a copy of the content, which training does not change later."""
    weights = [
        clean_state_dict_for_safetensors(state) if content.safe_serialization else state for state in content.weights
    ]
    large = [state for name, state in content.states if name.startswith(OPTIMIZER_NAME)]
    copied_weights, copied_large, values = copies.copy([weights, large, [folder.values for folder in content.folders]])
    for folder, own in zip(content.folders, values, strict=True):
        folder.values, folder.state = own, None
    kept = iter(copied_large)
    states = [
        (name, next(kept) if name.startswith(OPTIMIZER_NAME) else saved_bytes(state)) for name, state in content.states
    ]
    return replace(content, weights=copied_weights, states=states)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a rank has written: its files, and of each folder of `Content` what torch knows about its part."""

    rank: int
    files: dict[str, FileRecord]
    parts: list[list[WriteResult]]


def write_content(content: Content, shared: SharedStaging) -> Written:
    destination, safe = shared.own, content.safe_serialization
    for number, state in enumerate(content.weights):
        name = name_of(SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME, number)
        write(state, destination / name, safe_serialization=safe, has_checksums=True)
    for name, state in content.states:
        write(state, destination / name, safe_serialization=False, has_checksums=True)
    parts = [folder.write(destination) for folder in content.folders]
    return Written(rank=shared.rank, files=record_files(destination), parts=parts)


def publish(
    content: Content, shared: SharedStaging, written: Sequence[Written], when_published: Callable[[], object]
) -> None:
    """Publish what all ranks have written, and call ``when_published``, on the rank that publishes for all."""
    staging = shared.staging
    if staging is None:
        return
    ours = [of_rank for of_rank in written if of_rank.rank in shared.ranks]
    files: dict[str, FileRecord] = {}
    for of_rank in reversed(ours):  # as `join` decides which file counts
        files |= of_rank.files
    for number, folder in enumerate(content.folders):
        files |= folder.finish(shared.path, [of_rank.parts[number] for of_rank in ours])
    staging.join(content.manifest.num_processes)
    replace(content.manifest, files=dict(sorted(files.items()))).write(shared.path)
    staging.publish()
    when_published()


def save_state(
    shared: SharedStaging,
    collect: Callable[[], Content],
    collectives: GathersObjects,
    *,
    when_published: Callable[[], object],
) -> None:
    """Write a checkpoint and wait for it. All ranks of ``collectives`` call it together: all, or the main one alone.

    ``when_published`` is called by the process that published the checkpoint.
    """
    content: Content

    def collect_and_write() -> Written:
        nonlocal content
        content = collect()
        return write_content(content, shared)

    try:
        written = gather_from_all_ranks(collectives, collect_and_write)
        run_on_all_ranks(collectives, lambda: publish(content, shared, written, when_published))
    except BaseException:
        shared.discard()
        raise


def save_state_in_background(
    shared: SharedStaging,
    collect: Callable[[], Content],
    collectives: Collectives,
    *,
    when_published: Callable[[], object],
    folder: Path,
    copies: HostCopies,
) -> CheckpointHandle:
    """Write a checkpoint in a thread, as `save_state` does; return when all states have been copied to host memory.

    No other save uses the buffers in ``copies`` at this time.
    """
    handle = CheckpointHandle(folder)
    ranks: SaveGroup | None = None
    try:
        ranks = SaveGroup(shared.name, collectives.world_size)
        content = run_on_all_ranks(collectives, lambda: copied(collect(), copies))
        write = functools.partial(save_state, shared, lambda: content, ranks, when_published=when_published)
        saves.start(handle, write, ranks)
    except BaseException:
        if handle.claim():
            saves.drop()
            shared.discard()
            if ranks is not None:
                ranks.close()  # other ranks may have begun to write
        raise
    return handle

"""Everything that a run needs to go on: a list of named parts, saved together, and loaded when all have been read.

::

    save   all ranks write beside the checkpoint -> all have -> manifest -> it takes the place of the one before
    load   manifest -> parts -> random numbers -> weights -> checksums -> all fit, on all ranks -> they are applied
"""

from __future__ import annotations

import re
import threading
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from nb_accelerate.training.checkpoint.agreement import gather_from_all_ranks, run_on_all_ranks
from nb_accelerate.training.checkpoint.background import StoreExchange, saves
from nb_accelerate.training.checkpoint.checksums import FileRecord, Recorder
from nb_accelerate.training.checkpoint.files import clean_state_dict_for_safetensors, saved_bytes, write
from nb_accelerate.training.checkpoint.fitting import (
    check_optimizer,
    check_scheduler,
    class_of,
    num_rows,
    rows_per_step,
)
from nb_accelerate.training.checkpoint.manifest import Manifest
from nb_accelerate.training.checkpoint.names import (
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_WEIGHTS_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_NAME,
    shards_of,
)
from nb_accelerate.training.process import rng

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nb_accelerate.training.checkpoint.background import CheckpointHandle
    from nb_accelerate.training.checkpoint.host_copies import HostCopies
    from nb_accelerate.training.checkpoint.registry import Progress
    from nb_accelerate.training.checkpoint.sharded import ShardedFolder
    from nb_accelerate.training.checkpoint.sharing import SharedStaging, ThisRank
    from nb_accelerate.training.comm import Collectives

RANDOM_NUMBERS = f"{RNG_STATE_NAME}_{{}}.pkl"
SAVED_BY = "saved_by"
"""A key in the file of random numbers of ours: a checkpoint that has it has a manifest too."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One thing with a state.

    Attributes:
        file: its name.
        thing: what has it: methods ``state_dict()`` and ``load_state_dict(state)``.
        on_every_rank: whether ranks have states that differ; the first one's has the plain name.
        check: looks whether a state fits, given its file, the state and the thing; None where nobody can know.
    """

    file: str
    thing: Any
    on_every_rank: bool = False
    check: Callable[[str, Any, Any], None] | None = None

    @property
    def folder(self) -> str | None:
        """The folder that it is in where each rank writes a part; None for what is never in one."""
        return shards_of(self.file) if self.file.startswith(OPTIMIZER_NAME) else None

    def name_on(self, rank: int) -> str:
        """Return the name of the file of a rank."""
        return _on_rank(self.file, rank) if self.on_every_rank else self.file


def parts_of(
    *, optimizers: Sequence[Any], schedulers: Sequence[Any], loaders: Sequence[Any], scaler: Any, custom: Sequence[Any]
) -> list[Part]:
    """Return the parts of a run, models and random numbers apart."""
    parts = [
        *(
            Part(file=name_of(f"{OPTIMIZER_NAME}.bin", number), thing=one, check=check_optimizer)
            for number, one in enumerate(optimizers)
        ),
        *(
            Part(file=name_of(f"{SCHEDULER_NAME}.bin", number), thing=one, check=check_scheduler)
            for number, one in enumerate(schedulers)
        ),
        *(
            Part(file=name_of("dl_state_dict.bin", number), thing=one, on_every_rank=True)
            for number, one in enumerate(loaders)
            if one.use_stateful_dataloader
        ),
    ]
    if scaler is not None:
        parts.append(Part(file=SCALER_NAME, thing=scaler))
    return [*parts, *(Part(file=f"custom_checkpoint_{number}.pkl", thing=one) for number, one in enumerate(custom))]


def loader_number(part: Part) -> int:
    """Return the number of the loader whose state a part is, among all that were prepared."""
    match = re.fullmatch(r"dl_state_dict(?:_(\d+))?\.bin", part.file)
    assert match is not None
    return int(match[1] or 0)


def name_of(first: str, number: int) -> str:
    """Return ``optimizer_2.bin`` for ``optimizer.bin`` and 2."""
    stem, _, ending = first.rpartition(".")
    return f"{stem}_{number}.{ending}" if number else first


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a rank writes, as it was at one moment.

    Attributes:
        weights: of the models; none on ranks that write none.
        states: the name of each other file, and what is in it.
        folders: of which this rank writes a part.
        manifest: what is known about the run, without files.
    """

    weights: list[Mapping[str, Any]]
    states: list[tuple[str, Any]]
    folders: list[ShardedFolder]
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class StateWriter:
    """Writes a checkpoint in place of the one that is there: collect, write, publish.

    Attributes:
        shared: the folder that is written to.
        this_rank: which one it is, of how many.
        weights: returns the weights of the models, given the folder that hooks may write to.
        parts: see `parts_of`.
        loaders: whose epochs, positions and seeds are noted.
        step: batches in the current accumulation window.
        progress: what else is known about the run.
        folders: states of which each rank writes a part, planned; among them may be weights and parts.
        safe_serialization: write weights as safetensors.
        after: called where the checkpoint was published, when it was.
    """

    shared: SharedStaging
    this_rank: ThisRank
    weights: Callable[[Path], Sequence[Mapping[str, Any]]]
    parts: Sequence[Part]
    loaders: Sequence[Any]
    step: int
    progress: Progress
    safe_serialization: bool
    after: Callable[[], object]
    folders: Sequence[ShardedFolder] = ()

    def collect(self) -> Content:
        """Return what is to be written, without copies."""
        shared, rank = self.shared, self.this_rank.rank
        weights = list(self.weights(shared.own))
        publishes = shared.staging is not None
        left = {id(one) for one in weights}  # by hooks, which may save weights in another way
        folders = [one for one in self.folders if one.content != "model" or id(one.state) in left]
        sharded = {id(one.state) for one in self.folders}
        names = {one.name for one in self.folders}
        states = [
            (part.name_on(rank), part.thing.state_dict())
            for part in self.parts
            if (part.on_every_rank or publishes) and part.folder not in names
        ]
        orders = [order and order.encoded() for order in (loader.order() for loader in self.loaders)]
        numbers = rng.capture(self.this_rank.kind) | {"step": self.step, SAVED_BY: "nb_accelerate", "orders": orders}
        manifest = Manifest(
            step=self.step,
            num_processes=self.this_rank.world_size,
            num_readers=None if self.this_rank.num_sharing == 1 else self.this_rank.readers,
            ranks=shared.ranks,
            epochs=[position_of(loader)[0] for loader in self.loaders],
            seeds=[_seed(loader) for loader in self.loaders],
            positions=[position_of(loader)[1] for loader in self.loaders],
            rows_per_step=[rows_per_step(loader) for loader in self.loaders],
            num_rows=[num_rows(loader) for loader in self.loaders],
            launches=self.progress.launches,
            global_step=self.progress.global_step,
            metrics=self.progress.read_metrics(),
            kinds={part.file: class_of(part.thing) for part in self.parts if part.check is not None},
        )
        return Content(
            weights=[one for one in weights if id(one) not in sharded] if publishes else [],
            states=[*states, (RANDOM_NUMBERS.format(rank), numbers)],
            folders=folders,
            manifest=manifest,
        )

    def collect_copies(self, copies: HostCopies) -> Content:
        """Return what is to be written as it is now, whatever training does to it later."""
        content = self.collect()
        weights = [
            clean_state_dict_for_safetensors(state) if self.safe_serialization else state for state in content.weights
        ]
        large = [state for name, state in content.states if name.startswith(OPTIMIZER_NAME)]
        copied_weights, copied, values = copies.copy([weights, large, [one.values for one in content.folders]])
        for folder, own in zip(content.folders, values, strict=True):
            folder.values, folder.state = own, None
        kept = iter(copied)
        states = [
            (name, next(kept) if name.startswith(OPTIMIZER_NAME) else saved_bytes(state))
            for name, state in content.states
        ]
        return replace(content, weights=copied_weights, states=states)

    def write(self, content: Content) -> tuple[int, dict[str, FileRecord]]:
        """Write this rank's files; return its number and what they are."""
        own, safe = self.shared.own, self.safe_serialization
        if self.shared.staging is not None:
            self.shared.staging.release_replaced()
        with Recorder(own) as recorder:
            for number, state in enumerate(content.weights):
                name = name_of(SAFE_WEIGHTS_NAME if safe else WEIGHTS_NAME, number)
                write(state, own / name, safe_serialization=safe, recorder=recorder)
            for name, state in content.states:
                write(state, own / name, safe_serialization=False, recorder=recorder)
            for folder in content.folders:
                folder.write(own, self.shared.path)
            return self.this_rank.rank, recorder.records()

    def publish(self, content: Content, written: Mapping[int, dict[str, FileRecord]]) -> None:
        """Make what all ranks have written the checkpoint, where this rank is the one that does."""
        staging = self.shared.staging
        if staging is None:
            return
        files: dict[str, FileRecord] = {}
        for rank in reversed(self.shared.ranks):  # as `join` decides which file counts
            files |= written[rank]
        for folder in content.folders:
            files |= folder.finish(self.shared.path, self.shared.ranks)
        staging.join(self.this_rank.world_size)
        replace(content.manifest, files=dict(sorted(files.items()))).write(self.shared.path)
        staging.publish()
        self.after()


def save_state(writer: StateWriter, collectives: Collectives) -> None:
    """Write a checkpoint and wait for it. All ranks that save call it together.

    Args:
        collectives: of those that save: all ranks, or the main one alone.

    Raises:
        CheckpointError: it could not be written, on this rank or another. What was there is there still.
    """

    def write_own() -> tuple[int, dict[str, FileRecord]]:
        content = writer.collect()
        kept.append(content)
        return writer.write(content)

    kept: list[Content] = []
    try:
        written = dict(gather_from_all_ranks(collectives, write_own))
        run_on_all_ranks(collectives, lambda: writer.publish(kept[0], written))
    except BaseException:
        writer.shared.discard()
        raise


def save_state_in_background(
    writer: StateWriter, collectives: Collectives, *, folder: Path, copies: HostCopies
) -> CheckpointHandle:
    """Write a checkpoint in a thread; return when all states have been copied to host memory.

    Args:
        copies: buffers; not used by another save at this time.

    Raises:
        CheckpointError: the states of a rank could not be copied. Nothing was written.
    """
    told: StoreExchange | None = None
    begins = threading.Lock()  # whoever takes it first: the thread, or an interrupt before it
    try:
        told = StoreExchange.open(writer.shared.name) if collectives.world_size > 1 else None
        content = run_on_all_ranks(collectives, lambda: writer.collect_copies(copies))
        # Not what was gathered from shards, which would stay in memory beside its copies until all is written.
        writer = replace(writer, parts=(), weights=lambda _: (), folders=())

        def write_all(exchange: StoreExchange | None) -> None:
            if not begins.acquire(blocking=False):
                return
            try:
                if exchange is None:
                    writer.publish(content, dict([writer.write(content)]))
                else:
                    written = dict(map(_from_json, exchange.gather(lambda: _as_json(*writer.write(content)))))
                    exchange.gather(lambda: writer.publish(content, written))
            except BaseException:
                writer.shared.discard()
                raise

        return saves.start(folder, write_all, told)
    except BaseException as error:
        if begins.acquire(blocking=False):
            writer.shared.discard()
            if told is not None:
                told.abandon(error)  # other ranks may have begun to write
        raise


def _as_json(rank: int, files: Mapping[str, FileRecord]) -> tuple[int, dict[str, Any]]:
    """Turn what a rank has written into what JSON can hold."""
    return rank, {name: asdict(record) for name, record in files.items()}


def _from_json(told: tuple[int, dict[str, Any]]) -> tuple[int, dict[str, FileRecord]]:
    """Undo `_as_json`."""
    rank, files = told
    return rank, {name: FileRecord(size=file["size"], crc32=tuple(file["crc32"])) for name, file in files.items()}


def position_of(loader: Any) -> tuple[int, int]:
    """Return the epoch that a loader is in, from 0, and the batches of it that this rank had."""
    epoch, position = loader.epoch_and_batch
    return int(epoch), int(position)


def _seed(loader: Any) -> int | None:
    seed = getattr(loader.get_sampler(), "initial_seed", None)
    return seed if type(seed) is int else None


def _on_rank(name: str, rank: int) -> str:
    stem, _, ending = name.rpartition(".")
    return f"{stem}_rank{rank}.{ending}" if rank else name

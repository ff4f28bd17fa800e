"""Everything that a run needs to go on: a list of named parts, saved together, and loaded when all have been read.

::

    save   all ranks write beside the checkpoint -> all have -> manifest -> it takes the place of the one before
    load   checksums -> manifest -> parts -> random numbers -> weights -> all fit, on all ranks -> they are applied
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.checkpoint.agreement import gather_from_all_ranks, run_on_all_ranks
from nb_accelerate.checkpoint.files import write
from nb_accelerate.checkpoint.fitting import check_optimizer, check_scheduler, class_of
from nb_accelerate.checkpoint.manifest import Manifest, record_all
from nb_accelerate.checkpoint.names import (
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_WEIGHTS_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_NAME,
)
from nb_accelerate.checkpoint.sharing import share
from nb_accelerate.process import rng

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nb_accelerate.checkpoint.manifest import FileRecord
    from nb_accelerate.checkpoint.sharing import RankIdentity
    from nb_accelerate.comm import Collectives

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


def name_of(first: str, number: int) -> str:
    """Return ``optimizer_2.bin`` for ``optimizer.bin`` and 2."""
    stem, _, ending = first.rpartition(".")
    return f"{stem}_{number}.{ending}" if number else first


def save_state(
    folder: Path,
    *,
    collectives: Collectives,
    identity: RankIdentity,
    on_each_machine: bool,
    weights: Callable[[Path], Sequence[Mapping[str, Any]]],
    parts: Sequence[Part],
    loaders: Sequence[Any],
    step: int,
    safe_serialization: bool,
) -> bool:
    """Write a checkpoint, in place of the one that is there.

    Args:
        folder: made if it is not there.
        collectives: of those that save: all ranks, or the main one alone.
        identity: of this rank.
        on_each_machine: see `share`.
        weights: returns the weights of the models, given the folder that hooks may write to.
        parts: see `parts_of`.
        loaders: whose epochs and seeds are noted.
        step: batches in the current accumulation window.
        safe_serialization: write weights as safetensors.

    Returns:
        Whether it was this rank that published it: rank 0, and one of each machine with a disk of its own.

    Raises:
        CheckpointError: it could not be written, on this rank or another. What was there is there still.
    """
    shared = share(folder, collectives=collectives, identity=identity, on_each_machine=on_each_machine)

    def write_own() -> tuple[int, dict[str, FileRecord]]:
        states = weights(shared.own)
        if shared.staging is not None:
            for number, state in enumerate(states):
                name = name_of(SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME, number)
                write(state, shared.own / name, safe_serialization=safe_serialization, with_checksums=False)
        for part in parts:
            if part.on_every_rank or shared.staging is not None:
                write(
                    part.thing.state_dict(),
                    shared.own / part.name_on(identity.rank),
                    safe_serialization=False,
                    with_checksums=False,
                )
        numbers = {"step": step, SAVED_BY: "nb_accelerate", **rng.capture(identity.kind)}
        write(
            numbers, shared.own / RANDOM_NUMBERS.format(identity.rank), safe_serialization=False, with_checksums=False
        )
        return identity.rank, record_all(shared.own)

    def publish(written: Mapping[int, dict[str, FileRecord]]) -> None:
        if shared.staging is None:
            return
        files: dict[str, FileRecord] = {}
        for rank in reversed(shared.ranks):  # as `join` decides which file counts
            files |= written[rank]
        manifest = Manifest(
            step=step,
            num_processes=identity.world_size,
            ranks=shared.ranks,
            epochs=[loader.whereabouts[0] for loader in loaders],
            seeds=[_seed(loader) for loader in loaders],
            kinds={part.file: class_of(part.thing) for part in parts if part.check is not None},
            files=dict(sorted(files.items())),
        )
        shared.staging.join(identity.world_size)
        manifest.write(shared.path)
        shared.staging.publish()

    try:
        written = dict(gather_from_all_ranks(collectives, write_own))
        run_on_all_ranks(collectives, lambda: publish(written))
        return shared.staging is not None
    except BaseException:
        shared.discard()
        raise


def _seed(loader: Any) -> int | None:
    seed = getattr(loader.get_sampler(), "initial_seed", None)
    return seed if type(seed) is int else None


def _on_rank(name: str, rank: int) -> str:
    stem, _, ending = name.rpartition(".")
    return f"{stem}_rank{rank}.{ending}" if rank else name

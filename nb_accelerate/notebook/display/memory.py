"""What ranks hold in memory, in words: while all is well, and when it did not suffice. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nb_accelerate.base import words
from nb_accelerate.base.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.progress_page import RankMemory, Sample

_COLUMNS = ("parameters", "gradients", "optimizer", "other", "peak", "limit")
_MOST_ROWS = 8  # ranks in a table; of more, the first ones and the one that failed
_MOST_TIPS = 2

# Part of the limit that parameters, gradients and optimizer states take, below which sharding them does not help.
_WORTH_SHARDING = 0.01

_SAME = 0.02  # difference, as a part of the whole, below which ranks count as holding the same
_MOSTLY = 0.5  # part of the memory from which on its owner is named first


def parts_of(held: RankMemory) -> str:
    """Return what a rank holds in one line: ``parameters 2.1 GB, gradients 2.1 GB, optimizer 4.2 GB``."""
    return ", ".join(
        f"{name} {words.size(size)}" for name, size in zip(_COLUMNS[:3], _column_bytes(held), strict=False) if size
    )


def sharded_line(held: Mapping[int, RankMemory]) -> str:
    """Return how a model is spread over ranks and what each of them holds; "" if it is not spread."""
    sharded = {rank: memory for rank, memory in held.items() if memory.sharding and memory.states}
    if not sharded:
        return ""
    ordered = sorted(sharded.values(), key=lambda memory: memory.states)
    least, most = ordered[0], ordered[-1]
    text = f"{next(iter(sharded.values())).sharding}: "
    if most.states - least.states <= _SAME * most.states:
        text += f"each rank holds {parts_of(most)}"
    else:
        rank = next(rank for rank, memory in sharded.items() if memory is most)
        text += f"a rank holds {words.size(least.states)} to {words.size(most.states)}; rank {rank} {parts_of(most)}"
    peak = max(memory.peak for memory in sharded.values())
    return text + (f"; peak {words.size(peak)}" if peak else "")


def shortage(samples: Mapping[int, Sample], *, failed: int | None, wanted: int) -> str:
    """Return who held what when memory did not suffice, and what to turn on; "" if no rank has been measured.

    Args:
        samples: of the progress pages, by rank.
        failed: the rank on which memory did not suffice; None if that is not known.
        wanted: bytes that it asked for and did not get; 0 if that is not known.
    """
    held = {rank: sample.held for rank, sample in samples.items() if sample.held.states}
    if not held:
        return ""
    rank = failed if failed in held else max(held, key=lambda rank: held[rank].used)
    lines = ["What each rank had in memory:", *_table(held, rank)]
    sample = samples[rank]
    rows = sample.rows // len(samples) if sample.rows else 0
    tips = advice(sample.held, rows=rows, ranks=len(samples), wanted=wanted)
    return "\n".join((*lines, *(f"- {tip}" for tip in tips[:_MOST_TIPS])))


def advice(held: RankMemory, *, rows: int, ranks: int, wanted: int) -> list[str]:
    """Return sentences about what makes a model fit, the most useful first."""
    if held.limit and wanted > held.limit:
        return [
            f"{words.size(wanted)} were asked for at once, and a rank has room for {words.size(held.limit)}: "
            "make that tensor smaller."
        ]
    tips = []
    fits = rows_that_fit(held, rows=rows, wanted=wanted)
    if fits and fits < rows:
        tips.append(
            f"Try at most {words.plural(fits, 'row')} in a batch of each rank, instead of {rows:,}: batch_size={fits} "
            f"and gradient_accumulation_steps={math.ceil(rows / fits)} train as before."
        )
    elif rows > 1 and fits is None:
        tips.append(f"Use smaller batches: each rank had {words.plural(rows, 'row')}.")
    needed = held.states + held.pending
    spread = _spreading(held, needed, ranks) if needed >= _WORTH_SHARDING * held.limit else []
    checkpointing = (
        "FullyShardedDataParallelPlugin(activation_checkpointing=True)"
        if held.sharding.startswith("FSDP")
        else "model.gradient_checkpointing_enable() of transformers, or torch.utils.checkpoint"
    )
    activations = (
        f"Compute activations again in backward instead of keeping them: {checkpointing}; and "
        'mixed_precision="bf16", if it is off.'
    )
    holds_mostly_states = needed >= _MOSTLY * (needed + held.activations + wanted)
    return [*tips, *spread, activations] if holds_mostly_states else [*tips, activations, *spread]


def rows_that_fit(held: RankMemory, *, rows: int, wanted: int) -> int | None:
    """Return how many rows of a batch on each rank fit; None if that is not known."""
    # What does not depend on the batch is subtracted, and the rest taken to grow with the number of rows. The step that
    # failed had not come to its peak, so it is the most that may fit, and never more than half of the rows.
    of_rows = held.activations + wanted
    if not rows or not held.limit or not held.used or of_rows <= 0:
        return None
    room = held.limit - held.base - held.states - held.pending
    return max(0, min(rows // 2, int(rows * room / of_rows)))


def _spreading(held: RankMemory, needed: int, ranks: int) -> list[str]:
    """Return how to spread a model over ranks, or further than it is."""
    if held.sharding.startswith("ZeRO"):
        stages = [stage for stage in ("0", "1", "2") if f"stage {stage}" in held.sharding]
        tips = ["Shard more of the model: DeepSpeedPlugin(zero_stage=3)."] if stages and ranks > 1 else []
        return [*tips, 'Keep optimizer states in host memory: DeepSpeedPlugin(offload_optimizer_device="cpu").']
    if held.sharding.startswith("FSDP"):
        return ["Keep shards in host memory, on a GPU: FullyShardedDataParallelPlugin(cpu_offload=True)."]
    if held.sharding or ranks == 1:
        return []
    return [
        f"Shard the model: with Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()) each of {ranks} ranks holds "
        f"{words.size(needed / ranks)} of parameters, gradients and optimizer instead of {words.size(needed)}."
    ]


def _table(held: Mapping[int, RankMemory], failed: int) -> list[str]:
    shown = [rank for index, rank in enumerate(held) if index < _MOST_ROWS or rank == failed]
    rows = []
    for rank in shown:
        sizes = [words.size(size) if size else "-" for size in _column_bytes(held[rank])]
        rows.append((str(rank), *sizes))
    lines = repr(Table(("rank", *_COLUMNS), rows, right=("rank", *_COLUMNS))).splitlines()
    lines[1 + shown.index(failed)] += "  <- failed"
    more = len(held) - len(shown)
    return [f"  {line}" for line in (*lines, *([f"and {words.plural(more, 'more rank')}"] if more else []))]


def _column_bytes(held: RankMemory) -> tuple[int, ...]:
    """Return the bytes of `_COLUMNS`."""
    return held.parameters, held.gradients, held.optimizer, held.base + held.activations, held.peak, held.limit

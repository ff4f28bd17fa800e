"""The memory of a rehearsed rank over its first steps, and whether a device has room for it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nb_accelerate.base.words import size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.training.process.live_bytes import LiveBytes

_POINTS = 300  # of the picture
TOO_MUCH = "it does not fit"


class Memory(NamedTuple):
    """Bytes of one rank at one time."""

    weights: int = 0
    gradients: int = 0
    buckets: int = 0  # in which DistributedDataParallel exchanges gradients
    optimizer: int = 0
    gathered: int = 0  # whole weights, of models that are sharded, and what they are exchanged in
    activations: int = 0  # what forward keeps for backward, and the batch
    temporaries: int = 0

    @property
    def of_rows(self) -> int:
        """The bytes that more rows in a batch make more."""
        return self.activations + self.temporaries


class Zero(NamedTuple):
    """How DeepSpeed shards what a rank holds; see `ZeRO <https://arxiv.org/abs/1910.02054>`_."""

    stage: int
    ranks: int
    offloads: tuple[str, ...]  # "weights" and "optimizer", which are not on the device then

    def applied(self, held: Memory, weights: int, trained: int, width: int, optimizer: int) -> Memory:
        """Return what a rank holds that would hold so much without DeepSpeed.

        Args:
            held: bytes.
            weights: their number.
            trained: those that have gradients.
            width: bytes of each: 4, or 2 in mixed precision; then, or from stage 1 on, the optimizer has a copy of 4.
            optimizer: bytes of its state for all of them.
        """
        copy = 4 * trained if width == 2 or self.stage else 0
        on_device = "optimizer" not in self.offloads  # gradients go where the optimizer is
        return held._replace(
            weights=width * weights // self._shards(3) if "weights" not in self.offloads else 0,
            gradients=width * trained // self._shards(2) if on_device else 0,
            buckets=0,
            optimizer=(optimizer + copy) // self._shards(1) if on_device else 0,
        )

    def _shards(self, from_stage: int) -> int:
        return self.ranks if self.stage >= from_stage else 1


class Mark(NamedTuple):
    """Where a part of a step begins."""

    at: int  # index of a change, or of a point
    what: str  # "the backward"
    step: int
    rows: int  # in the batch


def points(live: LiveBytes, marks: Sequence[Mark], device: int) -> tuple[list[Memory], list[Mark]]:
    """Return the memory of a device over time, the greatest of each of a few hundred intervals, and the marks there."""
    per_point = 1 + len(live.changes) // _POINTS
    memories: list[Memory] = []
    for number, held in enumerate(live.history(device)):
        total = sum(held.values())
        if number // per_point == len(memories):
            memories.append(_memory(held))
        elif total > sum(memories[-1]):
            memories[-1] = _memory(held)
    return memories, [mark._replace(at=mark.at // per_point) for mark in marks]


def _memory(held: dict[str, int]) -> Memory:
    return Memory(**{label or "temporaries": count for label, count in held.items()})


def outside_of_steps(memory: Sequence[Memory], marks: Sequence[Mark]) -> tuple[int, Memory]:
    """Return rows of a batch, and the most that is held with it, but in the optimizer's steps: those make no more."""
    every = [(held, _mark_before(marks, index)) for index, held in enumerate(memory)]
    held, mark = max(
        [each for each in every if not each[1].what.endswith("step")] or every, key=lambda each: sum(each[0])
    )
    return max(1, mark.rows), held


def described(
    memory: Sequence[Memory], marks: Sequence[Mark], smaller: Sequence[tuple[int, int]], capacity: int, device: str
) -> str:
    """Return when there is most, of what, and whether a device with that capacity (in bytes; 0: unknown) has room.

    ``smaller`` has the rows of smaller batches, and the most bytes with them. Memory is a line in the rows.
    """
    index, peak = max(enumerate(memory), key=lambda each: sum(each[1]))
    mark = _mark_before(marks, index)
    names = (name if name != "gathered" else "gathered weights" for name in Memory._fields)
    parts = ", ".join(f"{name} {size(part)}" for name, part in zip(names, peak, strict=True) if part)
    text = f"{size(sum(peak))} in {mark.what} of step {mark.step} ({parts})"
    rows, held = outside_of_steps(memory, marks)
    slopes = [(sum(held) - less) / (rows - fewer) for fewer, less in smaller if fewer < rows]
    per_row = max(slopes, default=held.of_rows / rows)
    is_line = len(slopes) > 1 and per_row < 1.05 * min(slopes)
    text += f"; a row of the batch costs {'' if is_line else 'at most '}{size(per_row)}"
    # Not in these numbers: the context of CUDA and buffers of NCCL, and fragmentation of 5 to 15 %.
    least, greatest = 1.05 * sum(peak) + 0.5e9, 1.15 * sum(peak) + 1e9
    if capacity and per_row > 0:
        steps_fit = not mark.what.endswith("step") or greatest < 0.9 * capacity
        room = (0.9 * capacity - 1e9) / 1.15 - (sum(held) - per_row * rows) if steps_fit else 0
        text += f", and batches of up to {int(room / per_row):,} rows fit" if room >= per_row else ", and no batch fits"
    text += f". With CUDA, NCCL and fragmentation {size(least)} to {size(greatest)}"
    if not capacity:
        return text
    fits = "it fits" if greatest < 0.9 * capacity else "too close to say"
    whose = f"of {size(capacity)}" + (f" ({device})" if device else "")
    return f"{text} {whose}: {TOO_MUCH if least > capacity else fits}"


def _mark_before(marks: Sequence[Mark], index: int) -> Mark:
    return [marks[0], *(mark for mark in marks if mark.at <= index)][-1]

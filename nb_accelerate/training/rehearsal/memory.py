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


class Mark(NamedTuple):
    """Where a part of a step begins."""

    at: int  # index of a change, or of a point
    what: str  # "the backward"
    step: int
    rows: int  # in the batch


def points(live: LiveBytes, marks: Sequence[Mark]) -> tuple[list[Memory], list[Mark]]:
    """Return the memory over time, at the greatest of each of a few hundred intervals, and the marks among these."""
    per_point = 1 + len(live.changes) // _POINTS
    found: list[Memory] = []
    for number, held in enumerate(live.history()):
        total = sum(held.values())
        if number // per_point == len(found):
            found.append(_memory(held))
        elif total > sum(found[-1]):
            found[-1] = _memory(held)
    return found, [mark._replace(at=mark.at // per_point) for mark in marks]


def _memory(held: dict[str, int]) -> Memory:
    return Memory(**{label or "temporaries": count for label, count in held.items()})


def described(memory: Sequence[Memory], marks: Sequence[Mark], capacity: int, device: str) -> str:
    """Return when there is most, of what, and whether a device with that capacity (in bytes; 0: unknown) has room."""
    index, peak = max(enumerate(memory), key=lambda each: sum(each[1]))
    mark = _mark_before(marks, index)
    names = (name if name != "gathered" else "gathered weights" for name in Memory._fields)
    parts = ", ".join(f"{name} {size(part)}" for name, part in zip(names, peak, strict=True) if part)
    text = f"memory of a rank: {size(sum(peak))} in {mark.what} of step {mark.step} ({parts})"
    # Rows count where there is most of what they make more. Temporaries of the optimizer are as many for each batch.
    with_marks = [(held, _mark_before(marks, index)) for index, held in enumerate(memory)]
    with_rows = [each for each in with_marks if not each[1].what.endswith("step")] or with_marks
    most, mark = max(with_rows, key=lambda each: each[0].of_rows)
    per_row = most.of_rows / max(1, mark.rows)
    text += f"; a row of such a batch costs at most {size(per_row)}"
    # Not in these numbers: the context of CUDA and buffers of NCCL, and fragmentation of 5 to 15 %.
    least, greatest = 1.05 * sum(peak) + 0.5e9, 1.15 * sum(peak) + 1e9
    text += f". With CUDA, NCCL and fragmentation {size(least)} to {size(greatest)}"
    if not capacity:
        return text
    room = (0.9 * capacity - 1e9) / 1.15 - (sum(most) - most.of_rows)
    rows = f", and so do batches of {int(room / per_row):,} such rows" if room > per_row > 0 else ""
    fits = f"it fits{rows}" if greatest < 0.9 * capacity else "too close to say"
    whose = f"of {size(capacity)}" + (f" ({device})" if device else "")
    return f"{text} {whose}: {TOO_MUCH if least > capacity else fits}"


def _mark_before(marks: Sequence[Mark], index: int) -> Mark:
    return [marks[0], *(mark for mark in marks if mark.at <= index)][-1]

"""What a progress page said at one moment."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from nb_accelerate.base.progress_page import layout
from nb_accelerate.base.progress_page.code_line import CodeLine
from nb_accelerate.base.progress_page.commands import training_state
from nb_accelerate.base.progress_page.layout import Collective, Phase
from nb_accelerate.base.progress_page.phase_times import seconds_exchanging, seconds_in
from nb_accelerate.base.progress_page.rank_memory import RankMemory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Buffer


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A progress bar.

    Attributes:
        label: what is counted.
        count: how many so far.
        total: of how many, or None.
        seconds: since it began.
        ended: nothing will be added.
        level: how many bars it stands in.
    """

    label: str
    count: float
    total: float | None
    seconds: float
    ended: bool = False
    level: int = 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """How far a rank is.

    Attributes:
        request: number of the call or cell.
        phase: what it does.
        step: batches of the current loop so far.
        total: batches of the current loop; None if not known.
        loop: number of the loop.
        trains: there was a backward, or an optimizer's step, in the loop.
        evaluates: the loop computes no gradients, or has gone on for a while without a backward.
        in_loop: the loop has not ended.
        epoch: of the loader that is trained with, from 1; 0 if there is none.
        epochs: of the whole run; 0 if that is not known. If it is, `epoch` is that of the run.
        steps_before: batches of training loops that have ended.
        rows: rows of all ranks together in one batch; 0 if not known.
        waits_in: the collective it waits in; None if in none of ours.
        collectives: how many it has begun.
        memory: bytes of the device in use; 0 if the device does not say.
        peak: the most that was seen.
        utilisation: part of the time, in percent, in which the device computed when a step last asked; None if it does
            not say.
        loss: the newest, or None.
        scalars: what was logged last, by name.
        bars: progress bars, outermost first.
        saves: a checkpoint is written in the background.
        other_group: it may be in a process group with processes outside of its launch.
        paused: training waits until the notebook tells it to go on.
        takes_commands: training has begun that obeys commands of the notebook.
        has_folder: numbered checkpoints have a folder; None if not known.
        has_epoch_loop: a loop over epochs is on that can be ended after an epoch; None if not known.
        ended_after: epoch, from 1, after which the notebook had a loop over epochs end, and the number of its epochs;
            None if no loop was ended before its last.
        held: what it held in memory when that was measured last, maybe in an earlier call or cell.
        seconds: spent in each phase so far, those that took no time left out.
        exchanging: seconds of those in `Phase.WAITING` in which it waited for the exchange of gradients.
        num_workers: of the current loop's loader; None if not known.
        spans_epochs: the loop goes over all epochs of the run: `step` and `total` are those of the run.
        times_waits: backward is over when the gradients of this rank are computed. The exchange that follows is then
            a part of the phase `WAITING`; else it is one of `BACKWARD`.
        compiled: programs that were compiled for the device, in loops.
        compiling: seconds that took.
        warning: a sentence about what is wrong; may be empty.
        line: the line of the user's code that it was at when it was asked last; None if it was not.
    """

    request: int = 0
    phase: Phase = Phase.NOTHING
    step: int = 0
    total: int | None = None
    loop: int = 0
    trains: bool = False
    evaluates: bool = False
    in_loop: bool = False
    epoch: int = 0
    epochs: int = 0
    steps_before: int = 0
    rows: int = 0
    waits_in: Collective | None = None
    collectives: int = 0
    memory: int = 0
    peak: int = 0
    utilisation: int | None = None
    loss: float | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)
    bars: tuple[Bar, ...] = ()
    saves: bool = False
    other_group: bool = False
    paused: bool = False
    takes_commands: bool = False
    has_folder: bool | None = None
    has_epoch_loop: bool | None = None
    ended_after: tuple[int, int] | None = None
    held: RankMemory = field(default_factory=RankMemory)
    seconds: Mapping[Phase, float] = field(default_factory=dict, compare=False)  # changes from look to look
    exchanging: float = field(default=0.0, compare=False)
    num_workers: int | None = None
    spans_epochs: bool = False
    times_waits: bool = False
    compiled: int = 0
    compiling: float = 0.0
    warning: str = ""
    line: CodeLine | None = field(default=None, compare=False)  # changes from look to look

    @property
    def steps(self) -> int:
        """Batches trained with, over all epochs."""
        return self.steps_before + (self.step if self.in_loop and self.trains else 0)


_T = TypeVar("_T")
_SURE = 2
"""Steps after which a loop without a backward is no training."""

_NAMED_COLLECTIVES = tuple(Collective)
_NAMED_PHASES = tuple(Phase)
_ALL = 100
_ENDLESS = 1e18
"""Nothing counts so far."""


def read(memory: Buffer) -> Sample:
    """Read a progress page. Leaves out values that make no sense, and never fails, whatever was written."""
    words = layout.HEADER.unpack_from(memory, 0)
    if not words[layout.REQUEST]:
        return Sample()
    loss = words[layout.LOSS]
    trains = bool(words[layout.TRAINS])
    epochs, epoch_of_run = words[layout.EPOCHS], words[layout.EPOCH_OF_RUN]
    has_epochs = 0 < epoch_of_run <= epochs
    training = training_state(memory)
    now = time.monotonic_ns()
    phase = _named(_NAMED_PHASES, words[layout.PHASE]) or Phase.RUNNING
    return Sample(
        request=words[layout.REQUEST],
        phase=phase,
        step=max(0, words[layout.STEP]),
        total=words[layout.TOTAL] if words[layout.TOTAL] >= 0 and words[layout.LOOP] else None,
        loop=words[layout.LOOP],
        trains=trains,
        evaluates=not trains and (bool(words[layout.EVALUATES]) or words[layout.STEP] > _SURE),
        in_loop=bool(words[layout.IN_LOOP]),
        epoch=epoch_of_run if has_epochs else words[layout.EPOCH if trains else layout.TRAINED_EPOCH],
        epochs=epochs if has_epochs else 0,
        steps_before=max(0, words[layout.STEPS_BEFORE]),
        rows=max(0, words[layout.ROWS]),
        waits_in=_named(_NAMED_COLLECTIVES, words[layout.WAITS_IN]) if phase is Phase.WAITING else None,
        collectives=words[layout.COLLECTIVES],
        memory=max(0, words[layout.MEMORY]),
        peak=max(0, words[layout.MEMORY_PEAK]),
        utilisation=words[layout.UTILISATION] if 0 <= words[layout.UTILISATION] <= _ALL else None,
        loss=None if loss == layout.NO_LOSS else loss,
        scalars=_scalars(memory),
        bars=_bars(memory) if words[layout.BARS_SEEN] else (),
        saves=bool(words[layout.SAVES]),
        other_group=bool(words[layout.OTHER_GROUP]),
        paused=training.paused,
        takes_commands=training.takes_commands,
        has_folder=training.has_folder,
        has_epoch_loop=training.has_epoch_loop,
        ended_after=training.ended_after,
        held=RankMemory.read(memory, layout.MEMORY_AT),
        seconds=seconds_in(words, now),
        exchanging=seconds_exchanging(words, now),
        num_workers=words[layout.WORKERS] - 1 if words[layout.WORKERS] > 0 else None,
        spans_epochs=bool(words[layout.SPANS_EPOCHS]),
        times_waits=bool(words[layout.WAITS_TIMED]),
        compiled=max(0, words[layout.COMPILED]),
        compiling=max(0, words[layout.COMPILING_MS]) / 1000,
        warning=_warning(memory),
        line=CodeLine.read(memory, layout.LINE_AT),
    )


def _named(names: tuple[_T, ...], number: int) -> _T | None:
    return names[number] if 0 <= number < len(names) else None


def _scalars(memory: Buffer) -> dict[str, float]:
    found = {}
    for index in range(layout.NUM_SCALARS):
        name, value = layout.SCALAR.unpack_from(memory, layout.SCALARS_AT + index * layout.SCALAR.size)
        if not name[0]:
            break
        found[_name(name)] = value
    return found


@functools.lru_cache(maxsize=256)
def _name(raw: bytes) -> str:
    return _text(raw)


def _warning(memory: Buffer) -> str:
    (raw,) = layout.WARNING.unpack_from(memory, layout.WARNING_AT)
    return _text(raw) if raw[0] else ""


def _bars(memory: Buffer) -> tuple[Bar, ...]:
    found = []
    now = time.monotonic()
    for index in range(layout.NUM_BARS):
        state, level, count, total, began, changed, label = layout.BAR.unpack_from(
            memory, layout.BARS_AT + index * layout.BAR.size
        )
        if state:
            seconds = (changed if state == 2 else now) - began
            found.append(
                Bar(
                    label=_text(label),
                    count=count if 0 <= count < _ENDLESS else 0.0,
                    total=total if 0 <= total < _ENDLESS else None,
                    seconds=seconds if 0 <= seconds < _ENDLESS else 0.0,
                    ended=state == 2,
                    level=level,
                )
            )
    return tuple(sorted(found, key=lambda bar: bar.level))


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode(errors="ignore")

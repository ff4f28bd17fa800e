"""What a progress page says of a rank: what it does, the line of code that it is at, what it holds in memory."""

from __future__ import annotations

import dataclasses
import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Phase(enum.IntEnum):
    """What a rank does."""

    NOTHING = 0
    RUNNING = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    STEP = 5
    EVALUATING = 6
    SAVING = 7
    WAITING = 8
    ENDED = 9
    PREPARING = 10
    COMPILING = 11
    TRAINING = 12  # forward and backward, where the program does not say which


class Collective(enum.IntEnum):
    """Collectives in which ranks wait for each other."""

    all_gather = 0
    all_reduce = 1
    broadcast = 2
    scatter = 3
    all_gather_object = 4
    broadcast_object = 5
    barrier = 6
    backward = 7  # the exchange of gradients at its end


class Activity(NamedTuple):
    """What a rank does at one moment. A panel shows it only with a line that was read at a moment with the same."""

    phase: Phase = Phase.NOTHING
    waits_in: Collective | None = None  # while the phase is `Phase.WAITING`
    in_loop: bool = False  # a loop over a loader is on
    evaluates: bool = False  # that loop computes no gradients, or has gone on for a while without a backward


_PHASES, _COLLECTIVES = tuple(Phase), tuple(Collective)


def phase_of(number: int) -> Phase:
    """Return the phase of a number on a page. A rank whose number means nothing is running."""
    phase = _PHASES[number] if 0 <= number < len(_PHASES) else Phase.NOTHING
    return phase or Phase.RUNNING


def collective_of(number: int) -> Collective | None:
    """Return the collective of a number on a page; None if it means nothing."""
    return _COLLECTIVES[number] if 0 <= number < len(_COLLECTIVES) else None


_FILENAME = 248
_CALLED = 64
_INSIDE = 64
LINE = struct.Struct(f"=qqqqqq{_FILENAME}s{_CALLED}s{_INSIDE}sq")


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    """A line of the user's code, see `notebook.worker.stack_writer`."""

    number: int  # counts samples of the line, from 1
    activity: Activity  # at the same moment
    entered: int = 0  # when the phase began: see `Sample.entered`
    filename: str  # the end of one that is very long
    lineno: int
    called: str = ""  # the function for communication that the line has called, as it stands there
    inside: str = ""  # what the line runs: ``importing pandas``, or the function that it has called

    def write(self, memory: memoryview, at: int) -> None:
        filename = self.filename.encode(errors="replace")[-_FILENAME + 1 :]
        called = self.called.encode(errors="replace")[: _CALLED - 1]
        inside = self.inside.encode(errors="replace")[: _INSIDE - 1]
        activity = self.activity
        waits_in = -1 if activity.waits_in is None else activity.waits_in
        loop = activity.in_loop + 2 * activity.evaluates
        words = (self.number, self.entered, activity.phase, waits_in, loop, self.lineno)
        LINE.pack_into(memory, at, *words, filename, called, inside, self.number)

    @classmethod
    def read(cls, memory: Buffer, at: int) -> CodeLine | None:
        """Read what `write` wrote; None if nothing was, or while it is being written."""
        *words, filename, called, inside, number_behind = LINE.unpack_from(memory, at)
        number, entered, phase, waits_in, loop, lineno = words
        if number <= 0 or number != number_behind or lineno <= 0:
            return None
        return cls(
            number=number,
            activity=Activity(phase_of(phase), collective_of(waits_in), bool(loop & 1), bool(loop & 2)),
            entered=entered,
            filename=text_of(filename),
            lineno=lineno,
            called=text_of(called),
            inside=text_of(inside),
        )


def text_of(raw: bytes) -> str:
    """Return the text of some bytes of a progress page, which a zero ends. A letter that was cut is dropped."""
    return raw.split(b"\0", 1)[0].decode(errors="ignore")


MEMORY = struct.Struct("=8q96s")


@dataclass(frozen=True)
class RankMemory:
    """What a rank held in memory when it was measured last. All numbers are bytes; 0 also means not known."""

    parameters: int = 0  # of prepared models: its shards, where they are sharded
    gradients: int = 0
    optimizer: int = 0  # states, with weights that an engine keeps for them in float32
    pending: int = 0  # what gradients and states will take that come with the first backward and the first step
    base: int = 0  # what else it held when models had been prepared: libraries and data, on a device next to nothing
    used: int = 0  # all that it held
    limit: int = 0  # the most that it could hold
    peak: int = 0  # the most that it held
    sharding: str = ""  # how models are spread over ranks, in a few words; "" if they are not

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer states together: what does not depend on the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def activations(self) -> int:
        """What else was used, above all activations; 0 if the whole is not known."""
        return max(0, self.used - self.base - self.states)

    def write(self, memory: memoryview, at: int) -> None:
        *numbers, sharding = dataclasses.astuple(self)
        MEMORY.pack_into(memory, at, *numbers, sharding.encode(errors="replace")[:95])

    @classmethod
    def read(cls, memory: Buffer, at: int) -> RankMemory:
        """Read what `write` wrote; values that make no sense are 0."""
        *numbers, sharding = MEMORY.unpack_from(memory, at)
        values: list[Any] = [*(max(0, number) for number in numbers), text_of(sharding)]
        return cls(*values)

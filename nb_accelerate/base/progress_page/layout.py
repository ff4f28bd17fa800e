"""Binary layout of a progress page."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import facts
from nb_accelerate.base.progress_page.facts import Activity, Phase, collective_of, phase_of

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 8192  # bytes: two pages of memory

# Words of 8 bytes, by number. Whole numbers, but for LOSS.
REQUEST = 0  # calls or cells begun
ROWS_WANTED = 1  # set by the notebook: progress bars are drawn in a panel, and not printed
PHASE = 2
STEP = 3  # batches of the current loop that were handed out
TOTAL = 4  # of the current loop; -1 if not known
LOOP = 5  # counts loops, so that a reader sees when another one has begun
EVALUATES = 6  # the current loop began where no gradients are computed
EPOCH = 7  # of the current loop's loader, from 1
STEPS_BEFORE = 8  # of training loops that have ended
ROWS = 9  # rows of all ranks together in one step; 0 if not known
WAITS_IN = 10  # a `Collective`, while the phase is WAITING
COLLECTIVES = 11  # how many it has begun
MEMORY = 12  # bytes that tensors use on the device; 0 if the device does not say
MEMORY_PEAK = 13  # the most that was seen
LOSS = 14  # a float; NO_LOSS if there is none
BARS_SEEN = 15  # counts changes of bars
IN_LOOP = 16  # the current loop has not ended
TRAINS = 17  # there was a backward, or an optimizer's step, in the current loop
TRAINED_EPOCH = 18  # of the last loop that trained and has ended, or has another in it
UTILISATION = 19  # percent of the device's time; -1 if the device does not say
SAVES = 20  # a checkpoint is written in the background, which may outlast the call or cell that began it
EPOCHS = 21  # of the loop over epochs; 0 if not known
EPOCH_OF_RUN = 22  # the current one of that loop, from 1
COMPILED = 23  # programs that were compiled for the device
COMPILING_MS = 24  # milliseconds that took
NANOSECONDS = 25  # 16 words: time spent in each `Phase`, that which is on left out
SINCE = 41  # `time.monotonic_ns` when counting times began; 0 if nothing is to be added for the current phase
WORKERS = 42  # `num_workers` of the current loop's loader, and 1 more; 0 if not known
SPANS_EPOCHS = 43  # the current loop goes over all epochs of the run, and its steps are the steps of the run
OTHER_GROUP = 44  # this process has made a process group at another address than its launch's, since it began
INTERRUPT = 45  # set by the notebook: which call or cell SIGINT is meant for, and how often that was said
ACCUMULATION = 46  # batches in one optimizer step; 0 if not known
PRECISION = 47  # 1 and more: number in `PRECISIONS`; 0 if not known
RESUMED = 48  # this call or cell has loaded the state of a checkpoint
SAVE = 49  # set by the notebook: number of the checkpoint that is asked for, see `Steerable`; 0 if there is none
STOP = 50  # set by the notebook: training is to end after this epoch
OBEYS = 51  # 1 while a loop over epochs obeys, 2 if it can save too
SAVED = 52  # twice the number of the checkpoint that was saved last, and 1 more if it could not be
ENDED_AFTER = 53  # the epoch, from 1, after which a loop over epochs was ended as asked, before its last; else 0
ENDED_OF = 54  # the number of its epochs
NUM_WORDS = 55

PRECISIONS = ("", "no", "fp16", "bf16", "fp8")  # values of ``mixed_precision``, by number

INTERRUPTS = 1 << 16  # The count of interrupts wraps to 0 here. It shares a word with the number of the call or cell.

# The least float. Not NaN, which is a value that a loss may have and that has to be shown.
NO_LOSS = -1.7976931348623157e308

WORD = struct.Struct("q")  # native: eight bytes in one piece
HEADER = struct.Struct(f"={LOSS}qd{NUM_WORDS - LOSS - 1}q")

# Logged values: a name of up to 24 bytes and a float, each.
SCALARS_AT = 512
NUM_SCALARS = 16
SCALAR = struct.Struct("=24sd")

WARNING_AT = 2048  # a sentence about what is wrong, of a rank; empty if there is none
WARNING = struct.Struct("=1024s")

LINE_AT = 3072  # the line of the user's code that the rank was at when the notebook asked last, see `CodeLine`

MEMORY_AT = 3584  # what the rank holds in memory, see `RankMemory`: it stays from one call or cell to the next

ANSWER_AT = 4096  # where the checkpoint is that the notebook has asked for, or why there is none
ANSWER = struct.Struct("=1024s")

# Progress bars: state (0 free, 1 moves, 2 ended), level, count, total (-1 unknown), `time.monotonic` at the beginning
# and at the last change, label, what stands beside the bar.
BARS_AT = 6144
BAR = struct.Struct("=qqdddd56s152s")

assert HEADER.size == NUM_WORDS * 8 <= SCALARS_AT
assert (SIZE - BARS_AT) % BAR.size == 0
assert SCALARS_AT + NUM_SCALARS * SCALAR.size <= WARNING_AT
assert WARNING_AT + WARNING.size <= LINE_AT
assert LINE_AT + facts.LINE.size <= MEMORY_AT
assert MEMORY_AT + facts.MEMORY.size <= ANSWER_AT
assert ANSWER_AT + ANSWER.size <= BARS_AT
assert NANOSECONDS + len(Phase) <= SINCE

_SURE = 2  # steps after which a loop without a backward is no training


def activity_of(words: Sequence[int]) -> Activity:
    """Return what the words of a page say that its rank does."""
    phase = phase_of(words[PHASE])
    return Activity(
        phase=phase,
        waits_in=collective_of(words[WAITS_IN]) if phase is Phase.WAITING else None,
        in_loop=bool(words[IN_LOOP]),
        evaluates=not words[TRAINS] and (bool(words[EVALUATES]) or words[STEP] > _SURE),
    )


def entered(words: Sequence[int]) -> int:
    """Return when the phase of a page began: what all phases before it took is known."""
    return words[SINCE] + sum(words[NANOSECONDS:SINCE])

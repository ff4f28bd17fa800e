"""What ranks did in a rehearsal, where they part, and how that is shown. Pure: no process, no tensor."""

from __future__ import annotations

import itertools
import linecache
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.base.table import Table
from nb_accelerate.base.topology.rank_lists import named, ranges
from nb_accelerate.base.words import brief, size
from nb_accelerate.errors.traceback_lines import line_in_cell
from nb_accelerate.training.rehearsal.memory import TOO_MUCH, described
from nb_accelerate.training.rehearsal.picture import picture

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from nb_accelerate.training.rehearsal.memory import Mark, Memory

Line = tuple[str, int]  # file and number of a line of the user's; the file is "" where there is none
_STOPS = ("hang", "error", "memory")  # kinds of findings with which a run does not come to its end


@dataclass(frozen=True)
class Exchange:
    """Something that ranks do together."""

    what: str  # operation, dtype and shape: "all_gather of int64 (4,)"; equal on ranks that are in step
    line: Line  # of the user's code
    called: str = ""  # by the line, if that is of this package


@dataclass
class Pass:
    """One loop over a prepared loader: the rows of each batch, and how many optimizer steps were taken in it."""

    line: Line
    rows: list[int] = field(default_factory=list)
    steps: int = 0
    since_step: int = 0  # rows since the last step


@dataclass
class Trace:
    """What one rank did."""

    rank: int
    exchanges: list[Exchange] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)  # of each step, of each prepared optimizer
    step_rows: list[int] = field(default_factory=list)  # of this rank, for each step of the first optimizer
    files: dict[str, Line] = field(default_factory=dict)  # written by this rank
    invented: dict[Line, None] = field(default_factory=dict)  # lines that read a number that was not computed
    notes: dict[str, None] = field(default_factory=dict)  # what could not be rehearsed
    memory: list[Memory] = field(default_factory=list)  # over the first two steps
    marks: list[Mark] = field(default_factory=list)  # where parts of these begin
    fullest: str = ""  # the device that this is of, where the rank has several
    smaller: list[tuple[int, int]] = field(default_factory=list)  # rows of smaller batches, and the most bytes then
    sent: dict[str, float] = field(default_factory=dict)  # bytes by operation, in the second step
    computed: tuple[float, float] = (0.0, 0.0)  # operations on floating-point numbers of 16 and 32 bits, in that step
    failure: str = ""  # the text of the exception that ended it
    failed_at: Line = ("", 0)
    ended: bool = False  # came to its end, in the given time
    seconds: float = 0.0

    @property
    def trained(self) -> list[Pass]:
        """The passes in which an optimizer stepped."""
        return [one for one in self.passes if one.steps]


@dataclass(frozen=True)
class Finding:
    """What is wrong, or worth a look."""

    kind: str  # "hang", "error", "file", "rate", "memory", "invented" or "note"
    text: str  # with the lines of the ranks


@dataclass(frozen=True)
class Rehearsal:
    """What `rehearse` returns. Shown as a table with a line for each kind of rank, and the findings below it.

    Attributes:
        traces: what each rehearsed rank did, in their order.
        world_size: ranks of the run.
        seconds: that each rank had.
        device: name of the accelerator that the run is to have; "" for none.
        capacity: its bytes.
        speeds: its operations per second at most, on numbers of 16 and of 32 bits.
    """

    traces: Sequence[Trace]
    world_size: int
    seconds: float
    device: str = ""
    capacity: int = 0
    speeds: tuple[float, float] = (0.0, 0.0)

    @cached_property
    def findings(self) -> list[Finding]:
        """What is wrong or worth a look, the gravest first."""
        traces = self.traces
        by_kind = (_failures(traces), _hang(traces), _files(traces), _rates(traces), _invented(traces))
        too_much = [Finding("memory", self.memory)] if self.memory.endswith(TOO_MUCH) else []
        return [*too_much, *(finding for some in by_kind for finding in some)]

    @property
    def ok(self) -> bool:
        """Whether the ranks stay in step, none fails, and each fits its device, as far as the rehearsal came."""
        return not any(finding.kind in _STOPS for finding in self.findings)

    @property
    def table(self) -> Table:
        """A row for each kind of rank; notes below it say what was found, and how far the rehearsal came."""
        alike = _alike(self.traces, lambda trace: (self._row([trace])[1:], trace.failure, trace.ended))
        signs = [f"{'!' if finding.kind in _STOPS else '*'} {finding.text}" for finding in self.findings]
        memory = [self.memory] if self.memory and not self.memory.endswith(TOO_MUCH) else []
        notes = (*signs, *memory, *filter(None, [self.sent]), self._how_far())
        titles = ("ranks", "epochs", "batches", "rows", "evaluated", "steps", "rows a step", "learning rate")
        return Table(titles, [self._row(group) for group in alike], right=titles[1:-1], notes=notes)

    @cached_property
    def memory(self) -> str:
        """What the rank with most memory holds in the first two steps, and whether the device has room for it."""
        trace = self._fullest
        if not trace.memory:
            return "memory is not counted: no two steps were taken" if self.capacity else ""
        text = described(trace.memory, trace.marks, self.traces[0].smaller, self.capacity, self.device)
        return f"memory of a rank{trace.fullest}: {text}"

    @property
    def _fullest(self) -> Trace:
        return max(self.traces, key=lambda trace: max(map(sum, trace.memory), default=0))

    @property
    def sent(self) -> str:
        """What a rank sends in a step, by operation, around rings as NCCL does, and what it computes."""
        trace = max(self.traces, key=lambda each: sum(each.sent.values()))
        parts = [f"{size(each)} by {name}" for name, each in trace.sent.items() if each >= 1000]
        if not parts:
            return ""
        text = f"a rank sends in each step: {', '.join(parts)}"
        if all(self.speeds) and sum(trace.computed) > 1e9:  # else neither takes as long as starting it
            seconds = sum(each / speed for each, speed in zip(trace.computed, self.speeds, strict=True))
            link = 8 * sum(trace.sent.values()) / seconds / 1e9
            text += f"; and it computes {sum(trace.computed) / 1e12:,.3g} TFLOP. At the peak speed of the {self.device}"
            text += f" that takes as long as sending at {link:,.1f} Gbit/s: over a slower link, sending takes longer"
        return text

    def _how_far(self) -> str:
        ranks = f"ranks {ranges([trace.rank for trace in self.traces])} of {self.world_size}"
        every = f"all {self.world_size} ranks" if self.world_size > 1 else "the rank"
        which = every if len(self.traces) == self.world_size else ranks
        text = f"rehearsed {which} in {max(trace.seconds for trace in self.traces):.1f} s"
        for trace in self.traces:
            if not trace.ended and not trace.failure:
                batch = len(trace.passes[-1].rows) if trace.passes else 0
                far = f"batch {batch} of pass {len(trace.passes)}"
                over = f"the {brief(self.seconds)} were over, and rank {trace.rank} came to {far}"
                return f"{text}: {over}. What comes later is not known"
        return f"{text}, to the end" if any(trace.ended for trace in self.traces) else text

    def _row(self, group: Sequence[Trace]) -> tuple[str, ...]:
        trace = group[0]
        trained, per_step = trace.trained, trace.step_rows
        return (
            ranges([one.rank for one in group]),
            str(len(trained)),
            _same([len(one.rows) for one in trained]),
            _same([sum(one.rows) for one in trained]),
            _same([sum(one.rows) for one in trace.passes if not one.steps]),
            ", ".join(str(len(rates)) for rates in trace.rates),
            f"{max(per_step, key=per_step.count) * self.world_size:,}" if per_step else "",
            "; ".join(
                " > ".join(dict.fromkeys(f"{r:.3g}" for r in (of[0], max(of), of[-1]))) for of in trace.rates if of
            ),
        )

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        trace = self._fullest
        drawn = picture(trace.memory, trace.marks, self.capacity, self.device) if trace.memory else ""
        return self.table._repr_html_() + drawn


def _same(numbers: Sequence[int]) -> str:
    """Return the number that all are, or the least and the greatest."""
    return "-".join(f"{number:,}" for number in sorted({min(numbers), max(numbers)})) if numbers else ""


def _alike(traces: Sequence[Trace], key: Callable[[Trace], Hashable]) -> list[list[Trace]]:
    """Return traces in groups that have the same key, in the order of their first ranks."""
    groups: dict[Hashable, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(key(trace), []).append(trace)
    return list(groups.values())


def _ranks(traces: Sequence[Trace]) -> str:
    return named([trace.rank for trace in traces])


def _place(line: Line) -> str:
    """Return how a line is named for users: ``cell 4 line 57``, ``train.py line 57``."""
    filename, number = line
    if not filename:
        return "no line of yours"
    return line_in_cell(filename, number) or f"{Path(filename).name} line {number}"


def _failures(traces: Sequence[Trace]) -> Iterator[Finding]:
    for group in _alike([trace for trace in traces if trace.failure], lambda trace: (trace.failure, trace.failed_at)):
        where = f" ({_place(group[0].failed_at)})" if group[0].failed_at[0] else ""
        yield Finding("error", f"{_ranks(group)}: {group[0].failure}{where}")


def _hang(traces: Sequence[Trace]) -> Iterator[Finding]:
    """Find the first exchange in which a rank is not in step with the first one."""
    traces = [trace for trace in traces if trace.exchanges or trace.ended]  # others died, and said nothing
    differences: dict[tuple[int, str, str], list[Trace]] = {}
    for other in traces[1:]:
        for number, (mine, its) in enumerate(itertools.zip_longest(traces[0].exchanges, other.exchanges)):
            if (mine and mine.what) != (its and its.what):
                mine_is, its_is = _is(traces[0], mine), _is(other, its)
                if mine_is and its_is:
                    differences.setdefault((number, mine_is, its_is), []).append(other)
                break
    if differences:
        (number, mine_is, its_is), parted = min(differences.items(), key=lambda item: item[0])
        both = f"{_ranks(traces[:1])} at {mine_is}, {_ranks(parted)} at {its_is}"
        yield Finding("hang", f"ranks wait for each other from exchange {number + 1} on: {both}")


def _is(trace: Trace, exchange: Exchange | None) -> str:
    """Return where a rank is while others do something else; "" if that is not known, as its time was over."""
    if exchange is not None:
        what = exchange.what if exchange.called in ("", exchange.what) else f"{exchange.called}: {exchange.what}"
        return f"{what} ({_place(exchange.line)})"
    if trace.failure:
        return f"its {trace.failure.partition(':')[0]} ({_place(trace.failed_at)})"
    return "the end" if trace.ended else ""


def _files(traces: Sequence[Trace]) -> Iterator[Finding]:
    for path in dict.fromkeys(path for trace in traces for path in trace.files):
        group = [trace for trace in traces if path in trace.files]
        if len(group) > 1:
            which = f"{Path(path).name} ({_place(group[0].files[path])})"
            help_ = "write it under `if accelerator.is_main_process:`"
            yield Finding("file", f"{_ranks(group)} write the same file, {which}: {help_}")


def _rates(traces: Sequence[Trace]) -> Iterator[Finding]:
    for number, rates in enumerate(traces[0].rates):
        which = f"optimizer {number + 1}" if len(traces[0].rates) > 1 else "the optimizer"
        end = max((step for step, rate in enumerate(rates, 1) if rate), default=0)
        if len(rates) - end > 1 and end:
            zero = f"is 0 from step {end + 1} of {len(rates)} on"
            yield Finding("rate", f"the learning rate of {which} {zero}: the schedule ends too early")
        if step := _rises_again(rates):
            rise = f"step {step + 1} of {len(rates)}, from {rates[step - 1]:.3g} to {rates[step]:.3g}"
            yield Finding("rate", f"the learning rate of {which} rises again at {rise}")


def _rises_again(rates: Sequence[float]) -> int:
    """Return the first step whose rate is above the one before, after it came down from its greatest; 0 if none."""
    greatest = 0.0
    for step, (before, rate) in enumerate(itertools.pairwise(rates), 1):
        greatest = max(greatest, before)
        if before < greatest / 2 and rate > 1.01 * before:
            return step
    return 0


def _invented(traces: Sequence[Trace]) -> Iterator[Finding]:
    yield from (Finding("note", note) for note in dict.fromkeys(note for trace in traces for note in trace.notes))
    lines = list(dict.fromkeys(line for trace in traces for line in trace.invented))
    if lines:
        read = ", ".join(map(_place, lines[:4])) + (" ..." if len(lines) > 4 else "")
        text = f"numbers that were not computed are read: {read}"
        words = ("if ", "elif ", "while ", "assert ")
        branches = [line for line in lines if linecache.getline(*line).strip().startswith(words)]
        if branches:
            text += f". What {', '.join(map(_place, branches))} decides may be otherwise in a run"
        yield Finding("invented", text)

"""Compare what ranks did in a rehearsal. Pure: no process, no tensor."""

from __future__ import annotations

import linecache
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.errors.traceback_lines import line_in_cell

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from nb_accelerate.training.rehearsal.trace import Exchange, Line, Trace

STOPS = ("hang", "error")
"""Kinds of findings with which a run does not come to its end."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, or worth a look.

    Attributes:
        kind: ``hang``, ``error``, ``file``, ``steps``, ``rate``, ``invented`` or ``note``.
        text: a sentence, with the lines of the ranks.
    """

    kind: str
    text: str


def findings(traces: Sequence[Trace]) -> list[Finding]:
    """Return what is found in the traces of ranks, the gravest first."""
    return [*_failures(traces), *_hang(traces), *_files(traces), *_steps(traces), *_rates(traces), *_invented(traces)]


def alike(traces: Sequence[Trace], key: Callable[[Trace], Hashable]) -> list[list[Trace]]:
    """Return traces in groups of those that have the same key, in the order of their first ranks."""
    groups: dict[Hashable, list[Trace]] = {}
    for trace in traces:
        groups.setdefault(key(trace), []).append(trace)
    return list(groups.values())


def place(line: Line) -> str:
    """Return how a line is named for users: ``cell 4 line 57``, ``train.py line 57``."""
    filename, number = line
    if not filename:
        return "no line of yours"
    return line_in_cell(filename, number) or f"{Path(filename).name} line {number}"


def _failures(traces: Sequence[Trace]) -> Iterator[Finding]:
    for group in alike([trace for trace in traces if trace.failure], lambda trace: (trace.failure, trace.failed_at)):
        where = f" ({place(group[0].failed_at)})" if group[0].failed_at[0] else ""
        yield Finding("error", f"{_ranks(group)}: {group[0].failure}{where}")


def _hang(traces: Sequence[Trace]) -> Iterator[Finding]:
    """Find the first exchange in which a rank is not in step with the first one."""
    traces = [trace for trace in traces if trace.exchanges or trace.ended]  # others died, and said nothing
    if not traces:
        return
    first = traces[0]
    found: dict[tuple[int, str, str], list[Trace]] = {}
    for other in traces[1:]:
        for number, (mine, its) in enumerate(zip_longest(first.exchanges, other.exchanges)):
            if (mine and mine.what) == (its and its.what):
                continue
            mine_is, its_is = _is(first, mine), _is(other, its)
            if mine_is and its_is:
                found.setdefault((number, mine_is, its_is), []).append(other)
            break
    if found:
        (number, mine_is, its_is), others = min(found.items(), key=lambda item: item[0])
        both = f"{_ranks([first])} at {mine_is}, {_ranks(others)} at {its_is}"
        yield Finding("hang", f"ranks wait for each other from exchange {number + 1} on: {both}")


def _is(trace: Trace, exchange: Exchange | None) -> str:
    """Return where a rank is while others do something else; "" if that is not known, as its time was over."""
    if exchange is not None:
        what = exchange.what if exchange.called in ("", exchange.what) else f"{exchange.called}: {exchange.what}"
        return f"{what} ({place(exchange.line)})"
    if trace.failure:
        return f"its {trace.failure.partition(':')[0]} ({place(trace.failed_at)})"
    return "the end" if trace.ended else ""


def _files(traces: Sequence[Trace]) -> Iterator[Finding]:
    writers: dict[str, list[Trace]] = {}
    for trace in traces:
        for path in trace.files:
            writers.setdefault(path, []).append(trace)
    for path, group in writers.items():
        if len(group) > 1:
            line = place(group[0].files[path])
            yield Finding(
                "file",
                f"{_ranks(group)} write the same file, {Path(path).name} ({line}): write it under "
                "`if accelerator.is_main_process:`",
            )


def _steps(traces: Sequence[Trace]) -> Iterator[Finding]:
    ended = [trace for trace in traces if trace.ended]
    groups = alike(ended, lambda trace: tuple(map(len, trace.rates)))
    if len(groups) > 1:
        each = "; ".join(f"{_ranks(group)} {_and(map(len, group[0].rates))}" for group in groups)
        yield Finding("steps", f"ranks take other numbers of optimizer steps: {each}")


def _rates(traces: Sequence[Trace]) -> Iterator[Finding]:
    for trace in traces[:1]:
        for number, rates in enumerate(trace.rates):
            which = f"optimizer {number + 1}" if len(trace.rates) > 1 else "the optimizer"
            end = len(rates)
            while end and rates[end - 1] == 0:
                end -= 1
            if len(rates) - end > 1 and end:
                yield Finding(
                    "rate",
                    f"the learning rate of {which} is 0 from step {end + 1} of {len(rates)} on: the "
                    "schedule ends too early",
                )
            rises = _rises_again(rates)
            if rises:
                yield Finding(
                    "rate",
                    f"the learning rate of {which} rises again at step {rises + 1} of {len(rates)}, "
                    f"from {rates[rises - 1]:.3g} to {rates[rises]:.3g}",
                )


def _rises_again(rates: Sequence[float]) -> int:
    """Return the first step whose rate is well above the one before, after it had come down from its greatest; or 0."""
    greatest = 0.0
    for index, rate in enumerate(rates):
        greatest = max(greatest, rate)
        if index and rates[index - 1] < greatest / 2 and rate > rates[index - 1] * 1.01:
            before = rates[:index]
            if max(before) == greatest and before.index(greatest) < index - 1:
                return index
    return 0


def _invented(traces: Sequence[Trace]) -> Iterator[Finding]:
    lines: Counter[Line] = Counter()
    for trace in traces:
        lines.update(trace.invented)
    notes = dict.fromkeys(note for trace in traces for note in trace.notes)
    yield from (Finding("note", note) for note in notes)
    if lines:
        branches = [line for line in lines if _source(line).startswith(("if ", "elif ", "while ", "assert "))]
        read = ", ".join(map(place, list(lines)[:4])) + (" ..." if len(lines) > 4 else "")
        text = f"numbers that were not computed are read: {read}"
        if branches:
            text += f". What {', '.join(map(place, branches))} decides may be otherwise in a run"
        yield Finding("invented", text)


def _source(line: Line) -> str:
    return linecache.getline(*line).strip()


def _ranks(traces: Sequence[Trace]) -> str:
    return named([trace.rank for trace in traces])


def _and(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, numbers))

"""What a panel says that a rank does belongs to the line that it names: random programs, whose lines are known."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from nb_accelerate.base.progress_page import Collective, Phase, ProgressPage, here, layout, page
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.notebook.display.rank_history import RankHistory, RankObservation
from nb_accelerate.notebook.protocol.messages import Frame
from nb_accelerate.notebook.worker import stack_writer
from nb_accelerate.notebook.worker.stack_writer import note_line

PHASES = {
    "enter(Phase.DATA)": "loading data",
    "enter(Phase.FORWARD)": "forward",
    "enter(Phase.BACKWARD)": "backward",
    "enter(Phase.STEP)": "optimizer step",
    "wait_in(Collective.all_gather)": "waits in gather",
    "wait_in(Collective.all_reduce)": "waits in reduce",
    "wait_in(Collective.backward)": "waits in backward",
}


def random_program(seed: int) -> tuple[str, dict[int, set[str]]]:
    """Return loops over loaders that do this and that, and what may be shown of each line."""
    choose = random.Random(seed)
    lines = ["def program(page, Phase, Collective):"]
    shown: dict[int, set[str]] = {}

    def put(line: str, *texts: str) -> None:
        lines.append(f"    {line}")
        shown[len(lines)] = {*texts}

    for _ in range(choose.randint(2, 4)):
        evaluates = choose.random() < 0.4
        usual = ["evaluation"] if evaluates else ["between steps", "first batch"]
        put(f"loop = page.begin_loop(total=40, rows=1, epoch=1, evaluates={evaluates})", "running", *usual)
        put("for step in range(40):", *usual)
        put("    page.step(step)" if evaluates else "    page.step(step); page.trains()", *usual)
        for _ in range(choose.randint(2, 5)):
            begin, text = choose.choice([*PHASES.items()])
            work = f"sum(range({choose.randint(100, 4000)}))"
            put(f"    page.{begin}; {work}; page.enter(Phase.RUNNING)", *usual, "evaluation" if evaluates else text)
        put("page.end_loop(loop)", "running", *usual)
    return "\n".join(lines), shown


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytearray]:
    """Memory to which this process writes its progress. Threads take turns as often as they can."""
    memory, interval = bytearray(layout.SIZE), sys.getswitchinterval()
    monkeypatch.setattr(page, "_page", ProgressPage(memory))
    sys.setswitchinterval(1e-6)
    yield memory
    sys.setswitchinterval(interval)


def test_what_a_rank_does_is_shown_with_the_line_at_which_it_did_that(memory: bytearray, tmp_path: Path):
    seen: list[tuple[int, int, str]] = []  # program, line, text

    def look(number: int, has_ended: threading.Event) -> None:
        history, looks = RankHistory(0, 0.0), 0
        while not has_ended.is_set():
            note_line()
            looks += 1
            history.add(looks / 10, RankObservation(rank=0, sample=read(memory)))
            if history.location:
                seen.append((number, int(history.location.rpartition(":")[2]), history.doing))

    wrong = []
    number = 0
    while number < 40 or len({*seen}) <= 100:  # how often is looked at a program depends on the machine
        number += 1
        source, shown = random_program(number)
        file = tmp_path / f"program_{number}.py"
        file.write_text(source)
        space: dict[str, object] = {}
        exec(compile(source, str(file), "exec"), space)
        here().begin_request()
        has_ended = threading.Event()
        looker = threading.Thread(target=look, args=(number, has_ended))
        looker.start()
        space["program"](here(), Phase, Collective)  # type: ignore[operator]
        has_ended.set()
        looker.join()
        wrong += [
            (source.splitlines()[line - 1].strip(), text)
            for which, line, text in seen
            if which == number and line in shown and not text.startswith(tuple(shown[line]))
        ]
    assert not wrong


def test_no_line_is_noted_of_a_rank_that_enters_a_phase_meanwhile(memory: bytearray, monkeypatch: pytest.MonkeyPatch):
    users_line = stack_writer.users_line
    here().begin_request()
    here().wait_in(Collective.all_gather)

    def look_slowly(frames: Iterable[Frame]) -> tuple[Frame, str] | None:
        found = users_line(frames)
        here().enter(Phase.RUNNING)
        here().wait_in(Collective.all_gather)
        return found

    with monkeypatch.context() as slow:
        slow.setattr(stack_writer, "users_line", look_slowly)
        note_line()
    assert read(memory).line is None, "it may be a line of another exchange"
    note_line()
    line = read(memory).line
    assert line is not None
    assert line.activity.waits_in is Collective.all_gather

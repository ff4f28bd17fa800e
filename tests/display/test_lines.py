"""What a log gets: few lines, each trouble once, and at the end what it came to."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from fixtures.panels import Run

from nb_accelerate.base.progress_page import Bar, Phase
from nb_accelerate.notebook.display import panel as panels
from nb_accelerate.notebook.display.drawing.lines import Lines
from nb_accelerate.notebook.display.panel import Action, Drawing, Panel
from nb_accelerate.notebook.display.rank_history import RankObservation
from nb_accelerate.notebook.display.view import Facts, View


class Paper:
    own_stream = "stdout"

    def __init__(self) -> None:
        self.out: list[str] = []
        self.err: list[str] = []
        self.displays: list[dict[str, Any]] = []

    def write(self, stream: Any, text: str) -> None:
        assert text.endswith("\n")
        (self.out if stream == "stdout" else self.err).append(text)

    def display(self, kind: str, content: dict[str, Any]) -> None:
        assert kind == "display_data"
        self.displays.append(content["data"])


def draws(lines: Lines, run: Run, seconds: int) -> None:
    for _ in range(seconds):
        run.train(1.0)
        lines.draw(run.view)


def test_lines_come_ever_more_seldom_but_once_a_minute_at_least():
    paper, run = Paper(), Run(2)
    run.begin_loop(total=100_000)
    lines, at = Lines(paper, is_notebook=False), []
    for second in range(1, 260):
        before = len(paper.out)
        draws(lines, run, 1)
        at += [second] * (len(paper.out) - before)
    assert at == [5, 10, 20, 40, 80, 140, 200]


def test_each_trouble_is_said_once_though_its_numbers_change_and_again_when_it_comes_back():
    paper, run = Paper(), Run(3)
    lines = Lines(paper, is_notebook=False)
    run.begin_loop()
    draws(lines, run, 3)
    for _ in range(2):
        run.put([0, 2], phase=Phase.WAITING)
        run.put([1], phase=Phase.FORWARD)
        for _ in range(12):
            run.wait(1.0)
            lines.draw(run.view)
        draws(lines, run, 3)
    assert len(paper.err) == 2
    assert all(text.startswith("Rank 1 ") for text in paper.err)


def test_a_slow_rank_is_named_once_although_how_slow_it_is_changes():
    paper, run = Paper(), Run(3)
    lines = Lines(paper, is_notebook=False)
    run.begin_loop()
    for second in range(30):
        own = 0.7 + 0.2 * (second % 4) / 3

        def each(own: float = own) -> None:
            run.step_of([0, 2], shares={Phase.DATA: 0.1, Phase.BACKWARD: 0.9})
            run.step_of([1], shares={Phase.DATA: own, Phase.BACKWARD: 1 - own})

        run.wait(1.0, each)
        lines.draw(run.view)
    assert len(paper.err) == 1


@pytest.mark.parametrize("is_notebook", [True, False])
def test_a_short_run_without_bars_leaves_nothing(is_notebook: bool):
    paper, run = Paper(), Run(2)
    lines = Lines(paper, is_notebook=is_notebook)
    run.begin_loop(total=100)
    draws(lines, run, 3)
    lines.finish(run.end(), was_drawn=True)
    assert (paper.out, paper.err, paper.displays) == ([], [], [])


@pytest.mark.contract("panel: lines")
def test_a_notebook_keeps_a_table_and_a_log_a_line():
    for is_notebook in (True, False):
        paper, run = Paper(), Run(2)
        lines = Lines(paper, is_notebook=is_notebook)
        run.put(
            bars=(Bar(label="rows", text="5/5 [00:01<00:00, 5.00it/s]", count=5, total=5, seconds=1.0, ended=True),)
        )
        run.look()
        lines.finish(run.end(), was_drawn=False)
        if is_notebook:
            (data,) = paper.displays
            assert set(data) == {"text/html", "text/plain"}
            assert "5/5 [00:01, 5.00it/s]" in data["text/html"]
            assert "5/5 [00:01, 5.00it/s]" in data["text/plain"]
        else:
            assert paper.out == ["train: done in 0:00\n"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Source:
    """Ranks that say what they are told to say."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.asked = self.noted = 0
        self.answers: dict[int, str] = {}

    def statuses(self) -> list[RankObservation]:
        return list(self.run.ranks.values())

    def ask(self) -> None:
        self.asked += 1

    def note_lines(self) -> None:
        self.noted += 1

    def stacks(self) -> dict[int, str]:
        return self.answers

    def runs(self) -> tuple[str, ...]:
        return ()

    def log(self, rank: int) -> str:
        return ""

    def actions(self) -> tuple[Action, ...]:
        return ()


class Kept(Drawing):
    every = 0.5

    def __init__(self) -> None:
        self.drawn: list[View] = []
        self.last: list[View] = []

    def draw(self, view: View) -> None:
        self.drawn.append(view)

    def finish(self, view: View, *, was_drawn: bool) -> None:
        assert was_drawn == bool(self.drawn)
        self.last.append(view)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(panels, "time", one)
    return one


def watch(run: Run, number: int) -> tuple[Panel, Source, Kept]:
    for rank, seen in run.ranks.items():
        run.ranks[rank] = RankObservation(rank=rank, sample=seen.sample, state=seen.state)  # of no process
    source, kept = Source(run), Kept()
    return Panel(Facts(name="train", setup=("2 ranks",)), range(number), kept, source), source, kept


def refresh_for(panel: Panel, clock: Clock, seconds: float) -> int:
    end, looks = clock.now + seconds, 0
    while panel.due < end:
        clock.now = panel.due
        panel.refresh()
        looks += 1
    clock.now = end
    return looks


@pytest.mark.parametrize(("number", "looks", "drawings"), [(2, 99, 18), (64, 25, 12)])
def test_ranks_are_looked_at_some_times_a_second_and_drawn_as_often_as_the_drawing_wants(
    clock: Clock, number: int, looks: int, drawings: int
):
    run = Run(number)
    run.begin_loop()
    panel, _, kept = watch(run, number)
    assert refresh_for(panel, clock, 10.0) == pytest.approx(looks, abs=2)
    assert len(kept.drawn) == pytest.approx(drawings, abs=2)
    panel.finish("done")
    assert panel.due == float("inf")
    assert [view.state for view in kept.last] == ["done"]


def test_what_is_over_at_once_has_no_panel(clock: Clock):
    run = Run(2)
    run.begin_loop()
    panel, _, kept = watch(run, 2)
    refresh_for(panel, clock, 0.9)
    panel.finish("done")
    assert (kept.drawn, kept.last) == ([], [])


def test_ranks_are_asked_for_users_lines_a_few_times_a_second_and_in_a_log_when_they_stand_still(clock: Clock):
    run = Run(2)
    run.begin_loop()
    panel, source, _ = watch(run, 2)
    refresh_for(panel, clock, 10.0)
    assert 18 <= source.noted <= 26
    in_a_log = Source(run)
    panel = Panel(Facts(name="train", setup=()), range(2), Lines(Paper(), is_notebook=False), in_a_log)
    run.train(0.25)
    refresh_for(panel, clock, 4.0)
    assert in_a_log.noted == 0
    refresh_for(panel, clock, 4.0)
    assert in_a_log.noted > 0


def test_a_process_that_has_ended_keeps_the_memory_that_it_had(clock: Clock):
    run = Run(1)
    panel, _, kept = watch(run, 1)
    with subprocess.Popen(["sleep", "600"]) as process:
        run.ranks[0] = replace(run.ranks[0], pid=process.pid, memory=0)
        run.begin_loop()
        refresh_for(panel, clock, 3.0)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
        before, after = kept.drawn[-1], len(kept.drawn)
        refresh_for(panel, clock, 3.0)
    assert before.rows[0].memory
    assert {view.rows[0].memory for view in kept.drawn[after:]} == {before.rows[0].memory}


def test_a_panel_that_cannot_be_drawn_ends_no_run(clock: Clock, caplog: pytest.LogCaptureFixture):
    run = Run(2)
    panel, _, kept = watch(run, 2)

    def fail(_: View) -> None:
        raise OSError("the front end has gone")

    kept.draw = fail  # type: ignore[method-assign]
    refresh_for(panel, clock, 5)
    assert panel.due == float("inf")
    panel.finish("done")
    assert kept.last == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "front end has gone" in caplog.text

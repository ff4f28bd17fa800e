"""At the end of a run, one sentence says what slowed it down: only what the times of its ranks show."""

from __future__ import annotations

import re

from fixtures.panels import Run

from nb_accelerate.base.progress_page import CodeLine, Phase
from nb_accelerate.notebook.display.drawing import html, text
from nb_accelerate.notebook.display.findings.advice import Advice
from nb_accelerate.notebook.display.phase_times import in_words

WELL = {Phase.DATA: 2.0, Phase.FORWARD: 30.0, Phase.BACKWARD: 55.0, Phase.WAITING: 5.0, Phase.STEP: 8.0}


def said(*ranks: dict[str, float], num_workers: int | None = 0, cores: int = 8, steps: int = 500, **sample: int) -> str:
    """What is said of ranks that spent so many seconds in some phases, and otherwise as much as those that are well."""
    run = Run(len(ranks))
    run.begin_loop(num_workers=num_workers, **sample)
    run.put(step=1)
    run.look()
    for number, changed in enumerate(ranks):
        spent = {**WELL, **{Phase[name.upper()]: seconds for name, seconds in changed.items()}}
        run.put([number], step=1 + steps, seconds=spent)
    run.look()
    return " ".join(Advice(cores).sentences(run.state.ranks, run.now))


def test_a_run_in_which_all_is_well_needs_no_advice() -> None:
    assert said({}, {}, {}, {}) == ""
    assert said({}) == ""


def test_a_rank_that_loads_slowly_is_named_with_the_workers_that_would_do() -> None:
    # It loads for 65 s, and the rest takes 93 s: one worker would do, and another keeps it from being close.
    waits = {"waiting": 68.0}
    assert said(waits, waits, waits, {"data": 65}) == (
        "Rank 3 spent 40 % of the time loading data. Try num_workers=2 in its DataLoader."
    )


def test_no_more_workers_are_advised_than_there_are_cores() -> None:
    assert "Try num_workers=7 " in said({"data": 65}, num_workers=4, cores=16)
    for_four_cores = said({"data": 65}, num_workers=4, cores=4)
    assert "Try" not in for_four_cores
    assert "num_workers=4 of its" in for_four_cores


def test_of_a_loader_of_which_nothing_is_known_nothing_is_advised() -> None:
    assert re.fullmatch(r"It .*38 %[^=]*", said({"data": 60}, num_workers=None))


def test_time_for_checkpoints_is_said() -> None:
    assert re.match(r"Saving took 33 %.*async_save=True", said({"saving": 50}, {"saving": 49}))


def test_time_for_the_users_own_code_between_steps_is_said_with_its_line() -> None:
    assert re.match(r"60 %.*your own code", said({"running": 150}, {"running": 10, "waiting": 145}))
    run = Run(1)
    run.begin_loop(step=2)
    run.put(phase=Phase.RUNNING)
    activity = run.ranks[0].sample.activity
    run.put(line=CodeLine(number=1, activity=activity, entered=5, filename="/data/train.py", lineno=23))
    run.put(step=1)
    run.look()
    run.put(step=600, seconds={**WELL, Phase.RUNNING: 300.0})
    run.look()
    (sentence,) = Advice(8).sentences(run.state.ranks, run.now)
    assert sentence.endswith(", most often train.py:23.")


def test_a_device_that_is_busy_does_not_wait_for_data() -> None:
    assert said({"data": 60}, utilisation=97) == ""
    assert "loading data" in said({"data": 60}, utilisation=40)


def test_a_short_run_or_one_of_few_steps_gets_no_advice() -> None:
    tenth = {phase.name: spent / 100 for phase, spent in WELL.items()}
    assert said({**tenth, "data": 1.0}) == ""
    assert said({"data": 60}, steps=5) == ""


def test_a_panel_says_where_the_time_goes_live_and_the_advice_at_its_end() -> None:
    run = Run(2)
    run.begin_loop(num_workers=0)
    spent = 0.0
    for _ in range(100):
        spent += 0.125
        run.put([0], seconds={Phase.FORWARD: spent * 0.5, Phase.WAITING: spent * 0.5})
        run.put([1], seconds={Phase.FORWARD: spent * 0.5, Phase.DATA: spent * 0.5})
        run.train(0.125)
    view = run.view
    assert view.rows[0].times == "forward 50 %, waiting 50 %"
    assert view.times == "loading data 25 %, forward 50 %, waiting 25 % (for rank 1)"
    assert not view.advice
    assert 'title="time: loading data 50 %, forward 50 %"' in html.render(view)
    end = run.end()
    assert end.advice.startswith("Rank 1 spent 50 % of the time loading data. ")
    assert end.advice.replace(" %", "\u00a0%") in html.render(end), "no line may begin with the sign"
    for shown in (text.table(end), text.line(end)):
        assert shown.endswith(f"time: loading data 25 %, forward 50 %, waiting 25 % (for rank 1)\n{end.advice}")


def times_of(*ranks: dict[Phase, float]) -> str:
    """Where the time goes by a panel while the run is on, of ranks that have spent so many seconds in phases."""
    run = Run(len(ranks))
    run.begin_loop()
    run.put(step=1, phase=Phase.RUNNING)
    activity = run.ranks[0].sample.activity
    run.put(line=CodeLine(number=1, activity=activity, entered=5, filename="/data/train.py", lineno=23))
    run.look()
    for number, seconds in enumerate(ranks):
        run.put([number], step=9, seconds=seconds)
    run.wait(1.0)
    return run.view.times


def test_it_is_said_whom_ranks_wait_for_and_whose_code_takes_the_time() -> None:
    waits, works = {Phase.WAITING: 30.0, Phase.FORWARD: 70.0}, {Phase.RUNNING: 29.0, Phase.FORWARD: 71.0}
    assert "30 % (for each" in times_of(waits, waits)
    assert re.findall(r"\(.*\)", times_of(waits, waits, waits, works)) == ["(for rank 3)"]
    assert "(" not in times_of(waits, works), "little of it needs no words"
    assert times_of(works).endswith("code, mostly train.py:23)")


def test_waiting_that_took_most_of_the_time_is_advice_where_it_was_for_a_few() -> None:
    waits = {"waiting": 200.0}
    assert re.search(r"rank 2 .*68 %", said(waits, waits, {}))
    assert said(waits, waits, waits) == ""


def test_what_comes_before_the_first_step_counts_for_nothing() -> None:
    run = Run(1)
    run.put(seconds={Phase.RUNNING: 100.0})
    run.begin_loop()
    run.put(step=1, seconds={Phase.RUNNING: 100.0, Phase.FORWARD: 50.0})
    run.look()
    run.put(step=3, seconds={Phase.RUNNING: 101.0, Phase.FORWARD: 53.0})
    run.wait(1.0)
    assert run.end().times.startswith("forward 75 %")


def test_what_took_less_than_a_percent_is_left_out() -> None:
    assert in_words([{Phase.DATA: 0.1, Phase.FORWARD: 60.0}, {Phase.STEP: 2.0}]).startswith("forward 97 %")
    assert in_words([]) == ""
    assert "time: " not in html.render(Run(2).view)

"""At the end of a run, one sentence says what slowed it down most: only what the times of its ranks show."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from fixtures.panels import Run

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.notebook.display.drawing import html, text
from nb_accelerate.notebook.display.findings.advice import advice
from nb_accelerate.notebook.display.phase_times import RankTimes, in_words

WELL: Mapping[Phase, float] = {
    Phase.DATA: 2.0,
    Phase.FORWARD: 30.0,
    Phase.BACKWARD: 55.0,
    Phase.WAITING: 5.0,
    Phase.STEP: 6.0,
    Phase.RUNNING: 2.0,
}


def rank(*, exchanging: float = 5.0, num_workers: int | None = 0, timed: bool = True, **seconds: float) -> RankTimes:
    changed = {Phase[name.upper()]: spent for name, spent in seconds.items()}
    return RankTimes(
        seconds={**WELL, **changed}, steps=500, exchanging=exchanging, num_workers=num_workers, times_waits=timed
    )


def said(*ranks: RankTimes, cores: int = 8) -> str:
    return advice(dict(enumerate(ranks)), cores=cores)


def waits(seconds: float) -> RankTimes:
    """A rank that waits longer than the others for the exchange of gradients."""
    return rank(waiting=5 + seconds, exchanging=5 + seconds)


def test_a_run_in_which_all_is_well_needs_no_advice() -> None:
    assert said(rank(), rank(), rank(), rank()) == ""
    assert said(rank(waiting=0, exchanging=0)) == ""


def test_a_rank_that_loads_slowly_is_named_with_the_workers_that_would_do() -> None:
    # It loads for 65 s, and the rest takes 93 s: one worker would do, and another keeps it from being close.
    found = said(waits(63), waits(63), waits(63), rank(data=65, waiting=5))
    assert found == (
        "Ranks 0-2 waited 39 % of the time for rank 3 (slower at loading data), so that 4 ranks did the work of "
        "2.7. Try num_workers=2 in its DataLoader."
    )


def test_no_more_workers_are_advised_than_there_are_cores() -> None:
    slow = rank(data=65, waiting=5, num_workers=4)
    assert said(waits(63), slow, cores=16).endswith("Try num_workers=7 in place of 4.")
    assert said(waits(63), slow, cores=4).endswith(
        "The num_workers=4 of its DataLoader do not keep up: read less for each batch, or from faster storage."
    )


def test_of_a_loader_of_which_nothing_is_known_nothing_is_advised() -> None:
    assert said(waits(63), rank(data=65, waiting=5, num_workers=None)).endswith(
        "rank 1 (slower at loading data), so that 2 ranks did the work of 1.6."
    )


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("forward", "longer in forward"),
        ("backward", "longer in backward"),
        ("running", "more work between steps"),
        ("evaluating", "more evaluation"),
        ("saving", "longer saving"),
        ("step", "longer in the optimizer's step"),
    ],
)
def test_what_the_rank_does_that_is_waited_for_is_said(phase: str, words: str) -> None:
    more = WELL.get(Phase[phase.upper()], 0.0) + 50
    assert f"Rank 0 waited 33 % of the time for rank 1 ({words}), so that 2 ranks did the work of 1.6." in said(
        waits(50), rank(**{phase: more})
    )


def test_several_slow_ranks_are_named_together() -> None:
    slow = rank(data=65, waiting=5)
    found = said(waits(63), waits(63), slow, slow, waits(63))
    assert "Ranks 0, 1 and 4 waited 39 % of the time for ranks 2 and 3 (slower at loading data), " in found


def test_a_rank_is_not_accused_of_what_its_times_do_not_show() -> None:
    # The others wait, and it spends a little more on everything: no phase makes up half of that.
    slow = rank(data=12, forward=40, backward=65, step=16, running=12, waiting=5)
    assert said(waits(50), slow).startswith("Rank 0 waited 33 % of the time for rank 1, so that ")


def test_an_exchange_that_takes_long_for_all_is_no_ranks_fault() -> None:
    found = said(waits(70), waits(72))
    assert (
        "Every rank waited 44 % of the time for the exchange of gradients, so that 2 ranks did the work of 1.1."
        in found
    )
    assert found.endswith("Try a larger batch, or gradient_accumulation_steps=4.")


def test_waits_in_collectives_of_the_loop_are_told_from_the_exchange() -> None:
    found = said(rank(waiting=75), rank(waiting=75))
    assert (
        "41 % of the time in gather, reduce or barriers, so that 2 ranks did the work of 1.1. Call them less often."
        in found
    )


def test_where_waits_are_not_timed_nobody_is_accused() -> None:
    assert said(rank(timed=False, waiting=80), rank(timed=False, data=70)) == ""


def test_data_that_all_ranks_wait_for_is_said_of_one_process_too() -> None:
    assert said(rank(data=60, waiting=0, exchanging=0)) == (
        "It spent 39 % of the time loading data. Try num_workers=2 in its DataLoader."
    )
    assert "every rank spent 38 % of the time loading data" in said(rank(data=60), rank(data=60)).lower()


def test_the_time_between_steps_is_not_told_of_ranks_that_wait_for_a_device_there() -> None:
    times = {0: RankTimes(seconds={Phase.RUNNING: 9.0, Phase.FORWARD: 1.0}, steps=500)}
    assert "between steps" in advice(times, cores=4)
    assert advice(times, cores=4, on_host=False) == ""


def test_a_device_that_is_busy_does_not_wait_for_data() -> None:
    seconds = {**WELL, Phase.DATA: 60.0}
    busy = RankTimes(seconds=seconds, steps=500, num_workers=0, utilisation=97.0)
    assert said(busy) == ""
    idle = RankTimes(seconds=seconds, steps=500, num_workers=0, utilisation=40.0)
    assert "loading data" in said(idle)


def test_a_short_run_or_one_of_few_steps_gets_no_advice() -> None:
    tenth = {phase: spent / 100 for phase, spent in WELL.items()}
    assert said(RankTimes(seconds={**tenth, Phase.DATA: 1.0}, steps=500, num_workers=0)) == ""
    assert said(RankTimes(seconds={**WELL, Phase.DATA: 60.0}, steps=5, num_workers=0)) == ""


def test_a_panel_says_where_the_time_goes_live_and_the_advice_at_its_end() -> None:
    run = Run(2)
    run.begin_loop(num_workers=0, times_waits=True)
    spent = 0.0
    for _ in range(100):
        spent += 0.125
        run.put([0], seconds={Phase.FORWARD: spent * 0.5, Phase.WAITING: spent * 0.5}, exchanging=spent * 0.5)
        run.put([1], seconds={Phase.FORWARD: spent * 0.5, Phase.DATA: spent * 0.5})
        run.train(0.125)
    view = run.view
    assert view.rows[0].times == "forward 50 %, waiting 50 %"
    assert view.times == "loading data 25 %, forward 50 %, waiting 25 %"
    assert not view.advice
    assert 'title="time: loading data 50 %, forward 50 %"' in html.render(view)
    end = run.end()
    assert end.advice.startswith(
        "Rank 0 waited 50 % of the time for rank 1 (slower at loading data), so that 2 ranks did the work of 1.5."
    )
    assert end.advice.replace(" %", "\u00a0%") in html.render(end), "no line may begin with the sign"
    for shown in (text.table(end), text.line(end)):
        assert shown.endswith(f"time: loading data 25 %, forward 50 %, waiting 25 %\n{end.advice}")


def test_what_comes_before_the_first_step_counts_for_nothing() -> None:
    run = Run(1)
    run.put(seconds={Phase.RUNNING: 100.0})
    run.begin_loop()
    run.put(step=1, seconds={Phase.RUNNING: 100.0, Phase.FORWARD: 50.0})
    run.look()
    run.put(step=3, seconds={Phase.RUNNING: 101.0, Phase.FORWARD: 53.0})
    run.wait(1.0)
    assert run.end().times == "forward 75 %, between steps 25 %"


def test_what_took_less_than_a_percent_is_left_out() -> None:
    assert in_words([{Phase.DATA: 0.1, Phase.FORWARD: 60.0}, {Phase.STEP: 2.0}]) == "forward 97 %, optimizer 3 %"
    assert in_words([]) == ""
    assert "time: " not in html.render(Run(2).view)

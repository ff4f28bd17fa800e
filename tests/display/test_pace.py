"""What a panel says about rates, the time that is left, and ranks that are slower than others."""

from __future__ import annotations

import itertools
import random
import re

import pytest
from fixtures.panels import LOOK, MOSTLY_WAITS, WORKS, Run

from nb_accelerate.base.progress_page import Bar, Phase
from nb_accelerate.notebook.display.drawing import html
from nb_accelerate.notebook.display.view import View


def test_the_rate_is_that_of_the_last_seconds():
    run = Run(2)
    run.begin_loop()
    run.train(6.0, rate=16.0)
    assert run.row(0).rate == "16.0"
    run.train(6.0, rate=40.0)
    assert run.row(0).rate == "40.0"


def test_a_rate_is_not_guessed_from_the_first_moment():
    run = Run(1)
    run.begin_loop()
    run.train(0.3)
    assert run.row(0).rate == "-"


def slow_steps(run: Run, seconds_each: float, seconds: float) -> list[View]:
    """A step now and then: rank 0 is seen to take it at once, each other one a look after the one before."""
    views: list[View] = []
    looks = itertools.count()

    def each() -> None:
        look = next(looks)
        for rank in run.ranks:
            taken = int((look - rank) * LOOK / seconds_each)
            run.put([rank], step=max(0, taken), phase=Phase.BACKWARD)
        views.append(run.view)

    run.wait(seconds, each)
    return views


@pytest.mark.parametrize(("seconds_each", "rate"), [(1.25, 0.8), (1.5, 0.667), (3.0, 0.333), (4.75, 0.21)])
def test_the_rate_of_slow_steps_stands_still(seconds_each: float, rate: float):
    run = Run(1)
    run.begin_loop()
    views = slow_steps(run, seconds_each, 40.0)
    assert {row.rate for view in views[-200:] for row in view.rows} == {f"{rate:.2f}"}


def test_the_rate_of_a_rank_that_takes_no_more_steps_falls():
    run = Run(1)
    run.begin_loop()
    run.train(5.0)
    rates = []
    for _ in range(4):
        run.wait(1.0)
        rates.append(float(run.row(0).rate))
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 7.5
    assert rates[-1] < 1.0


@pytest.mark.parametrize("seconds_each", [0.5, 1.25, 5.5])
def test_of_ranks_that_are_as_fast_none_is_slow_whenever_one_looks(seconds_each: float):
    run = Run(5)
    run.begin_loop()
    for view in slow_steps(run, seconds_each, 60.0):
        assert [row.kind for row in view.rows] == [""]


def test_a_step_number_that_falls_has_no_pace():
    run = Run(1)
    run.begin_loop(step=100)
    for step in (99, 98, 90, 7):
        run.put(step=step)
        run.wait(0.5)
        assert html.render(run.view)


def test_a_new_loop_has_a_rate_of_its_own():
    run = Run(1)
    run.begin_loop(loop=1)
    run.train(5.0, rate=50.0)
    run.begin_loop(loop=2, epoch=2)
    run.train(1.0, rate=5.0)
    assert float(run.row(0).rate) == pytest.approx(5.0, abs=1.0)


def test_samples_a_second_are_those_of_all_ranks():
    run = Run(4)
    run.begin_loop(rows=64)
    run.train(4.0, rate=8.0)
    assert "512 samples/s" in run.view.outlook


def test_what_is_left_is_left_of_this_epoch_as_nobody_knows_how_many_there_are():
    run = Run(2)
    run.begin_loop(total=800)
    run.train(10.0, rate=8.0)
    assert "1:30 left of this epoch" in run.view.outlook
    run.begin_loop(loop=2, total=400, evaluates=True)
    run.train(4.0, rate=8.0)
    assert "0:46 left of this evaluation" in run.view.outlook
    run.begin_loop(loop=3, total=80)
    run.train(4.0, rate=8.0)
    assert not any("left" in part for part in run.view.outlook), "an epoch of ten seconds is over at once"


def test_a_bar_around_the_loop_tells_what_is_left_of_all():
    run = Run(2)
    run.begin_loop(total=80)

    def bars() -> tuple[Bar, ...]:
        return (Bar(label="epochs", count=1, total=4, seconds=run.now - run.began),)

    def each() -> None:
        run.step_of(range(2), rate=8.0)
        run.put(bars=bars())

    run.wait(5.0, each)  # half of the second of four epochs
    assert run.view.outlook[0] == f"about 0:{int(5.0 * (1 - 0.375) / 0.375):02} left"


def test_the_slowest_rank_says_how_long_it_takes():
    run = Run(2)
    run.begin_loop(total=320)

    def each() -> None:
        run.step_of([0], rate=16.0)
        run.step_of([1], rate=8.0)

    run.wait(4.0, each)
    assert run.view.outlook[0].startswith("0:36 left")


def test_the_rank_that_works_while_the_others_wait_is_the_slow_one():
    run = Run(4)
    run.begin_loop()

    def each() -> None:
        run.step_of([0, 1, 2], shares=MOSTLY_WAITS)
        run.step_of([3], shares=WORKS)

    run.wait(8.0, each)
    (warning,) = run.view.warnings
    assert warning.startswith("Rank 3 is ")
    slower = re.search(r"is ([\d.]+)x slower than the median: ", warning)
    assert slower is not None
    # A step is 0.8 of its own and 0.2 with the others; theirs is 0.3 and 0.2, and 0.5 of waiting.
    assert float(slower[1]) == pytest.approx(2.0, abs=0.25)
    assert "loading data" in warning
    assert run.kinds == {"0-2": "", "3": "late"}


def test_a_rank_that_takes_fewer_steps_is_slow_where_nobody_waits():
    run = Run(4)
    run.begin_loop()

    def each() -> None:
        run.step_of([0, 1, 2], rate=16.0)
        run.step_of([3], rate=8.0)

    run.wait(8.0, each)
    (warning,) = run.view.warnings
    assert re.match(r"Rank 3 .*2\.0x .*median: ", warning)


def test_who_was_held_up_once_is_not_slow():
    run = Run(3)
    run.begin_loop()
    run.train(4.0)
    for seconds in (1.0, 2.0, 4.0):
        run.put([0, 2], phase=Phase.BACKWARD)
        run.put([1], phase=Phase.DATA)
        run.wait(seconds)
        assert run.view.warnings == ()
        run.train(11.0)
        assert run.view.warnings == ()


def test_who_takes_seconds_for_each_step_is_slow():
    run = Run(3)
    run.begin_loop()
    for step in range(1, 8):
        run.put([0, 2], phase=Phase.BACKWARD)
        run.put([1], phase=Phase.DATA)
        run.wait(3.0)
        run.put(phase=Phase.BACKWARD)
        run.wait(0.25)
        run.put(step=step, phase=Phase.STEP)
        run.wait(0.25)
    (warning,) = run.view.warnings
    assert warning.startswith("Rank 1 is ")
    assert "loading data" in warning


def test_even_ranks_are_not_compared():
    run = Run(4)
    run.begin_loop()
    run.train(30.0)
    assert run.view.warnings == ()


@pytest.mark.parametrize("seed", [9, 10, 16, 17])
def test_of_64_ranks_that_are_seen_by_chance_only_the_slow_one_is_named(seed: int):
    run, chance, looks = Run(64), random.Random(seed), itertools.count()
    run.begin_loop()
    named: list[set[str]] = []

    def each() -> None:
        step = next(looks) // 10
        for rank in run.ranks:
            waits = chance.random() > (0.98 if rank == 20 else 0.5)
            run.put([rank], step=step, phase=Phase.BACKWARD if waits else Phase.FORWARD)
        named.append({row.ranks for row in run.view.rows if row.kind == "late"})

    run.wait(10.0, each)
    assert set().union(*named) == {"20"}
    assert all("20" in one for one in named[int(6.0 / LOOK) :])


def test_a_difference_nobody_would_act_upon_is_not_named():
    run = Run(4)
    run.begin_loop()

    def each() -> None:
        run.step_of([0, 1, 2], shares={Phase.DATA: 0.05, Phase.BACKWARD: 0.95})
        run.step_of([3], shares={Phase.DATA: 0.1, Phase.BACKWARD: 0.9})

    run.wait(10.0, each)
    assert run.view.warnings == (), "twice as long, and a twentieth of the whole"


def test_nobody_is_slow_after_a_second():
    run = Run(4)
    run.begin_loop()

    def each() -> None:
        run.step_of([0, 1, 2], shares=MOSTLY_WAITS)
        run.step_of([3], shares=WORKS)

    run.wait(1.5, each)
    assert run.view.warnings == ()


def test_one_rank_alone_is_never_slow():
    run = Run(1)
    run.begin_loop()
    run.train(10.0, shares=WORKS)
    assert run.view.warnings == ()


def test_a_loop_over_all_epochs_tells_how_far_the_run_is_also_while_it_evaluates():
    run = Run(2)
    run.begin_loop(total=300, epochs=3, epoch=1, spans_epochs=True)
    run.train(10.0, rate=8.0)
    assert run.row(0).step == "80 / 300"
    assert run.row(0).epoch == "1 of 3"
    assert run.view.outlook[0] == "about 0:27 left"
    run.begin_loop(loop=2, total=10, evaluates=True, spans_epochs=False, steps_before=80)
    run.wait(1.0)
    assert run.row(0).step == "80 / 300"


def test_without_a_number_of_epochs_a_loop_over_all_of_them_is_the_run():
    run = Run(1)
    run.begin_loop(total=300, epoch=0, spans_epochs=True)
    run.train(2.0, rate=8.0)
    assert run.row(0).step == "16 / 300"
    assert re.fullmatch(r"about 0:3\d left", run.view.outlook[0])

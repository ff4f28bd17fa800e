"""What a panel says about a run, from samples and a clock alone."""

from __future__ import annotations

import itertools
import math
import random
import re

import pytest
from fixtures.panels import ALL_REDUCE, EVEN, LOOK, SLEEPS, Run
from hypothesis import Phase as HypothesisPhase, given, settings, strategies as st

from nb_accelerate.display import html, text
from nb_accelerate.display.view import FailureSummary, View
from nb_accelerate.progress_page import Bar, CodeLine, Collective, Phase, Sample, layout
from nb_accelerate.progress_page.sample import read

# Its life.


def test_it_starts_runs_and_is_done():
    run = Run(2, started=False)
    run.wait(1.0)
    assert run.view.state == "starting"
    assert [row.now for row in run.view.rows] == ["starting"] * 2
    assert not run.view.has_steps
    run.put(state="running")
    run.begin_loop(total=16)
    run.train(2.0)
    assert run.view.state == "running"
    assert run.view.has_steps
    assert run.view.rows[0].step == "16 / 16"
    run.put(state="returned", in_loop=False, steps_before=16, phase=Phase.ENDED)
    run.look()
    assert [row.kind for row in run.view.rows] == ["done"] * 2
    view = run.end()
    assert (view.state, view.elapsed) == ("done", "0:03")
    assert [row.now for row in view.rows] == ["done"] * 2
    assert [row.share for row in view.rows] == [1.0] * 2
    assert view.summary[0] == "16 steps"
    assert (view.outlook, view.warnings, view.failure) == ((), (), None)


def test_after_its_end_time_stands_still():
    run = Run(2)
    run.begin_loop()
    run.train(3.0)
    ended = run.end()
    run.now += 100.0
    assert run.view == ended


def test_a_pause_is_said_however_long_it_takes():
    run = Run(2)
    run.begin_loop()
    run.train(2.0)
    run.put(paused=True, phase=Phase.FORWARD)
    run.wait(30.0)
    assert [row.now for row in run.view.rows] == ["paused"] * 2
    assert [row.kind for row in run.view.rows] == [""] * 2


def test_a_failure_is_shown_where_it_happened():
    run = Run(3)
    run.begin_loop()
    run.train(2.0)
    run.put([1], state="failed")
    run.put([0, 2], phase=Phase.BACKWARD)
    run.look()
    assert [row.kind for row in run.view.rows] == ["", "bad", ""]
    failure = FailureSummary(ranks=(1,), what="ValueError", label="traceback of rank 1", details="line")
    view = run.end("failed", failure)
    assert (view.state, view.failure) == ("failed", failure)
    assert [row.kind for row in view.rows] == ["", "bad", ""]
    assert [row.now for row in view.rows] == ["stopped", "ValueError", "stopped"]


def test_a_rank_that_was_killed_has_failed_although_its_page_says_forward():
    run = Run(2)
    run.begin_loop()
    run.train(1.0, shares={Phase.FORWARD: 1.0})
    run.put([1], state="ended")
    run.look()
    view = run.end("failed", FailureSummary(ranks=(1,), what="was ended by SIGKILL (killed)"))
    assert (view.rows[1].kind, view.rows[1].now) == ("bad", "was ended by SIGKILL (killed)")


def test_an_interrupted_run_says_so():
    run = Run(2)
    run.begin_loop()
    run.train(1.0, shares={Phase.DATA: 1.0})
    run.put([1], state="failed")  # by a KeyboardInterrupt
    run.look()
    view = run.end("interrupted")
    assert view.state == "interrupted"
    assert [(row.kind, row.now) for row in view.rows] == [("", "interrupted")] * 2


# Rates and times.


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


@pytest.mark.parametrize("seconds_each", [0.5, 1.25, 2.0, 3.0, 5.5])
def test_of_ranks_that_are_as_fast_none_is_slow_whenever_one_looks(seconds_each: float):
    run = Run(5)
    run.begin_loop()
    for view in slow_steps(run, seconds_each, 60.0):
        assert [row.kind for row in view.rows] == [""] * 5


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
    run.begin_loop(loop=2, total=80, evaluates=True)
    run.train(4.0, rate=8.0)
    assert "0:06 left of this evaluation" in run.view.outlook


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
    run.begin_loop(total=160)

    def each() -> None:
        run.step_of([0], rate=16.0)
        run.step_of([1], rate=8.0)

    run.wait(4.0, each)
    assert run.view.outlook[0] == "0:16 left of this epoch"


# Stalls.


def test_a_rank_that_does_not_move_while_others_wait_for_it_is_named():
    run = Run(4)
    run.begin_loop()
    run.train(3.0)
    run.put([0, 2, 3], phase=Phase.WAITING, waits_in=Collective.all_reduce)
    run.put([1], phase=Phase.RUNNING)
    run.look()
    run.wait(4.9)
    assert run.state.stalled(run.now) == []
    assert run.view.warnings == ()
    run.wait(7.1)
    assert run.state.stalled(run.now) == [0, 1, 2, 3]
    (warning,) = run.view.warnings
    assert warning == "Rank 1 has not moved for 12 s; ranks 0, 2 and 3 wait for it in reduce."
    assert [row.kind for row in run.view.rows] == ["", "late", "", ""]
    assert run.row(0).now == "waits in reduce, for 12 s"
    assert run.row(1).now == "running, for 12 s"
    assert run.view.outlook == ("no step for 12 s",)


def test_what_a_rank_does_has_the_line_that_it_is_at_most_often_while_it_does_that():
    run = Run(2)
    run.begin_loop()
    numbers = itertools.count(1)

    def at(*where: tuple[Phase, int, str]) -> None:
        for phase, lineno, called in where:
            line = CodeLine(number=next(numbers), phase=phase, filename="/data/train.py", lineno=lineno, called=called)
            run.put([0], phase=phase, line=line)
            run.wait(1.0)

    at((Phase.FORWARD, 6, ""), (Phase.FORWARD, 7, ""), (Phase.FORWARD, 6, ""), (Phase.BACKWARD, 9, ""))
    run.put([0], phase=Phase.FORWARD)
    run.wait(2.0)
    assert run.row(0).said == "forward, train.py:6"
    run.put([0], waits_in=Collective.all_gather)
    at((Phase.WAITING, 12, "gather_for_metrics"))
    assert run.row(0).said == "waits in gather_for_metrics, train.py:12"
    run.put([0], phase=Phase.STEP, waits_in=None, line=None)
    run.wait(2.0)
    assert run.row(0).now == "optimizer step", "nothing is known of another call"


def test_stacks_tell_where_they_are_and_who_waits():
    run = Run(3)
    run.begin_loop()
    run.train(3.0, shares={Phase.FORWARD: 1.0})
    run.wait(6.0)
    assert run.view.warnings == (), "all ranks stand still, and nobody knows why"
    run.state.explain({0: ALL_REDUCE, 1: ALL_REDUCE, 2: SLEEPS})
    (warning,) = run.view.warnings
    assert warning.startswith("Rank 2 has not moved for 6 s: in slow_part")
    assert "ranks 0 and 1 wait for it in all_reduce, called from" in warning
    assert [row.kind for row in run.view.rows] == ["", "", "late"]


def test_a_stall_that_is_over_leaves_no_trace():
    run = Run(2)
    run.begin_loop()
    run.train(3.0)
    run.put([0], phase=Phase.WAITING, waits_in=Collective.barrier)
    run.wait(8.0)
    run.state.explain({0: ALL_REDUCE, 1: SLEEPS})
    assert run.view.warnings
    run.train(0.2)
    assert run.state.stalled(run.now) == []
    assert run.view.warnings == ()
    assert [row.kind for row in run.view.rows] == ["", ""]
    run.put(phase=Phase.FORWARD)
    run.look()
    run.wait(6.0)
    assert "slow_part" not in "".join(row.now for row in run.view.rows), "where they were before is no answer now"


def test_all_ranks_in_a_long_step_are_not_accused():
    run = Run(3)
    run.begin_loop()
    run.train(2.0)
    run.put(phase=Phase.FORWARD)
    run.look()
    run.wait(20.0)
    assert run.view.warnings == ()
    assert [row.now for row in run.view.rows] == ["forward, for 20 s"] * 3
    assert run.view.outlook == ("no step for 20 s",)


def test_a_long_compilation_is_shown_as_such_and_not_as_a_hang():
    run = Run(2)
    run.begin_loop()
    run.put(phase=Phase.COMPILING)
    run.wait(60.0)
    assert run.state.stalled(run.now) == []
    assert run.view.warnings == ()
    assert [row.now for row in run.view.rows] == ["compiling for 60 s"] * 2
    assert run.view.outlook == ("compiling for 60 s",)
    run.train(2.0)
    run.put(compiled=3, compiling=61.2)
    run.look()
    run.state.end(run.now, "done")
    assert "3 programs compiled in 61 s" in run.view.summary


def test_what_ranks_warn_of_is_said_once():
    run = Run(3)
    run.put([0, 2], warning="XLA compiled step 5 anew.")
    run.look()
    assert run.view.warnings == ("XLA compiled step 5 anew.",)


def test_ranks_that_wait_for_one_that_has_returned_are_told_so():
    run = Run(3)
    run.begin_loop()
    run.train(2.0)
    run.put([2], state="returned", in_loop=False, phase=Phase.ENDED)
    run.put([0, 1], phase=Phase.WAITING, waits_in=Collective.all_gather)
    run.wait(6.0)
    assert run.view.warnings == ("Ranks 0 and 1 wait in gather for rank 2, which has returned.",)


def test_a_rank_that_never_had_a_loop_is_not_stalled():
    run = Run(2)
    run.put(request=1, phase=Phase.RUNNING)
    run.wait(60.0)
    assert run.state.stalled(run.now) == []


def test_a_stopped_process_is_named_with_the_command_that_lets_it_go_on():
    run = Run(3)
    run.begin_loop()
    run.train(2.0)
    run.put([1], state="stopped")
    run.put([0, 2], phase=Phase.WAITING, waits_in=Collective.all_reduce)
    run.look()
    assert run.view.warnings == ("Rank 1 is stopped (SIGSTOP). To let it go on: kill -CONT 101",)
    assert (run.row(1).kind, run.row(1).now) == ("late", "stopped (SIGSTOP, pid 101)")
    run.wait(6.0)
    (warning,) = run.view.warnings
    assert warning == (
        "Rank 1 is stopped (SIGSTOP). To let it go on: kill -CONT 101. Ranks 0 and 2 wait for it in reduce."
    )
    run.put([1], state="running")
    run.train(1.0)
    assert run.view.warnings == ()
    assert [row.kind for row in run.view.rows] == ["", "", ""]


# Stragglers.

WORKS = {Phase.DATA: 0.6, Phase.FORWARD: 0.2, Phase.BACKWARD: 0.2}
MOSTLY_WAITS = {Phase.DATA: 0.1, Phase.FORWARD: 0.2, Phase.BACKWARD: 0.7}


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
    assert [row.kind for row in run.view.rows] == ["", "", "", "late"]


def test_a_rank_that_takes_fewer_steps_is_slow_where_nobody_waits():
    run = Run(4)
    run.begin_loop()

    def each() -> None:
        run.step_of([0, 1, 2], rate=16.0)
        run.step_of([3], rate=8.0)

    run.wait(8.0, each)
    (warning,) = run.view.warnings
    assert warning.startswith("Rank 3 is 2.0x slower than the median: ")


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


def test_the_slowest_of_all_is_remembered():
    run = Run(4)
    run.begin_loop()

    def each() -> None:
        run.step_of([0, 1, 2], shares=EVEN)
        run.step_of([3], shares=WORKS)

    run.wait(10.0, each)
    remarks = run.end().remarks
    assert remarks[0] == "4 ranks"
    assert remarks[1] == "others waited for rank 3"


# Many ranks.


@pytest.mark.parametrize("number", [1, 2, 8, 12])
def test_up_to_twelve_ranks_have_a_row_each(number: int):
    run = Run(number)
    run.begin_loop()
    run.train(3.0)
    assert [row.ranks for row in run.view.rows] == [str(rank) for rank in range(number)]
    assert run.view.dots == ()


@pytest.mark.parametrize("number", [13, 64])
def test_more_are_folded_into_one_row_and_a_dot_each(number: int):
    run = Run(number)
    run.begin_loop(total=80)
    run.train(5.0)
    (row,) = run.view.rows
    assert row.ranks == f"0-{number - 1}"
    assert row.step == "40 / 80"
    assert [dot.rank for dot in run.view.dots] == list(range(number))
    assert {dot.share for dot in run.view.dots} == {0.5}


def test_of_many_ranks_those_that_stand_out_have_rows():
    run = Run(64)
    run.begin_loop()

    def each() -> None:
        run.step_of((rank for rank in range(64) if rank not in (7, 20, 40)), shares=MOSTLY_WAITS)
        run.step_of([20], shares=WORKS)

    run.put([7], state="failed")
    run.put([40], loss=float("nan"))
    run.wait(4.0, each)
    view = run.view
    first, *bad, slow = view.rows
    assert first.ranks == "0-63"
    assert first.now.startswith("61 ranks: ")
    assert [(row.ranks, row.kind) for row in bad] == [("7", "bad"), ("40", "bad")], "what is worst comes first"
    assert (slow.ranks, slow.kind) == ("20", "late")
    assert {dot.rank: dot.kind for dot in view.dots if dot.kind} == {7: "bad", 20: "late", 40: "bad"}
    assert "x slower: " in slow.now
    assert "slower" not in "".join(view.warnings), "its row says it already"


def test_when_half_of_many_are_bad_a_few_have_rows():
    run = Run(64)
    run.begin_loop()
    run.train(2.0)
    run.put(range(40), loss=float("nan"))
    run.look()
    assert len(run.view.rows) == 7
    assert sum(dot.kind == "bad" for dot in run.view.dots) == 40


# Losses and memory.


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_a_loss_that_is_no_number_marks_its_rank(loss: str):
    run = Run(2)
    run.begin_loop()
    run.put([0], loss=0.5)
    run.put([1], loss=float(loss))
    run.train(1.0)
    assert [(row.kind, row.loss) for row in run.view.rows] == [("", "0.5000"), ("bad", loss)]
    assert all(point[1] == 0.5 for point in run.view.curve), "the curve is that of the others"


def test_a_logged_loss_comes_before_the_one_of_backward():
    run = Run(1)
    run.begin_loop()
    run.put(loss=4.0, scalars={"train/loss": 2.0, "lr": 0.1})
    run.train(1.0)
    assert run.row(0).loss == "2.0000"


def test_the_summary_has_steps_samples_a_second_and_the_loss():
    run = Run(2)
    run.begin_loop(rows=10)
    run.put([0], loss=1.0)
    run.put([1], loss=2.0)
    run.train(10.0)
    assert run.end().summary == ("80 steps", "80.0 samples/s", "loss 1.5000")


def test_memory_is_that_of_the_device_and_its_peak_is_kept():
    run = Run(2)
    run.begin_loop()
    run.put([0], memory=3_000_000_000, peak=11_200_000_000)
    run.train(1.0)
    assert run.row(0).memory == "3.0 GB"
    run.put([0], memory=1_000_000_000)
    run.train(1.0)
    assert "peak 11.2 GB" in run.end().remarks


# What the ranks use of their devices.


def test_each_device_says_how_busy_it_is_and_nothing_is_said_of_the_cpu_then():
    run = Run(2)
    run.begin_loop()
    run.put(memory=1_000_000_000, cpu=100.0)
    run.put([0], utilisation=97)
    run.put([1], utilisation=12)
    run.train(1.0)
    assert [row.gpu for row in run.view.rows] == ["97 %", "12 %"]
    assert [row.cpu for row in run.view.rows] == ["", ""]


def test_devices_that_do_not_say_how_busy_they_are_have_no_column():
    run = Run(2)
    run.begin_loop()
    run.put(memory=1_000_000_000, cpu=100.0)
    run.train(1.0)
    assert {(row.gpu, row.cpu) for row in run.view.rows} == {("", "")}
    assert re.search("memory</th><th [^>]*>now</th>", html.render(run.view))
    assert text.table(run.view).splitlines()[1].split() == ["rank", "step", "epoch", "it/s", "memory", "now"]


def test_without_a_device_it_is_the_cpu_that_is_busy():
    run = Run(3)
    run.begin_loop()
    run.put([0], cpu=97.4)
    run.put([1], cpu=3.0)
    run.train(1.0)
    assert [row.cpu for row in run.view.rows] == ["97 %", "3 %", ""]
    assert {row.gpu for row in run.view.rows} == {""}


def test_what_a_step_was_told_is_not_said_of_what_comes_after_it():
    run = Run(2)
    run.begin_loop()
    run.put(utilisation=0)
    run.train(1.0)
    assert run.row(0).gpu == "0 %"
    run.begin_loop([0], loop=2, evaluates=True)
    run.wait(3.0)
    assert (run.row(0).gpu, run.row(1).gpu) == ("-", "0 %"), "an evaluation asks nobody"
    run.wait(3.0)
    assert run.row(1).gpu == "-", "it has not moved for a while"
    assert run.end().rows[1].gpu == ""


def test_of_many_ranks_it_is_the_median_of_those_that_are_well():
    run = Run(64)
    run.begin_loop()
    run.put(cpu=50.0)
    run.put(range(20), cpu=10.0)
    run.put([63], cpu=0.0, loss=float("nan"))
    run.train(2.0)
    whole, bad = run.view.rows
    assert (whole.cpu, bad.cpu) == ("50 %", "0 %")
    run.put(utilisation=90)
    run.put([3], utilisation=20)
    run.train(1.0)
    assert [row.gpu for row in run.view.rows] == ["90 %", "90 %"]


def test_a_rank_that_has_ended_uses_nothing():
    run = Run(2)
    run.begin_loop()
    run.put(cpu=40.0)
    run.train(1.0)
    run.put([1], state="returned")
    run.look()
    assert [row.cpu for row in run.view.rows] == ["40 %", ""]
    assert {row.cpu for row in run.end().rows} == {""}


# Bars.


def bar(count: float, total: float | None = 100, **more: object) -> Bar:
    return Bar(label="steps", count=count, total=total, seconds=5.0, **more)  # type: ignore[arg-type]


def test_bars_of_ranks_that_are_alike_are_one_row():
    run = Run(4)
    run.put(request=1, phase=Phase.RUNNING)
    for rank in range(4):
        run.put([rank], bars=(bar(50 + rank % 2),))
    run.look()
    (row,) = run.view.bars
    assert (row.ranks, row.label) == ("0-3", "steps")
    assert row.step in ("50 / 100", "51 / 100")
    assert run.view.rows == (), "the bar says it all"


def test_bars_that_differ_have_a_row_each():
    run = Run(3)
    for rank in range(3):
        run.put([rank], bars=(bar(20 * rank),))
    run.look()
    assert [(row.ranks, row.step) for row in run.view.bars] == [("0", "0 / 100"), ("1", "20 / 100"), ("2", "40 / 100")]


def test_a_bar_that_stands_still_is_a_stall():
    run = Run(2)
    run.put(bars=(bar(5),), request=1, phase=Phase.RUNNING)
    run.look()
    run.wait(6.0)
    assert run.state.stalled(run.now) == [0, 1]
    run.put(bars=(bar(5, ended=True),))
    run.wait(6.0)
    assert run.state.stalled(run.now) == []


# Anything.


@given(
    pages=st.lists(st.binary(min_size=0, max_size=layout.SIZE), min_size=1, max_size=14),
    states=st.lists(st.sampled_from(["starting", "running", "stopped", "returned", "failed", "ended"]), min_size=14),
    ended=st.sampled_from(["running", "done", "failed", "interrupted"]),
)
@settings(deadline=None, max_examples=60)
def test_no_page_however_damaged_breaks_a_panel(pages: list[bytes], states: list[str], ended: str):
    run = Run(len(pages))
    for rank, page in enumerate(pages):
        sample = read((b"\1" + page).ljust(layout.SIZE, b"\0")[: layout.SIZE])
        run.put([rank], state=states[rank], **vars(sample))
    run.wait(6.0)
    run.put(step=7)
    run.wait(0.3)
    if ended != "running":
        run.state.end(run.now, ended)  # type: ignore[arg-type]
    assert html.render(run.view)
    assert text.table(run.view, bars=True)
    assert text.line(run.view)


COUNTS = st.floats(0, 1e18) | st.integers(0, 20).map(float)
BARS = st.builds(
    Bar,
    label=st.text(max_size=5),
    count=COUNTS,
    total=st.none() | COUNTS,
    seconds=COUNTS,
    ended=st.booleans(),
    level=st.integers(0, 3),
)
WORDS = st.integers(0, 2**63 - 1) | st.integers(0, 20)
SAMPLES = st.builds(
    Sample,
    request=st.just(1),
    phase=st.sampled_from(Phase),
    trains=st.booleans(),
    step=WORDS,
    total=st.none() | st.integers(0, 2**63 - 1),
    loop=st.integers(0, 2),
    evaluates=st.booleans(),
    in_loop=st.booleans(),
    epoch=WORDS,
    steps_before=WORDS,
    rows=WORDS,
    memory=WORDS,
    peak=WORDS,
    utilisation=st.none() | st.integers(0, 100),
    loss=st.none() | st.floats(),
    bars=st.lists(BARS, max_size=3).map(tuple),
)


@given(samples=st.lists(st.lists(SAMPLES, min_size=2, max_size=2), min_size=1, max_size=5))
@settings(deadline=None, max_examples=80, phases=[HypothesisPhase.generate])
def test_no_numbers_however_odd_break_a_panel(samples: list[list[Sample]]):
    run = Run(2)
    for pair in samples:
        for rank, sample in enumerate(pair):
            run.put([rank], **vars(sample))
        run.wait(1.0)
        assert html.render(run.view)
        assert text.table(run.view, bars=True)
        assert text.line(run.view)
    assert html.render(run.end())


def test_a_loss_that_is_nan_is_told_with_its_step_and_at_the_end_too():
    run = Run(2)
    run.begin_loop()
    run.train(2.0)
    assert run.view.warnings == ()
    run.put([1], loss=math.nan)
    run.look()
    first = run.view.warnings
    run.train(2.0)
    assert first == run.view.warnings == ("The loss is nan since about step 16 on rank 1.",)
    run.put([0], loss=math.inf)
    run.look()
    assert run.view.warnings == ("The loss is nan since about step 16.",)
    assert run.end().warnings == ("The loss is nan since about step 16.",)


def test_a_loss_that_is_finite_again_is_told_no_longer():
    run = Run(1)
    run.begin_loop()
    run.put(loss=math.inf)
    run.train(1.0)
    assert run.view.warnings == ("The loss is inf since about step 1.",)
    run.put(loss=1.0)
    run.look()
    assert run.view.warnings == ()


# The whole run, before its first step, and a loss that is wrong.


def test_with_the_number_of_epochs_known_the_bar_and_the_time_are_those_of_the_whole_run():
    run = Run(2)
    run.begin_loop(total=40, epoch=1, epochs=3)
    run.train(4.0, rate=8.0)
    assert (run.row(0).step, run.row(0).epoch) == ("32 / 120", "1 / 3")
    assert run.row(0).share == pytest.approx(32 / 120)
    assert run.view.outlook[0] == "about 0:11 left"
    run.begin_loop(total=40, epoch=2, epochs=3, loop=2, steps_before=40)
    run.train(1.0, rate=8.0)
    assert run.row(0).step == "48 / 120"
    run.begin_loop(total=10, epoch=2, epochs=3, loop=3, steps_before=80, evaluates=True)
    run.put(step=3, phase=Phase.EVALUATING)
    run.wait(2.0)
    assert (run.row(0).step, run.row(0).now) == ("48 / 120", "evaluating 3 / 10")


def test_a_rank_that_is_stuck_before_its_first_step_is_named():
    run = Run(3)
    run.put(phase=Phase.RUNNING, request=1)
    run.look()
    run.put([0, 2], phase=Phase.WAITING, waits_in=Collective.barrier)
    run.wait(8.0)
    (warning,) = run.view.warnings
    assert warning == "Rank 1 has not moved for 8 s; ranks 0 and 2 wait for it in wait_for_everyone."
    assert [row.kind for row in run.view.rows] == ["", "late", ""]
    run.put([0, 2], phase=Phase.RUNNING, waits_in=None)
    run.look()
    assert run.view.warnings == ()


def test_a_loss_that_jumps_is_told_until_it_is_back():
    run = Run(2)
    run.begin_loop()

    def steps(number, loss):
        for _ in range(number):
            run.put(step=run.ranks[0].sample.step + 1, loss=loss)
            run.now += LOOK
            run.look()

    steps(30, 0.5)
    assert run.view.warnings == ()
    steps(1, 50.0)
    assert run.view.warnings == ("The loss jumped from 0.5000 to 50.00 at about step 31.",)
    steps(80, 0.5)
    assert run.view.warnings == ()


def test_a_run_that_ended_with_a_loss_that_is_nan_is_marked():
    run = Run(2)
    run.begin_loop()
    run.train(3.0)
    run.put(loss=float("nan"))
    run.look()
    view = run.end()
    assert (view.state, view.mark) == ("done", "!")
    assert text.table(view).startswith("! train")


def test_full_bars_of_epochs_that_are_over_are_one_row():
    run = Run(2)
    bars = [Bar(label=f"epoch {n}", count=50, total=50, seconds=2, ended=True) for n in (1, 2, 3)]
    run.put(request=1, bars=(*bars, Bar(label="epoch 4", count=10, total=50, seconds=1)))
    run.look()
    assert [(row.label, row.step) for row in run.view.bars] == [("epoch 4 (after 3 more)", "10 / 50")]


def test_a_hang_that_was_found_by_the_stacks_is_told_until_the_panel_can_or_a_rank_moves():
    run = Run(2)
    run.put(phase=Phase.RUNNING, request=1)
    run.look()
    run.state.tell_hang("nothing has moved for 3 s: rank 0 waits. Interrupt it to end it")
    run.wait(1.0)
    assert run.view.warnings == ("Nothing has moved for 3 s: rank 0 waits. Interrupt it to end it",)
    run.put([0], phase=Phase.WAITING, waits_in=Collective.barrier)
    run.look()
    assert run.view.warnings == ()
    run.state.tell_hang("nothing has moved for 3 s: rank 0 waits")
    run.wait(8.0)
    assert run.view.warnings == ("Rank 1 has not moved for 9 s; rank 0 waits for it in wait_for_everyone.",)

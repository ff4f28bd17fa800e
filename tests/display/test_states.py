"""What a panel says about a run, from samples and a clock alone."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any, Literal

import pytest
from fixtures.panels import MOSTLY_WAITS, WORKS, Run

from nb_accelerate.base.progress_page import CodeLine, Collective, Phase
from nb_accelerate.notebook.display.view import FailureSummary

# Its life.


def test_it_starts_runs_and_is_done():
    run = Run(2, started=False)
    run.wait(1.0)
    assert run.view.state == "starting"
    assert [row.now for row in run.view.rows] == ["importing torch"] * 2
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


def test_a_failure_is_shown_where_it_happened():
    run = Run(3)
    run.begin_loop()
    run.train(2.0)
    run.put([1], state="failed")
    run.put([0, 2], phase=Phase.BACKWARD)
    run.look()
    assert run.kinds == {"0, 2": "", "1": "bad"}
    failure = FailureSummary(ranks=(1,), what="ValueError", label="traceback of rank 1", details="line")
    view = run.end("failed", failure)
    assert (view.state, view.failure) == ("failed", failure)
    assert run.kinds == {"0, 2": "", "1": "bad"}
    assert [row.now for row in view.rows] == ["stopped", "ValueError"]


def test_a_rank_that_was_killed_has_failed_although_its_page_says_forward():
    run = Run(2)
    run.begin_loop()
    run.train(1.0, shares={Phase.FORWARD: 1.0})
    run.put([1], state="ended")
    run.look()
    view = run.end("failed", FailureSummary(ranks=(1,), what="was ended by SIGKILL (killed)"))
    assert (view.rows[1].kind, view.rows[1].now) == ("bad", "was ended by SIGKILL (killed)")


@pytest.mark.parametrize("how", ["interrupted", "stopped"])
def test_a_run_that_the_user_has_ended_says_how(how: Literal["interrupted", "stopped"]):
    run = Run(2)
    run.begin_loop()
    run.train(1.0, shares={Phase.DATA: 1.0})
    run.put([1], state="failed")  # by a KeyboardInterrupt
    run.look()
    view = run.end(how)
    assert view.state == how
    assert [(row.kind, row.now) for row in view.rows] == [("", how)] * 2


def test_a_run_with_a_bad_loss_that_is_interrupted_has_not_failed():
    run = Run(2)
    run.begin_loop()
    run.train(1.0)
    run.put(loss=float("nan"), state="failed")  # by a KeyboardInterrupt
    run.look()
    view = run.end("interrupted")
    assert [(row.kind, row.now) for row in view.rows] == [("bad", "interrupted")] * 2


# Stalls.


def test_a_rank_that_does_not_move_while_others_wait_for_it_is_named():
    run = Run(4)
    run.begin_loop()
    run.train(3.0)
    run.put([0, 2, 3], phase=Phase.WAITING, waits_in=Collective.all_reduce)
    run.put([1], phase=Phase.RUNNING)
    run.look()
    run.wait(4.9)
    assert run.state.stalled(run.now) == set()
    assert run.view.warnings == ()
    run.wait(7.1)
    assert run.state.stalled(run.now) == {0, 1, 2, 3}
    (warning,) = run.view.warnings
    assert warning == "Rank 1 has not moved for 12 s; ranks 0, 2 and 3 wait for it in reduce."
    assert run.kinds == {"0, 2-3": "", "1": "late"}
    assert run.row(0).now == "waits in reduce"
    assert run.row(1).now == "between steps"
    assert run.view.outlook == ("no step for 12 s",)


def test_what_a_rank_does_has_the_line_that_it_is_at_most_often_while_it_does_that():
    run = Run(2)
    run.begin_loop(step=2)
    numbers = itertools.count(1)

    def at(*where: tuple[Phase, int, str]) -> None:
        for phase, lineno, called in where:
            run.put([0], phase=phase)
            activity = run.ranks[0].sample.activity
            filename = "/data/train.py"
            line = CodeLine(
                number=next(numbers), activity=activity, entered=-1, filename=filename, lineno=lineno, called=called
            )
            run.put([0], line=line)
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


def test_what_comes_before_the_first_step_is_told():
    run = Run(1)

    def does(inside: str, **sample: Any) -> str:
        run.put(**sample)
        activity = run.ranks[0].sample.activity
        run.put(line=CodeLine(number=next(numbers), activity=activity, filename="/train.py", lineno=6, inside=inside))
        run.wait(2.0)
        return run.row(0).now

    numbers = itertools.count(1)
    assert does("importing pandas", phase=Phase.RUNNING) == "importing pandas"
    assert does("from_pretrained", phase=Phase.PREPARING) == "preparing the model"
    run.begin_loop(total=9)
    assert does("fetch", phase=Phase.DATA, step=0) == "first batch: loading data"
    assert does("compiling", phase=Phase.FORWARD, step=1) == "compiling"
    assert does("relu", phase=Phase.FORWARD, step=1) == "first batch: forward"
    assert does("relu", phase=Phase.FORWARD, step=2) == "forward"


def test_steps_after_a_resume_are_those_of_the_run_also_at_its_end():
    run = Run(1)
    run.begin_loop(total=20, epoch=2, epochs=3, step=10, trains=True)
    run.put(loss=math.nan, step=12)
    run.look()
    assert run.row(0).step == "32 / 60"
    assert "nan at step 32, " in run.view.warnings[0]
    run.put(epoch=3, step=20, steps_before=20, loss=0.5)
    run.look()
    run.put(state="returned", in_loop=False, steps_before=40)
    view = run.end()
    assert view.rows[0].step == "60"
    assert "60 steps" in view.summary


def at_line(run: Run, ranks: list[int], lineno: int, called: str = "") -> None:
    for number in range(1, 6):
        for rank in ranks:
            activity = run.ranks[rank].sample.activity
            line = CodeLine(number=number, activity=activity, filename="/data/train.py", lineno=lineno, called=called)
            run.put([rank], line=line)
        run.look()


def test_lines_tell_where_they_are_and_who_waits():
    run = Run(3)
    run.begin_loop()
    run.train(3.0, shares={Phase.FORWARD: 1.0})
    run.wait(6.0)
    assert run.view.warnings == (), "all ranks stand still, and nobody knows why"
    at_line(run, [0, 1], 12, "all_reduce")
    at_line(run, [2], 7)
    (warning,) = run.view.warnings
    assert re.match(r"Rank 2\b.* train\.py:7;.*all_reduce, train\.py:12\.", warning)
    assert run.kinds == {"0-1": "", "2": "late"}


def test_a_stall_that_is_over_leaves_no_trace():
    run = Run(2)
    run.begin_loop()
    run.train(3.0)
    run.put([0], phase=Phase.WAITING, waits_in=Collective.barrier)
    run.wait(8.0)
    assert run.view.warnings
    run.train(0.2)
    assert run.state.stalled(run.now) == set()
    assert run.view.warnings == ()
    assert [row.kind for row in run.view.rows] == ["", ""]


def test_all_ranks_in_a_long_step_are_not_accused():
    run = Run(3)
    run.begin_loop()
    run.train(2.0)
    run.put(phase=Phase.FORWARD)
    run.look()
    run.wait(20.0)
    assert run.view.warnings == ()
    assert [row.now for row in run.view.rows] == ["forward"]
    assert [part.endswith(" 20 s") for part in run.view.outlook] == [True]


def test_a_long_compilation_is_shown_as_such_and_not_as_a_hang():
    run = Run(2)
    run.begin_loop()
    run.put(phase=Phase.COMPILING)
    run.wait(60.0)
    assert run.state.stalled(run.now) == set()
    assert run.view.warnings == ()
    assert [row.now for row in run.view.rows] == ["compiling for 60 s"] * 2
    assert run.view.outlook == ("compiling for 60 s",)
    run.train(2.0)
    run.put(compiled=3, compiling=61.2)
    run.look()
    run.state.end(run.now, "done")
    assert re.match(r"3 programs .*61 s", run.view.summary[-1])


def test_what_ranks_warn_of_is_said_once():
    run = Run(3)
    run.put([0, 2], warning="XLA compiled step 5 again.")
    run.look()
    assert run.view.warnings == ("XLA compiled step 5 again.",)


def test_ranks_that_wait_for_one_that_has_returned_are_told_so():
    run = Run(3)
    run.begin_loop()
    run.train(2.0)
    run.put([2], state="returned", in_loop=False, phase=Phase.ENDED)
    run.put([0, 1], phase=Phase.WAITING, waits_in=Collective.all_gather)
    run.wait(6.0)
    assert run.view.warnings == ("Ranks 0 and 1 wait in gather for rank 2, which has returned.",)
    assert (run.row(2).kind, run.row(0).kind) == ("late", "")
    assert run.row(2).now.startswith("returned at step ")
    run.state.stuck.tell("ranks 0 and 1 wait.", "It ends by itself after 30 s.")
    (said,) = run.view.warnings
    assert said.endswith("which has returned. It ends by itself after 30 s.")


def test_a_rank_that_has_run_out_of_batches_is_named():
    run = Run(3)
    run.begin_loop()
    run.train(2.0)
    run.put([1], in_loop=False, steps_before=16, phase=Phase.WAITING, waits_in=Collective.barrier)
    run.put([0, 2], phase=Phase.BACKWARD)
    run.wait(6.0)
    at_line(run, [1], 15, "wait_for_everyone")
    at_line(run, [0, 2], 14, "backward")
    (warning,) = run.view.warnings
    assert warning.startswith("Rank 1 has left the loop after 16 steps, and waits in wait_for_everyone, train.py:15;")
    assert warning.endswith("; ranks 0 and 2 wait in backward, train.py:14.")


def test_a_rank_that_never_had_a_loop_is_not_stalled():
    run = Run(2)
    run.put(request=1, phase=Phase.RUNNING)
    run.wait(60.0)
    assert run.state.stalled(run.now) == set()


def test_a_rank_that_waits_for_a_large_value_says_how_much_is_on_its_machine() -> None:
    run = Run(2)
    run.ranks[1] = replace(run.ranks[1], machine="b", sending=(30_000_000, 40_000_000))
    run.look()
    assert re.match(r"10 MB\b.*40 MB\b.* b$", run.row(1).now)
    run.ranks[1] = replace(run.ranks[1], sending=(2_000, 40_000_000))
    run.look()
    assert "sent" not in run.row(1).now


# Rows.


@pytest.mark.parametrize("number", [1, 2])
def test_one_or_two_ranks_have_a_row_each(number: int):
    run = Run(number)
    run.begin_loop()
    run.train(3.0)
    assert [row.ranks for row in run.view.rows] == [str(rank) for rank in range(number)]
    assert run.view.each == ()


@pytest.mark.parametrize("number", [3, 8, 64])
def test_more_ranks_are_one_row_and_each_can_be_looked_at(number: int):
    run = Run(number)
    run.begin_loop(total=80)
    run.train(5.0)
    (row,) = run.view.rows
    assert (row.ranks, row.step, row.share) == (f"0-{number - 1}", "40 / 80", 0.5)
    assert [row.ranks for row in run.view.each] == [str(rank) for rank in range(number)]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((0.0148, 0.002, 0.011), "0.0020 to 0.0148"),
        ((0.5, 0.51, 0.52), "0.5100"),
        ((0.0, 0.0, 0.0), "0.0000"),
        ((-2.0, 1.0, 0.0), "-2.0000 to 1.0000"),
        ((0.5, None, None), "0.5000"),
        ((None, None, None), ""),
    ],
)
def test_a_row_of_several_ranks_says_the_least_and_the_greatest_loss_where_they_differ(
    losses: tuple[float | None, ...], said: str
):
    run = Run(3)
    run.begin_loop()
    run.train(2.0)
    for rank, loss in enumerate(losses):
        run.put([rank], loss=loss)
    run.look()
    (row,) = run.view.rows
    assert row.loss == said


def test_ranks_that_stand_out_have_rows_and_are_in_no_other():
    run = Run(64)
    run.begin_loop()

    def each() -> None:
        run.step_of((rank for rank in range(64) if rank not in (7, 20, 40)), shares=MOSTLY_WAITS)
        run.step_of([20], shares=WORKS)

    run.put([7], state="failed")
    run.put([40], loss=float("nan"))
    run.wait(4.0, each)
    assert run.kinds == {"rest": "", "7": "bad", "40": "bad", "20": "late"}
    assert [one for one in run.view.warnings if one.startswith("Rank 20 is ")]


def test_a_rank_that_is_not_in_step_has_a_row():
    run = Run(8)
    run.begin_loop()
    run.train(2.0)
    run.train(2.0, [0, 1, 2, 4, 5, 6, 7])
    assert [(row.ranks, row.step) for row in run.view.rows] == [("0-2, 4-7", "32 / 1,000"), ("3", "16 / 1,000")]
    run.train(1.0, [3], rate=16.0)
    assert run.kinds == {"0-7": ""}


def test_ranks_that_each_go_at_their_own_speed_are_one_row_that_says_how_far_apart_they_are():
    run = Run(8)
    run.begin_loop()

    def each() -> None:
        for rank in range(8):
            run.step_of([rank], rate=8.0 + rank / 4)

    run.wait(20.0, each)
    assert [(row.ranks, row.step, row.rate[:3]) for row in run.view.rows] == [("0-7", "160 to 195 / 1,000", "9.0")]


def test_more_than_two_that_stand_out_alike_are_one_row():
    run = Run(64)
    run.begin_loop()
    run.train(2.0)
    run.put(range(40), loss=float("nan"))
    run.look()
    assert run.kinds == {"40-63": "", "0-39": "bad"}
    assert [row.loss for row in run.view.rows] == ["", "nan"]
    run.put(range(1, 40, 2), loss=0.5)
    run.look()
    assert run.kinds == {"rest": "", "20 ranks": "bad"}


# The whole run, before its first step.


def test_with_the_number_of_epochs_known_the_bar_and_the_time_are_those_of_the_whole_run():
    run = Run(2)
    run.begin_loop(total=40, epoch=1, epochs=3)
    run.train(4.0, rate=8.0)
    assert (run.row(0).step, run.row(0).epoch) == ("32 / 120", "1 of 3")
    assert run.row(0).share == pytest.approx(32 / 120)
    assert run.view.outlook[0] == "about 0:11 left"
    run.begin_loop(total=40, epoch=2, epochs=3, loop=2, steps_before=40)
    run.train(1.0, rate=8.0)
    assert run.row(0).step == "48 / 120"
    run.begin_loop(total=10, epoch=2, epochs=3, loop=3, steps_before=80, evaluates=True)
    run.put(step=3, phase=Phase.EVALUATING)
    run.wait(2.0)
    assert (run.row(0).step, run.row(0).now) == ("48 / 120", "evaluation 3 / 10")


def test_the_total_is_that_of_the_whole_run_before_its_first_backward():
    run = Run(2)
    run.begin_loop(total=40, epoch=1, epochs=3)
    run.put(step=0, trains=False, phase=Phase.DATA)
    run.look()
    assert (run.row(0).step, run.row(0).share) == ("0 / 120", 0.0)
    run.put(step=3, phase=Phase.EVALUATING, evaluates=True)  # no backward came: it is no training
    run.look()
    assert run.row(0).step == "3 / 40"


def test_a_rank_that_is_stuck_before_its_first_step_is_named():
    run = Run(3)
    run.put(phase=Phase.RUNNING, request=1)
    run.look()
    run.put([0, 2], phase=Phase.WAITING, waits_in=Collective.barrier)
    run.wait(8.0)
    (warning,) = run.view.warnings
    assert re.match(r"Rank 1\b.* 8 s;.*wait_for_everyone\.", warning)
    assert run.kinds == {"0, 2": "", "1": "late"}
    run.put([0, 2], phase=Phase.RUNNING, waits_in=None)
    run.look()
    assert run.view.warnings == ()


def test_a_hang_that_was_found_by_the_stacks_is_told_until_the_panel_can_or_a_rank_moves():
    run = Run(2)
    run.put(phase=Phase.RUNNING, request=1)
    run.look()
    run.state.stuck.tell("rank 0 waits", "")
    run.wait(1.0)
    assert run.view.warnings == ("Rank 0 waits",)
    run.put([0], phase=Phase.WAITING, waits_in=Collective.barrier)
    run.look()
    assert run.view.warnings == ()
    run.state.stuck.tell("rank 0 waits", "")
    run.wait(8.0)
    (warning,) = run.view.warnings
    assert warning.startswith("Rank 1 ")


def test_ranks_that_have_failed_alike_are_told_by_the_traceback_that_is_raised():
    def rows(ranks: tuple[int, ...], *, details: str = "", steps: int = 0) -> int:
        run = Run(2)
        if steps:
            run.begin_loop(step=steps)
        run.put(state="failed")
        run.look()
        return len(run.end("failed", FailureSummary(ranks=ranks, what="ValueError", details=details)).rows)

    assert rows((0, 1)) == 0
    assert rows((1,)) == 2, "what the other one did is news"
    assert rows((0, 1), details="ValueError: it is raised nowhere") == 2
    assert rows((0, 1), steps=5) == 2


def test_while_an_evaluation_runs_the_step_is_that_of_the_training():
    run = Run(2)
    run.begin_loop(total=40, epoch=7)
    run.train(4.0, rate=8.0)
    run.begin_loop(total=8, epoch=7, loop=2, steps_before=40, evaluates=True)
    run.put(step=3, phase=Phase.WAITING, waits_in=Collective.all_gather)
    run.wait(1.0)
    row = run.row(0)
    assert (row.step, row.share, row.epoch, row.now) == ("40 / 40", 1.0, "7", "evaluation 3 / 8")
    run.begin_loop(total=40, epoch=7, loop=3, steps_before=40, trains=False)
    run.put(step=1, phase=Phase.FORWARD)
    run.look()
    assert run.row(0).step == "40 / 40", "the next epoch has begun when it trains"
    run.put(step=2, phase=Phase.FORWARD, trains=True, epoch=8)
    run.look()
    assert (run.row(0).step, run.row(0).epoch) == ("2 / 40", "8")

"""What a panel says about losses, memory, the use of devices, and progress bars."""

from __future__ import annotations

import math
import re

import pytest
from fixtures.panels import Run

from nb_accelerate.base.progress_page import Bar, Phase
from nb_accelerate.notebook.display.drawing import html, text
from nb_accelerate.notebook.display.view import View


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


def test_a_run_that_was_ended_after_an_epoch_says_so_and_shows_how_far_it_came():
    run = Run(2)
    run.begin_loop(total=40, epoch=1, epochs=25)
    run.train(5.0)
    run.put(in_loop=False, trains=False, steps_before=40, ended_after=(1, 25), state="returned")
    run.look()
    view = run.end()
    ended, steps = view.summary[:2]
    assert ended.endswith("epoch 1 of 25")
    assert steps == "40 steps"
    assert (run.row(0).step, run.row(0).share) == ("40 / 1,000", 0.04)
    for shown in (html.render(view), text.table(view), text.line(view)):
        assert ended in shown


def test_memory_is_that_of_the_device_and_its_peak_is_kept():
    run = Run(2)
    run.begin_loop()
    run.put([0], memory=3_000_000_000, peak=11_200_000_000)
    run.train(1.0)
    assert run.row(0).memory == "3.0 GB"
    run.put([0], memory=1_000_000_000)
    run.train(1.0)
    assert run.end().peak == "11.2 GB"


def test_each_device_says_how_busy_it_is():
    run = Run(2)
    run.begin_loop()
    run.put(memory=1_000_000_000)
    run.put([0], utilisation=97)
    run.put([1], utilisation=12)
    run.train(1.0)
    assert [row.gpu for row in run.view.rows] == ["97 %", "12 %"]


def test_devices_that_do_not_say_how_busy_they_are_have_no_column():
    run = Run(2)
    run.begin_loop()
    run.put(memory=1_000_000_000)
    run.train(1.0)
    assert {row.gpu for row in run.view.rows} == {""}
    assert re.search("memory</th><th [^>]*>now</th>", html.render(run.view))
    assert text.table(run.view).splitlines()[1].split() == ["rank", "step", "epoch", "it/s", "memory", "now"]


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
    run.put([63], loss=float("nan"))
    run.train(2.0)
    run.put(utilisation=90)
    run.put([3], utilisation=20)
    run.train(1.0)
    assert [row.gpu for row in run.view.rows] == ["90 %", "90 %"]


def bar(count: float, total: float | None = 100, **more: object) -> Bar:
    more = {"label": "steps", "text": f"{count}/{total} [00:05<00:05, 10.0it/s, loss=1]", **more}
    return Bar(count=count, total=total, seconds=5.0, **more)  # type: ignore[arg-type]


def lines(run: Run) -> list[tuple[str, str]]:
    run.look()
    return [(line.label, line.text) for line in run.view.bars]


def test_a_bar_of_several_ranks_is_one_line_as_the_first_of_them_has_it():
    run = Run(4)
    run.put(request=1, phase=Phase.RUNNING)
    for rank in range(4):
        run.put([rank], bars=(bar(50 + rank % 2),))
    assert lines(run) == [("steps", "50/100 [00:05<00:05, 10.0it/s, loss=1]")]
    assert run.view.rows == (), "the bar says it all"
    assert run.view.bars[0].share == 0.5
    run.put([2], bars=(bar(90),))
    assert lines(run) == [("steps", "50/100 [00:05<00:05, 10.0it/s, loss=1] (ranks: 50 to 90)")]


def test_bars_of_ranks_that_name_their_rank_are_a_line_each_and_numbers_of_epochs_are_not():
    run = Run(3)
    for rank in range(3):
        run.put([rank], bars=(bar(20, label=f"GPU {rank}"),))
    assert [label for label, _ in lines(run)] == ["GPU 0", "GPU 1", "GPU 2"]
    for rank in range(3):
        run.put([rank], bars=(bar(20, label=f"epoch {1 + rank // 2}, loss 0.12{rank}"),))
    assert [label for label, _ in lines(run)] == ["epoch 1, loss 0.120"]


def test_a_bar_without_a_label_says_whose_it_is_if_it_is_not_that_of_the_first_rank():
    run = Run(3)
    run.put([1], bars=(bar(20, label=""),))
    assert [label for label, _ in lines(run)] == ["rank 1"]
    run.put([0], bars=(bar(20, label=""),))
    assert [label for label, _ in lines(run)] == [""]


def test_of_bars_of_many_ranks_the_first_are_lines():
    run = Run(64)
    for rank in range(64):
        run.put([rank], bars=(bar(20, label=f"GPU {rank}"),))
    assert lines(run)[-2:] == [("GPU 11", "20/100 [00:05<00:05, 10.0it/s, loss=1]"), ("", "and 52 more bars")]


def test_a_bar_that_has_ended_has_no_time_left_and_says_so_if_that_was_before_its_total():
    run = Run(2)
    inner = bar(3, 9, ended=True, level=1)
    run.put(bars=(bar(9, 9, label="full", ended=True), bar(3, 9, label="open"), inner))
    run.look()
    found = [(line.label, line.kind, line.depth, line.share, line.text.partition("[")[2]) for line in run.view.bars]
    assert found == [
        ("full", "done", 0, 1.0, "00:05, 10.0it/s, loss=1]"),
        ("open", "", 0, 3 / 9, "00:05<00:05, 10.0it/s, loss=1]"),
        ("steps", "ended", 1, 3 / 9, "00:05, 10.0it/s, loss=1], ended early"),
    ]
    assert [line.kind for line in run.end("interrupted").bars] == ["done", "ended", "ended"]


def test_a_bar_that_stands_still_is_a_stall():
    run = Run(2)
    run.put(bars=(bar(5),), request=1, phase=Phase.RUNNING)
    run.look()
    run.wait(6.0)
    assert run.state.stalled(run.now) == {0, 1}
    run.put(bars=(bar(5, ended=True),))
    run.wait(6.0)
    assert run.state.stalled(run.now) == set()


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
    run.put([0], loss=math.nan)
    run.look()
    advice = "Clip gradients (accelerator.clip_grad_norm_) or lower the learning rate."
    assert run.view.warnings == (f"The loss is nan since about step 16. {advice}",)
    assert run.end().warnings == (f"The loss is nan since about step 16. {advice}",)


def losses(view: View) -> list[str]:
    """What the warning about losses says: whether it is over, what they were, at which steps, and on which ranks."""
    (warning,) = view.warnings
    return re.findall(r"\bwas\b|inf|nan|ranks? \d|\d+", warning.partition(" Clip")[0])


def test_a_loss_that_is_inf_and_then_nan_is_told_as_both_since_the_header_has_the_newest():
    run = Run(2)
    run.begin_loop()
    run.train(1.0)
    run.put(loss=math.inf)
    run.train(1.0)
    assert losses(run.view) == ["inf", "9"]
    run.put(loss=math.nan)
    run.train(1.0)
    view = run.end()
    assert view.summary[-1] == "loss nan"
    assert losses(view) == ["inf", "nan", "9"]


def test_a_loss_that_is_finite_again_is_told_as_what_was_and_leaves_a_gap_in_the_curve():
    run = Run(2)
    run.begin_loop()
    run.put(loss=2.0)
    run.train(1.0)
    run.put([1], loss=math.inf)
    run.train(1.0)
    assert losses(run.view) == ["inf", "9", "rank 1"]
    assert all(math.isfinite(loss) for _, loss in run.view.curve), "that of the other rank is drawn"
    run.put([0], loss=math.nan)
    run.train(1.0)
    assert [step for step, loss in run.view.curve if math.isnan(loss)] == [*range(17, 25)]
    run.put(loss=1.0)
    run.train(1.0)
    assert losses(run.view) == ["was", "inf", "nan", "9", "24"]
    assert [math.isnan(loss) for _, loss in run.end().curve][-8:] == [False] * 8


def test_a_loss_that_was_nan_several_times_is_told_in_one_sentence():
    run = Run(2)
    run.begin_loop()
    for loss in (2.0, math.nan, 2.0, math.nan, 2.0):
        run.put([1], loss=loss)
        run.train(0.125)
        if run.ranks[1].sample.step == 3:
            assert losses(run.view) == ["was", "nan", "2", "rank 1"]
    assert losses(run.view) == ["was", "nan", "2", "4", "rank 1"]


def test_a_run_that_ended_with_a_loss_that_is_nan_is_marked():
    run = Run(2)
    run.begin_loop()
    run.train(3.0)
    run.put(loss=float("nan"))
    run.look()
    view = run.end()
    assert (view.state, view.mark) == ("done", "!")
    assert text.table(view).startswith("! train")

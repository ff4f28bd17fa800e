"""Values logged with ``log_with="notebook"``: from a tracker in a rank to charts and records in the notebook."""

from __future__ import annotations

import itertools
import json
import math
import time
from typing import TYPE_CHECKING

import pytest

from nb_accelerate.base.progress_page import MAX_RECORD, here
from nb_accelerate.base.records import RunRecord, kept
from nb_accelerate.notebook.display.logged_values import charts_of
from nb_accelerate.training.tracking import NotebookTracker

if TYPE_CHECKING:
    from fixtures.kernels import Kernel


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the tracker of this process sends."""
    records: list[bytes] = []
    monkeypatch.setattr(here(), "outlet", records.append)
    return records


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "records", {})


def log(name: str, *losses: float) -> NotebookTracker:
    tracker = NotebookTracker(name)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    for step, loss in enumerate(losses):
        tracker.log({"loss": loss}, step=step)
    return tracker


@pytest.mark.usefixtures("nothing_kept")
def test_what_is_logged_is_kept_by_run_with_its_settings(sent: list[bytes]):
    log("digits", 2.0, 1.0)
    log("digits", 3.0)
    keys = [kept.take(record) for record in sent]
    first, second = kept.runs()
    assert (first.name, second.name) == ("digits", "digits-2")
    assert first.config == {"lr": 0.1}
    assert first.column("loss") == [(0, 2.0), (1, 1.0)]
    assert second.column("loss") == [(0, 3.0)]
    assert len(set(keys)) == 2


@pytest.mark.usefixtures("nothing_kept")
def test_a_chart_shows_earlier_runs_of_the_project_and_no_others(sent: list[bytes]):
    log("digits", 2.0)
    log("letters", 5.0)
    log("digits", 1.0)
    keys = list(dict.fromkeys(kept.take(record) for record in sent))
    (chart,) = charts_of([str(keys[-1])])
    assert chart.curve.points == ((0, 1.0),)
    assert [(curve.name, curve.points) for curve in chart.earlier] == [("digits", ((0, 2.0),))]


@pytest.mark.usefixtures("nothing_kept")
def test_more_values_than_one_record_can_carry_arrive_in_several(sent: list[bytes]):
    tracker = NotebookTracker("wide")
    values = {f"a layer with quite a long name, number {number}": float(number) for number in range(300)}
    tracker.log(values, step=7)
    assert len(sent) > 1
    assert all(len(record) <= MAX_RECORD for record in sent)
    for record in sent:
        kept.take(record)
    (run,) = kept.runs()
    assert {name: run.column(name) for name in run.columns} == {name: [(7, value)] for name, value in values.items()}


@pytest.mark.usefixtures("nothing_kept")
def test_a_run_that_no_tracker_has_told_of_is_noted_with_its_settings_values_and_end():
    for lr, ended in ((0.1, "done"), (0.5, "failed: ValueError"), (9.0, "done")):
        losses = ((1.0, 3.0), (2.0, math.nan if lr > 1 else 2.0))
        kept.note_run("train", config={"lr": lr}, values={"loss": losses}, began=time.time() - 5, ended=ended)
    found = [(run.name, run.config, run.ended, len(run.column("loss"))) for run in kept.runs()]
    assert found == [
        ("train", {"lr": 0.1}, "done", 2),
        ("train-2", {"lr": 0.5}, "failed: ValueError", 2),
        ("train-3", {"lr": 9.0}, "nan", 2),
    ]
    assert all(5 <= (run.duration or 0) < 60 for run in kept.runs())


@pytest.mark.usefixtures("nothing_kept")
def test_what_a_tracker_has_told_of_a_run_is_completed_by_what_is_known_from_outside(sent: list[bytes]):
    log("digits", 2.0)
    (key,) = {str(kept.take(record)) for record in sent}
    seen = {"loss": ((1.0, 9.0),), "accuracy": ((1.0, 0.5),)}
    kept.note_run("train", config={"lr": 9, "depth": 3}, values=seen, began=0.0, ended="interrupted", logged_as=[key])
    (run,) = kept.runs()
    assert (run.name, run.ended, run.config) == ("digits", "interrupted", {"lr": 0.1, "depth": 3})
    assert (run.column("loss"), run.column("accuracy")) == ([(0, 2.0)], [(1.0, 0.5)])
    run.add({"loss": 1.0, "step": 1})
    assert run.ended == "", "another cell goes on with it"


@pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"row": {}}', b"\xff"])
@pytest.mark.usefixtures("nothing_kept")
def test_what_makes_no_sense_is_left_out(garbage: bytes):
    assert kept.take(garbage) is None
    assert not kept.runs()


def test_text_and_long_values_do_not_become_too_long(sent: list[bytes]):
    tracker = NotebookTracker("text")
    tracker.log({"note": "x" * 10_000})
    (record,) = sent
    assert len(json.loads(record)["row"]["note"]) == 200


def test_of_a_run_that_logs_for_weeks_some_rows_are_kept_with_the_first_and_the_newest():
    record = RunRecord(name="long")
    for step in range(100_003):
        record.add({"loss": float(step)})
        if step % 1000 == 0:
            record.add({"accuracy": step / 1000, "step": step})
    losses, accuracies = record.column("loss"), record.column("accuracy")
    assert 2000 < len(losses) < 4100
    assert (losses[0][1], losses[-1][1]) == (0.0, 100_002.0)
    assert all(later[0] > sooner[0] and later[1] > sooner[1] for sooner, later in itertools.pairwise(losses))
    assert [value for _, value in accuracies] == list(range(101))  # not as many, so none is dropped
    assert len(record.rows) == len(losses) + len(accuracies)


def test_without_a_notebook_the_tracker_still_has_its_values():
    tracker = log("alone", 2.0, 1.0)
    assert tracker.tracker.column("loss") == [(0, 2.0), (1, 1.0)]
    assert len(tracker.tracker.plot().lines) == 1


TRAIN = """
from nb_accelerate import Accelerator, notebook_launcher, runs

def train(losses):
    accelerator = Accelerator(log_with="notebook")
    accelerator.init_trackers("digits", config={"lr": 0.1})
    for step, loss in enumerate(losses):
        print("step", step)
        accelerator.log({"loss": loss, "rank": accelerator.process_index}, step=step)
    accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.limit(90)
def test_a_launch_leaves_its_curves_in_the_cell_and_its_values_in_the_notebook(shared_kernel: Kernel):
    shared_kernel.run(TRAIN).ok()
    first = shared_kernel.run("notebook_launcher(train, ([3.0, 2.0],), num_processes=2)").ok()
    second = shared_kernel.run("notebook_launcher(train, ([2.5, 1.5],), num_processes=2)").ok()
    assert first.stdout.count("step 1\n") == 1
    assert '"row"' not in first.stdout
    for cell, earlier in ((first, 0), (second, 1)):
        (display,) = cell.displays
        page = display["text/html"]
        assert 'aria-label="loss ' in page
        assert page.count("<polyline ") == 1 + earlier  # the rank is constant
    shown = shared_kernel.run("print([(run.name, run.config['lr'], run.column('loss')) for run in runs()])").ok()
    assert eval(shown.stdout) == [("digits", 0.1, [(0, 3.0), (1, 2.0)]), ("digits-2", 0.1, [(0, 2.5), (1, 1.5)])]

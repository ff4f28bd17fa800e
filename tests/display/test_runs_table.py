"""`nb_accelerate.runs`: a table that compares runs, one chart of them, and files that outlive the kernel."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest

from nb_accelerate.base.records import RunRecord, kept
from nb_accelerate.base.records.naming import labels
from nb_accelerate.base.records.table import Runs
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.launch.description import simple_arguments
from nb_accelerate.training.tracking import JSONLinesTracker, NotebookTracker
from nb_accelerate.training.tracking.select import make_trackers

if TYPE_CHECKING:
    from pathlib import Path

    from fixtures.kernels import Kernel


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "records", {})


def note(*losses: float, ended: str = "done", name: str = "train", **config: Any) -> None:
    values = {"loss": tuple((float(step), loss) for step, loss in enumerate(losses, start=1))}
    kept.note_run(name, config=config, values=values, began=time.time() - 65, ended=ended)


def table(runs: Runs) -> list[dict[str, str]]:
    """The table that a notebook shows, a dict for each row."""
    found = ET.fromstring(runs._repr_html_()).find("table")
    assert found is not None
    head, *rows = [["".join(cell.itertext()) for cell in row] for row in found.iter("tr")]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_settings_that_differ_have_columns_and_the_others_a_line() -> None:
    note(3.0, 1.0, 2.0, lr=0.1, depth=3)
    note(3.0, lr=0.5, depth=3, ended="failed: ValueError")
    note(3.0, math.nan, lr=9.0, depth=3)
    shown = [{name: value for name, value in row.items() if name != "began"} for row in table(kept.runs())]
    assert shown == [
        {"": "0", "name": "train", "lr": "0.1", "loss": "2", "lowest loss": "1", "ended": "done", "time": "1:05"},
        {
            "": "1",
            "name": "train-2",
            "lr": "0.5",
            "loss": "3",
            "lowest loss": "3",
            "ended": "failed: ValueError",
            "time": "1:05",
        },
        {"": "2", "name": "train-3", "lr": "9", "loss": "nan", "lowest loss": "3", "ended": "nan", "time": "1:05"},
    ]
    lines = repr(kept.runs()).splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["name", "began", "lr", "loss", "lowest", "loss", "ended", "time"],
        ["0", "train", table(kept.runs())[0]["began"], "0.1", "2", "1", "done", "1:05"],
    ]
    assert lines[-1] == "The same in all: depth=3"


def test_runs_are_a_sequence_and_dicts_for_pandas() -> None:
    for lr in (0.1, 0.2, 0.3):
        note(2.0, 1.0, lr=lr)
    note(5.0, name="other")
    runs = kept.runs()
    assert (len(runs), runs[-1].name, [run.config["lr"] for run in runs[1:3]]) == (4, "other", [0.2, 0.3])
    assert [run.name for run in kept.runs("train")] == ["train", "train-2", "train-3"]
    assert isinstance(runs[1:], Runs)
    record = runs.records()[0]
    assert record.pop("began").timestamp() == pytest.approx(runs[0].began)
    assert record.pop("duration") == pytest.approx(65, abs=30)
    assert record == {"name": "train", "ended": "done", "config.lr": 0.1, "loss": 1.0, "best loss": 1.0}


def test_what_is_constant_has_no_column_and_accuracies_are_best_when_high() -> None:
    for lr in (0.1, 0.2):
        run = RunRecord(name="run", config={"lr": lr})
        for step, accuracy in enumerate((0.5, 0.9, 0.8)):
            run.add(
                {"step": step, "epoch": step, "accuracy": accuracy, "val_loss": 1.0 / (step + 1), "zero": 0, "lr": lr}
            )
        kept.records[str(lr)] = run
    assert [*table(kept.runs())[0]][3:-2] == ["lr", "accuracy", "highest accuracy", "val_loss"]
    assert repr(kept.runs()).splitlines()[-1].endswith(": zero=0")


def test_of_many_values_some_have_columns_and_the_others_are_named() -> None:
    run = RunRecord(name="run")
    for step in (1, 2):
        run.add({"step": step, **{f"value{number}": step for number in range(6)}, "loss": 1 / step})
    kept.records["run"] = run
    assert [*table(kept.runs())[0]][3:-2] == ["loss", "value0", "value1", "value2"]
    assert ": value3, value4, value5" in repr(kept.runs())


def test_without_runs_it_is_said_how_there_come_to_be_some() -> None:
    assert "No runs yet" in repr(kept.runs())
    assert "No runs yet" in kept.runs()._repr_html_()
    with pytest.raises(ConfigError, match=r"draw\. No runs yet"):
        kept.runs().plot()


def test_a_name_or_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    note(1.0, name="train")
    note(1.0, name="train")
    assert re.search(r"'trian'.*: train\.", repr(kept.runs("trian")))
    assert repr(kept.runs(project_dir=tmp_path / "lgs")).splitlines()[-1] == f"There is no folder {tmp_path / 'lgs'}."
    kept.records.clear()
    assert kept.runs(project_dir=tmp_path)._repr_html_() == f"<p>No runs in {tmp_path}.</p>"


def test_text_of_users_is_no_markup() -> None:
    note(1.0, name="<b>", note="</table><script>")
    note(1.0, name="<b>", note="&")
    page = kept.runs()._repr_html_()
    assert "<script>" not in page
    assert "&lt;b&gt;" in page


def test_secrets_are_not_shown() -> None:
    note(1.0, hf_token="abc", lr=1, key=7)
    note(2.0, hf_token="xyz", lr=2, key=7)
    runs = kept.runs()
    said = "".join((repr(runs), runs._repr_html_(), runs[1:]._repr_html_()))
    assert not re.search("hf_token|abc|xyz", said)
    assert ": key=7" in repr(runs)


def test_one_chart_has_all_runs_called_by_what_differs() -> None:
    for lr in (0.1, 0.5):
        note(*(100 * lr / step for step in range(1, 101)), lr=lr, depth=3)
    kept.records["other"] = RunRecord(name="without a loss")
    axes = kept.runs().plot("loss")
    assert [(line.get_label(), len(line.get_xdata())) for line in axes.lines] == [("lr=0.1", 100), ("lr=0.5", 100)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["lr=0.1", "lr=0.5"]
    assert (axes.get_title(), axes.get_yscale()) == ("loss", "log")
    assert kept.runs().plot("loss", log=False).get_yscale() == "linear"
    with pytest.raises(ConfigError, match=r"runs\. Write plot\('loss'\)"):
        kept.runs().plot("los")
    note(math.nan, math.nan)
    note(1.0, 0.0, -1.0)
    assert len(kept.runs().plot().lines) == 4


def test_runs_with_the_same_settings_are_called_by_name_too() -> None:
    assert labels(["a", "b"], [{"lr": 1}, {"lr": 2}]) == ["lr=1", "lr=2"]
    assert labels(["a", "b", "c"], [{"lr": 1}, {"lr": 1}, {"lr": 2}]) == ["a, lr=1", "b, lr=1", "c, lr=2"]
    assert labels(["a", "b"], [{}, {}]) == ["a", "b"]
    assert labels(["a", "b"], [{"lr": 1}, {}]) == ["a, lr=1", "b"]


def test_arguments_that_are_numbers_or_short_texts_are_settings() -> None:
    from nb_accelerate.base.config.launch import LaunchOptions

    def train(lr: float, data: object, depth: int = 3, **others: object) -> None: ...

    options = LaunchOptions(
        function=train, args=(0.1, [1, 2]), kwargs={"name": "x", "text": "y" * 1000, "hf_token": "z"}
    )
    assert simple_arguments(options) == {"lr": 0.1, "depth": 3, "name": "x"}
    options = LaunchOptions(function=train, args=(0.1, 0), kwargs={"max_tokens": 5, "tokenizer": "t", "apiKey": "z"})
    assert simple_arguments(options) == {"lr": 0.1, "data": 0, "depth": 3, "max_tokens": 5, "tokenizer": "t"}
    assert simple_arguments(LaunchOptions(function=train, args=(), kwargs={})) == {}


# --- files ----------------------------------------------------------------------------------------------------------


def write_run(folder: Path, name: str, *losses: float, ends: bool = True, **config: Any) -> Path:
    tracker = JSONLinesTracker(name, folder)
    tracker.start()
    tracker.store_init_configuration(config)
    for step, loss in enumerate(losses):
        tracker.log({"loss": loss}, step=step)
    if ends:
        tracker.finish()
    assert tracker.path is not None
    return tracker.path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a restart of the kernel does."""
    monkeypatch.setattr(kept, "records", {})


def test_files_are_found_again_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "digits", 2.0, 1.0, lr=0.1)
    write_run(tmp_path, "digits", 2.0, math.nan, lr=0.5)
    write_run(tmp_path, "deep/letters", 3.0, ends=False, lr=0.1)
    before = [(run.name, run.config, run.ended, run.column("loss")) for run in kept.runs("digits")]
    forget(monkeypatch)
    assert not kept.runs()
    runs = kept.runs("digits", project_dir=tmp_path)
    assert str([(run.name, run.config, run.ended, run.column("loss")) for run in runs]) == str(before)
    assert [(run.name, run.ended) for run in kept.runs(project_dir=tmp_path)] == [
        ("digits", "done"),
        ("digits-2", "nan"),
        ("deep/letters", ""),
    ]


def test_a_folder_with_a_run_of_this_kernel_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "yesterday", 2.0)
    forget(monkeypatch)
    write_run(tmp_path, "today", 1.0)
    assert [run.name for run in kept.runs()] == ["yesterday", "today"]


def test_two_trackers_of_a_run_are_one_run(tmp_path: Path) -> None:
    for tracker in make_trackers(["notebook", "jsonl"], "digits", logging_dir=tmp_path, init_kwargs={}):
        tracker.start()
        tracker.store_init_configuration({"lr": 0.1})
        tracker.log({"loss": 1.0}, step=1)
        tracker.finish()
    assert [(run.name, run.config, run.column("loss"), run.ended) for run in kept.runs()] == [
        ("digits", {"lr": 0.1}, [(1, 1.0)], "done")
    ]


def test_whoever_started_the_ranks_writes_how_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path, "digits", 2.0, ends=False, lr=0.1)
    (key,) = kept.records
    kept.note_run(
        "train", config={"lr": 9, "depth": 3}, values={}, began=0.0, ended="failed: ValueError", logged_as=[key]
    )
    forget(monkeypatch)
    (run,) = kept.runs(project_dir=tmp_path)
    assert (run.config, run.ended) == ({"lr": 0.1, "depth": 3}, "failed: ValueError")
    path.unlink()
    assert not kept.runs(project_dir=tmp_path)


def test_a_loss_that_was_only_seen_is_beside_what_the_file_has(tmp_path: Path) -> None:
    tracker = JSONLinesTracker("digits", tmp_path)
    tracker.log({"accuracy": 0.9}, step=1)
    tracker.finish()
    kept.note_run(
        "f", config={}, values={"loss": ((1, 2.0), (2, 1.0))}, began=0.0, ended="stopped", logged_as=[*kept.records]
    )
    (run,) = kept.runs()
    assert (run.column("loss"), run.column("accuracy")) == ([(1, 2.0), (2, 1.0)], [(1, 0.9)])
    assert run.ended == "done"


def test_a_tracker_that_goes_on_after_a_failed_cell_is_ended_by_the_next(tmp_path: Path) -> None:
    tracker = JSONLinesTracker("digits", tmp_path)
    tracker.log({"loss": 2.0})
    for ended in ("failed: ValueError", "interrupted"):
        tracker.log({"loss": 1.0})
        assert kept.runs()[0].ended == ""
        kept.note_run("cell 3", config={}, values={}, began=0.0, ended=ended, logged_as=list(kept.records))
        assert kept.runs()[0].ended == ended


DAMAGED = {
    "torn": ('{"config": {"lr": 1}}\n{"step": 1, "time": 5, "loss": 2}\n{"step": 2, "ti\n{"step": 3}\n', "Line 3 of"),
    "no-dict": ('{"config": {"lr": 1}}\n{"step": 1, "time": 5, "loss": 2}\n[1, 2]\n', "Line 3 of"),
    "bytes": ('{"config": {"lr": 1}}\n{"step": 1, "time": 5, "loss": 2}\n\udcff\udcfe\n', "Line 3 of"),
    "newer": ('{"run": {"began": 5, "version": 2}}\n{"new": []}\n{"step": 1, "time": 5, "loss": 2}\n', ""),
    "being-written": ('{"config": {"lr": 1}}\n{"step": 1, "time": 5, "loss": 2}\n{"step": 2, "ti', ""),
    "odd-rows": ('{"config": {"lr": 1}}\n{"step": "first", "time": "now", "loss": 2}\n', ""),
    "odd-first-line": ('{"run": {"began": "yesterday"}}\n', ""),
    "too-deep": ('{"config": {"lr": 1}}\n{"step": 1, "time": 5, "loss": 2}\n' + "[" * 100_000 + "\n", "Line 3 of"),
    "odd-times": (
        '{"run": {"began": 1e300}}\n{"step": NaN, "time": -1e300, "loss": 2}\n{"end": {"time": Infinity}}\n',
        "",
    ),
    "too-large": (f'{{"step": 1, "time": 5, "loss": 2}}\n{{"step": {10**400}, "time": 6, "lr": -{10**400}}}\n', ""),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_that_is_damaged_is_said_and_read_so_far(kind: str, tmp_path: Path) -> None:
    text, said = DAMAGED[kind]
    (tmp_path / "run.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    runs = kept.runs(project_dir=tmp_path)
    assert [run.last("loss") for run in runs] == [2 if "loss" in text else None]
    assert said in repr(runs)
    assert said in runs._repr_html_()
    assert bool(said) == ("run.jsonl" in repr(runs))
    assert [row["name"] for row in runs.records()] == ["run"]


def test_data_sets_are_no_runs_and_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "hello", "time": 3}\n' * 3)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "memory.jsonl").symlink_to("/proc/self/mem")
    runs = kept.runs(project_dir=tmp_path)
    assert not runs
    assert "memory.jsonl cannot be read" in repr(runs)
    assert not kept.runs(project_dir=tmp_path / "nowhere")


def test_a_run_of_ten_thousand_steps_and_twenty_values_is_read_whole(tmp_path: Path) -> None:
    rows = (
        {"step": step, "time": 5.0, "loss": 1e4 - step, **dict.fromkeys("abcdefghijklmnopqrs", step)}
        for step in range(10_000)
    )
    (tmp_path / "run.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run,) = runs = kept.runs(project_dir=tmp_path)
    assert (len(run.rows), run.best("loss"), len(run.columns)) == (10_000, 1, 20)
    assert len(runs.plot().lines[0].get_xdata()) == 10_000


def test_the_best_of_a_run_that_logs_for_weeks_is_exact() -> None:
    run = RunRecord(name="long")
    for step in range(50_001):
        run.add({"loss": abs(step - 33_333.0), "step": step})
    assert len(run.rows) < 4100
    assert run.best("loss") == 0.0


# --- ranks ----------------------------------------------------------------------------------------------------------

TRAIN = """
import torch
from nb_accelerate import Accelerator, notebook_launcher, runs

def train(lr, fails=False, folder=None):
    accelerator = Accelerator(cpu=True, log_with="jsonl" if folder else None, project_dir=folder)
    accelerator.init_trackers("digits", config={"lr": lr})
    model, optimizer = accelerator.prepare(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=lr))
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(20, 1)))
    for step, x in enumerate(loader):
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"loss": loss}, step=step)
    if fails:
        raise ValueError("as asked")
"""
SHOW = "[(run.name, run.config.get('lr'), run.ended, bool(run.column('loss'))) for run in runs()]"


@pytest.mark.contract("panel: runs")
@pytest.mark.limit(120)
def test_launches_and_cells_are_runs_with_their_arguments_and_ends(shared_kernel: Kernel, tmp_path: Path) -> None:
    shared_kernel.wait_for_server()
    shared_kernel.run(TRAIN + "\n%load_ext nb_accelerate").ok()
    shared_kernel.run("notebook_launcher(train, (0.1,), num_processes=2)").ok()
    shared_kernel.run("notebook_launcher(train, (0.2, True), num_processes=1)")
    shared_kernel.run(f"notebook_launcher(train, (0.3, True, {str(tmp_path)!r}), num_processes=2)")
    shared_kernel.run(f"%%distributed -n 1\ntrain(0.4, False, {str(tmp_path)!r})").ok()
    shared_kernel.run("%%distributed -n 1\ntrain(0.5)").ok()
    shared_kernel.run("%distributed stop").ok()
    *shown, of_cell = eval(shared_kernel.run(SHOW).ok().value)
    assert shown == [
        ("train", 0.1, "done", True),
        ("train-2", 0.2, "failed: ValueError", True),
        ("digits", 0.3, "failed: ValueError", True),
        ("digits-2", 0.4, "done", True),
    ]
    assert of_cell[0].startswith("cell ")
    (failed, ended) = Runs(kept.runs(project_dir=tmp_path))
    ranks = {"device": "cpu", "effective batch": 2, "mixed_precision": "no", "ranks": 2, "start": "fresh"}
    arguments = {"lr": 0.3, "fails": True, "folder": str(tmp_path)}
    assert (failed.config, failed.ended) == (ranks | arguments, "failed: ValueError")
    in_a_cell = {"device": "cpu", "effective batch": 1, "mixed_precision": "no", "ranks": 1}
    assert (ended.name, ended.config, ended.ended) == ("digits-2", in_a_cell | {"lr": 0.4}, "done")


CHOOSE = """
import os, torch
from nb_accelerate import Accelerator, notebook_launcher, runs

def train(folder=None, **choices):
    accelerator = Accelerator(cpu=True, **choices)
    model, optimizer = accelerator.prepare(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(48, 1), batch_size=4))
    if folder and os.path.exists(folder):
        accelerator.load_state(folder)
    elif folder:
        accelerator.save_state(folder)
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
"""


@pytest.mark.limit(120)
def test_runs_differ_in_ranks_batch_precision_and_start(shared_kernel: Kernel, tmp_path: Path) -> None:
    shared_kernel.wait_for_server()
    shared_kernel.run(CHOOSE).ok()
    choices = "dict(mixed_precision='bf16', gradient_accumulation_steps=3)"
    saved = str(tmp_path / "checkpoint")
    for call in ("num_processes=2", f"kwargs={choices}, num_processes=1", *[f"args=({saved!r},), num_processes=2"] * 2):
        shared_kernel.run(f"notebook_launcher(train, {call})").ok()
    shown = "(run.config[name] for name in ('ranks', 'effective batch', 'mixed_precision', 'start'))"
    found = shared_kernel.run(f"print(*(' '.join(map(str, {shown})) for run in runs('train')[-4:]), sep='\\n')").ok()
    assert found.stdout.splitlines() == ["2 8 no fresh", "1 12 bf16 fresh", "2 8 no fresh", "2 8 no resumed"]
    assert "device=cpu" in (shared_kernel.run("runs('train')[-4:]").value or "").splitlines()[-1]


SCRIPT = """
import sys
from nb_accelerate import Accelerator

accelerator = Accelerator(log_with="jsonl", project_dir=sys.argv[1])
accelerator.init_trackers("script", config={"lr": 0.1})
accelerator.log({"loss": 1.0}, step=1)
accelerator.wait_for_everyone()
if sys.argv[2] == "fails":
    raise ValueError("as asked")
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.limit(120)
def test_scripts_that_are_launched_from_a_terminal_are_runs_in_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for how in ("fails", "ends"):
        launch = ["launch", "--cpu", "--num_processes", "2", str(tmp_path / "train.py"), str(tmp_path), how]
        ran = subprocess.run([sys.executable, "-m", "nb_accelerate", *launch], capture_output=True, check=False)
        assert (ran.returncode == 0) == (how == "ends"), ran.stderr
    runs = kept.runs(project_dir=tmp_path)
    assert [(run.name, run.config, run.ended) for run in runs] == [
        ("script", {"lr": 0.1, "ranks": 2, "device": "cpu", "start": "fresh"}, "failed: ValueError"),
        ("script-2", {"lr": 0.1, "ranks": 2, "device": "cpu", "start": "fresh"}, "done"),
    ]


def test_a_process_without_ranks_keeps_its_runs_itself() -> None:
    tracker = NotebookTracker("alone")
    tracker.start()
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish()
    assert [(run.name, run.column("loss"), run.ended) for run in kept.runs()] == [("alone", [(1, 1.0)], "done")]
    assert len(kept.runs().plot().lines) == 1

"""Experiment trackers: the contract, the one of ours, those installed for real, and how an Accelerator drives them.

Libraries that are not installed where tests run are tested on a stand-in which records calls: the names of those
tests say so. They show that we call what the library documents, not that the library does what it says.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from nb_accelerate.base.config.project import LoggerType, ProjectConfiguration
from nb_accelerate.errors import ConfigError, MissingDependencyError, NotPreparedError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context
from nb_accelerate.training.tracking import (
    GeneralTracker,
    JSONLinesTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
    read_run,
    register_tracker_class,
    select,
)


def _lines(path: Path) -> list[dict[str, Any]]:
    """What was logged to a file, between its first line and its last."""
    first, *rows, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert first == {"run": {"began": pytest.approx(time.time(), abs=300), "version": 1}}
    assert last == {"end": {"how": "done", "time": pytest.approx(time.time(), abs=300)}}
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


# --- JSON lines -------------------------------------------------------------------------------------------------


@pytest.mark.contract("trackers: JSON lines")
def test_json_lines_hold_what_was_logged(tmp_path: Path):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("digits", config={"lr": 0.1, "layers": [1, 2], "device": torch.device("cpu")})
    accelerator.log({"loss": torch.tensor(0.5), "accuracy": np.float32(0.25), "name": "x"}, step=3)
    accelerator.log({"confusion": torch.eye(2)})
    accelerator.end_training()
    assert _lines(tmp_path / "digits.jsonl") == [
        {"config": {"lr": 0.1, "layers": [1, 2], "device": "cpu"}},
        {"step": 3, "loss": 0.5, "accuracy": 0.25, "name": "x"},
        {"confusion": [[1.0, 0.0], [0.0, 1.0]]},
    ]


def test_a_second_run_of_a_name_is_a_second_file(tmp_path: Path):
    for value in (1, 2):
        tracker = JSONLinesTracker("digits", tmp_path)
        tracker.start()
        tracker.log({"loss": value})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits-2.jsonl", "digits.jsonl"]
    assert read_run(tmp_path / "digits-2.jsonl").column("loss") == [(0, 2)]
    (tmp_path / "older.jsonl").write_text("")
    os.utime(tmp_path / "older.jsonl", (1, 1))
    os.utime(tmp_path / "digits-2.jsonl")
    assert read_run(tmp_path).name == "digits-2"


def test_a_run_can_be_read_while_it_is_written(tmp_path: Path):
    tracker = JSONLinesTracker("digits", tmp_path)
    tracker.start()
    tracker.store_init_configuration({"lr": 1})
    tracker.log({"loss": 1.0}, step=10)
    tracker.log({"loss": 0.5, "done": True}, step=20)
    with tracker.path.open("a") as file:
        file.write('{"step": 30, "lo')
    record = read_run(tracker.path)
    assert (record.config, record.columns) == ({"lr": 1}, ["loss"])
    assert record.column("loss") == [(10, 1.0), (20, 0.5)]
    assert repr(record).endswith(" 2 rows of loss)")


def test_a_run_is_drawn_without_any_library(tmp_path: Path):
    tracker = JSONLinesTracker("digits", tmp_path)
    for step, loss in enumerate([1.0, 0.5, float("nan"), 0.2]):
        tracker.log({"loss <train>": loss, "steady": 3}, step=step)
    curves = {line.get_label(): list(line.get_ydata()) for line in tracker.tracker.plot().lines}
    assert any(map(math.isnan, curves["loss <train>"]))  # which interrupts the line
    assert set(curves["steady"]) == {3}
    assert len(tracker.tracker.plot("steady").lines) == 1
    with pytest.raises(ConfigError, match="'los' was not logged"):
        tracker.tracker.plot("los")


def test_what_is_not_a_run_is_said(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no run"):
        read_run(tmp_path)
    (tmp_path / "a.jsonl").write_text("hello\n")
    with pytest.raises(ConfigError, match=r"Line 1 .*run: 'hello"):
        read_run(tmp_path)


# --- an Accelerator drives trackers --------------------------------------------------------------------------------


class Diary(GeneralTracker):
    """A user's tracker, as documents of accelerate write it."""

    name = "diary"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str):
        super().__init__()
        self.run_name = run_name
        self.calls: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("config", values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append(("log", values, step, kwargs))

    @on_main_process
    def finish(self) -> None:
        self.calls.append("finish")


def test_a_tracker_of_ones_own_gets_everything():
    diary = Diary("mine")
    accelerator = Accelerator(cpu=True, log_with=diary)
    accelerator.init_trackers("project", config={"a": 1})
    accelerator.log({"loss": 1}, step=2, log_kwargs={"diary": {"loud": True}})
    assert accelerator.get_tracker("diary") is diary
    assert accelerator.get_tracker("diary", unwrap=True) is diary.calls
    accelerator.end_training()
    assert diary.calls == [("config", {"a": 1}), ("log", {"loss": 1}, 2, {"loud": True}), "finish"]
    assert accelerator.trackers == []


def test_only_the_main_process_records(run_ranks, tmp_path: Path):
    def run(folder):
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
        accelerator.init_trackers("digits", config={"lr": 1})
        loss = accelerator.gather(torch.tensor([float(accelerator.process_index)])).mean()
        accelerator.log({"loss": loss}, step=0)
        tracker = accelerator.get_tracker("jsonl")
        tracker.log_images({"a": 1}) if accelerator.process_index else None  # elsewhere anything goes
        blank = accelerator.get_tracker("jsonl", unwrap=True)
        accelerator.wait_for_everyone()
        accelerator.end_training()
        return type(tracker).__name__, type(blank).__name__, torch.distributed.is_initialized()

    assert run_ranks(run, str(tmp_path)) == [
        ("JSONLinesTracker", "RunRecord", False),
        ("BlankTracker", "BlankTracker", False),
    ]
    assert _lines(tmp_path / "digits.jsonl") == [{"config": {"lr": 1}}, {"step": 0, "loss": 0.5}]


def test_a_tracker_for_all_processes_records_on_all(run_ranks):
    def run():
        from nb_accelerate import Accelerator
        from nb_accelerate.training.tracking import GeneralTracker, on_main_process

        class Everywhere(GeneralTracker):
            name = "everywhere"
            requires_logging_directory = False
            main_process_only = False
            tracker = None

            def __init__(self):
                super().__init__()
                self.seen = []

            @on_main_process
            def log(self, values, step=None, **kwargs):
                self.seen.append(values["loss"])

        tracker = Everywhere()
        accelerator = Accelerator(cpu=True, log_with=[tracker])
        accelerator.init_trackers("x")
        accelerator.log({"loss": accelerator.process_index})
        return tracker.seen, accelerator.get_tracker("everywhere") is tracker

    assert run_ranks(run) == [([0], True), ([1], True)]


def test_a_tracker_that_lacks_something_says_what():
    class Half(GeneralTracker):
        name = "half"

    with pytest.raises(NotImplementedError, match="Half lacks requires_logging_directory, tracker"):
        Half()


def test_a_registered_tracker_is_found_by_name(monkeypatch):
    monkeypatch.setattr(select, "TRACKERS", dict(select.TRACKERS))
    assert register_tracker_class(Diary) is Diary
    accelerator = Accelerator(cpu=True, log_with="diary")
    accelerator.init_trackers("project")
    assert accelerator.get_tracker("diary").run_name == "project"

    class Copy(Diary):
        name = "diary"

    with pytest.warns(UserWarning, match="tracker called 'diary'"):
        register_tracker_class(Copy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_tracker_class(Copy)  # as a cell does that runs again
    assert select.tracker_class("diary") is Copy

    class Unsaid(GeneralTracker):
        name = "unsaid"

    with pytest.raises(ValueError, match="Unsaid does not say"):
        register_tracker_class(Unsaid)


@pytest.mark.parametrize(
    ("log_with", "error", "text"),
    [
        ("tensorbord", ConfigError, "mean 'tensorboard'"),
        (Diary, ConfigError, "Diary. Write an object"),
        ([3], ConfigError, "has 3, which is neither"),
        ("tensorboard", ConfigError, r"them. Write Accelerator\(log_with='tensorboard', proj"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused_before_anything_starts(log_with, error, text):
    with pytest.raises(error, match=text):
        Accelerator(cpu=True, log_with=log_with)
    assert context.current() is None


def test_a_library_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(select, "is_installed", lambda _: False)
    with pytest.raises(MissingDependencyError, match=r"package 'wandb'.*install wandb") as caught:
        Accelerator(cpu=True, log_with=LoggerType.WANDB)
    assert caught.value.package == "wandb"


def test_all_means_what_is_installed_and_has_what_it_needs(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(select, "is_installed", lambda name: name in ("tensorboard", "comet_ml"))
    assert get_available_trackers() == ["tensorboard", "comet_ml", "jsonl", "notebook"]
    assert filter_trackers("all") == ["comet_ml", "jsonl", "notebook"]
    assert filter_trackers([LoggerType.ALL], tmp_path) == ["tensorboard", "comet_ml", "jsonl", "notebook"]
    assert filter_trackers(None) == []


def test_asking_for_a_tracker_that_is_not_open_says_what_to_write(tmp_path: Path):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    with pytest.raises(NotPreparedError, match="init_trackers was not called"):
        accelerator.get_tracker("jsonl")
    with pytest.raises(ConfigError, match=r"init_kwargs.*mean 'jsonl'"):
        accelerator.init_trackers("digits", init_kwargs={"jsnl": {}})
    accelerator.init_trackers("digits")
    with pytest.raises(ConfigError, match="tracker 'wandb' is open"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()


def test_directories_come_from_either_argument(tmp_path: Path):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    assert (accelerator.project_dir, accelerator.logging_dir) == (tmp_path, tmp_path)
    config = ProjectConfiguration(project_dir="a", logging_dir="b", automatic_checkpoint_naming=True, iteration=4)
    accelerator = Accelerator(cpu=True, project_config=config)
    assert (accelerator.project_dir, accelerator.logging_dir, accelerator.save_iteration) == ("a", "b", 4)
    accelerator = Accelerator(cpu=True, project_dir="a", project_config=ProjectConfiguration(logging_dir="c"))
    assert (accelerator.project_dir, accelerator.logging_dir) == ("a", "c")


# --- TensorBoard, for real ------------------------------------------------------------------------------------------


@pytest.mark.contract("trackers: TensorBoard")
def test_tensorboard_shows_what_was_logged(tmp_path: Path):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("digits", config={"lr": 0.1, "layers": [1, 2]})
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    assert "SummaryWriter" in type(writer).__name__
    flush = writer.flush = Mock(wraps=writer.flush)
    for step in range(3):
        accelerator.log({"loss": torch.tensor(1.0 / (step + 1)), "note": "good", "both": {"a": 1, "b": 2}}, step=step)
    assert flush.call_count == 3, "a kill loses what waits to be written"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "digits")).Reload()  # while it runs
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 1.0),
        (1, 0.5),
        (2, pytest.approx(1 / 3)),
    ]
    assert "note/text_summary" in events.Tags()["tensors"]
    accelerator.get_tracker("tensorboard").log_images({"rows": np.zeros((2, 3, 4, 4))}, step=1)
    accelerator.end_training()
    events.Reload()
    assert events.Tags()["images"] == ["rows"]
    assert json.loads((tmp_path / "digits" / "hparams.yml").read_text()) == {"lr": 0.1, "layers": [1, 2]}


def test_values_that_no_open_tracker_records_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    for step in range(3):
        accelerator.log({"loss": 1.0}, step=step)
    (said,) = (record.message for record in caplog.records)
    assert "accelerator.init_trackers('my run')" in said
    Accelerator(cpu=True).log({"loss": 1.0})
    accelerator.init_trackers("first")
    accelerator.log({"loss": 1.0})
    assert len(caplog.records) == 1


def test_using_a_tracker_before_it_is_open_is_an_error_that_says_so(tmp_path: Path):
    from nb_accelerate.training.tracking import TensorBoardTracker

    with pytest.raises(NotPreparedError, match="tensorboard is not open"):
        TensorBoardTracker("digits", tmp_path).log({"loss": 1})


# --- Weights & Biases, for real, offline ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.may_leave("processes", "threads", "descriptors", "files", "environment")  # its service ends with Python
def test_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    accelerator = Accelerator(cpu=True, log_with="wandb")
    accelerator.init_trackers("digits", config={"lr": 0.1}, init_kwargs={"wandb": {"dir": str(tmp_path)}})
    accelerator.log({"loss": torch.tensor(0.5)}, step=1)
    accelerator.log({"loss": torch.tensor(0.25)}, step=2)  # which completes step 1
    run = accelerator.get_tracker("wandb", unwrap=True)
    assert (run.config["lr"], run.summary["loss"]) == (0.1, 0.5)
    accelerator.get_tracker("wandb").log_table("rows", columns=["a"], data=[[1]])
    accelerator.end_training()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


# --- the others, on stand-ins ---------------------------------------------------------------------------------------


class StandIn:
    """Records every call on it, and on what calls and attributes return."""

    def __init__(self, path: str, calls: list[Any]) -> None:
        self.__dict__.update(_path=path, _calls=calls)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._path}.{name}".lstrip("."), self._calls)

    def __setattr__(self, name: str, value: Any) -> None:
        self._calls.append((f"{self._path}.{name} =", value))

    def __setitem__(self, name: str, value: Any) -> None:
        self._calls.append((f"{self._path}[{name}] =", value))

    def __call__(self, *args: Any, **kwargs: Any) -> StandIn:
        self._calls.append((self._path, *args, kwargs) if kwargs else (self._path, *args))
        return StandIn(f"{self._path}()", self._calls)


def _calls_of(monkeypatch: pytest.MonkeyPatch, module: str, tracker: Any, **answers: Any) -> list[Any]:
    """What a tracker calls when it is opened, configured, told a loss, and closed."""
    calls: list[Any] = []
    library = StandIn("", calls)
    library.__dict__.update(answers)
    monkeypatch.setitem(sys.modules, module, library)
    tracker.start()
    tracker.store_init_configuration({"lr": torch.tensor(0.5)})
    tracker.log({"eval_loss": torch.tensor(2.0)}, step=3)
    tracker.finish()
    return calls


@pytest.mark.parametrize(
    ("tracker", "name"),
    [
        ("tensorboard", "writer"),
        ("wandb", "run"),
        ("trackio", "run"),
        ("swanlab", "run"),
        ("comet_ml", "writer"),
        ("aim", "writer"),
        ("mlflow", "active_run"),
        ("clearml", "task"),
        ("dvclive", "live"),
    ],
)
def test_the_run_of_a_library_has_the_name_that_scripts_for_accelerate_use(tracker: str, name: str, tmp_path: Path):
    kind = select.TRACKERS[tracker].load()
    made = kind("digits", tmp_path) if tracker in ("tensorboard", "aim") else kind("digits")
    made.run = object()
    assert getattr(made, name) is made.run
    assert made.tracker is made.run


_LIKE_WANDB = [
    ("init", {"project": "digits", "mode": "local"}),
    ("init().config.update", {"lr": 0.5}),
    ("init().log", {"eval_loss": 2.0}, {"step": 3}),
    ("init().finish",),
]


@pytest.mark.contract("trackers: other libraries")
@pytest.mark.parametrize(
    ("name", "args", "options", "calls"),
    [
        ("swanlab", ("digits",), {"mode": "local"}, _LIKE_WANDB),
        ("trackio", ("digits",), {"mode": "local"}, _LIKE_WANDB),
        (
            "comet_ml",
            ("digits",),
            {"workspace": "me"},
            [
                ("start", {"project_name": "digits", "workspace": "me"}),
                ("start().log_parameters", {"lr": 0.5}),
                ("start().set_step", 3),
                ("start().log_metric", "eval_loss", 2.0, {"step": 3}),
                ("start().end",),
            ],
        ),
        (
            "aim",
            ("digits", "logs"),
            {"log_system_params": False},
            [
                ("Run", {"repo": "logs", "log_system_params": False}),
                ("Run().name =", "digits"),
                ("Run()[hparams] =", {"lr": 0.5}),
                ("Run().track", 2.0, {"name": "eval_loss", "step": 3}),
                ("Run().close",),
            ],
        ),
        (
            "dvclive",
            ("digits",),
            {"dir": "out"},
            [
                ("Live", {"dir": "out"}),
                ("Live().log_params", {"lr": 0.5}),
                ("Live().step =", 3),
                ("Live().log_metric", "eval_loss", 2.0),
                ("Live().next_step",),
                ("Live().end",),
            ],
        ),
    ],
)
def test_libraries_are_called_as_they_are_to_be(
    monkeypatch, name: str, args: tuple[str, ...], options: dict[str, Any], calls: list[Any]
):
    assert _calls_of(monkeypatch, name, select.TRACKERS[name].load()(*args, **options)) == calls


def test_clearml_on_a_stand_in(monkeypatch):
    from nb_accelerate.training.tracking import ClearMLTracker

    calls: list[Any] = []

    class Task(StandIn):
        @property
        def current_task(self) -> Any:
            return lambda: None

    made = _calls_of(monkeypatch, "clearml", ClearMLTracker("digits"), Task=Task("Task", calls))
    assert made == []
    assert calls == [
        ("Task.init", {"project_name": "digits", "task_name": "digits"}),
        ("Task.init().connect_configuration", {"lr": 0.5}),
        ("Task.init().get_logger",),
        (
            "Task.init().get_logger().report_scalar",
            {"title": "loss", "series": "eval", "value": 2.0, "iteration": 3},
        ),
        ("Task.init().close",),
    ]


def test_mlflow_on_a_stand_in(monkeypatch, tmp_path: Path, caplog):
    from nb_accelerate.training.tracking import MLflowTracker

    monkeypatch.setenv("MLFLOW_TAGS", '{"team": "us"}')
    calls: list[Any] = []
    library = StandIn("", calls)
    library.__dict__["get_experiment_by_name"] = lambda _: None
    library.__dict__["create_experiment"] = lambda name, artifact_location: f"id of {name} at {artifact_location}"
    library.__dict__["utils"] = type("U", (), {"validation": type("V", (), {"MAX_PARAM_VAL_LENGTH": 10})})
    monkeypatch.setitem(sys.modules, "mlflow", library)
    tracker = MLflowTracker("digits", tmp_path, run_name="first")
    tracker.start()
    tracker.store_init_configuration({"lr": 0.5, "long": "x" * 11, **{f"p{i}": i for i in range(150)}})
    tracker.log({"loss": torch.tensor(2.0), "note": "x"}, step=3)
    tracker.finish()
    assert calls[0] == (
        "start_run",
        {
            "run_id": None,
            "run_name": "first",
            "nested": False,
            "tags": {"team": "us"},
            "description": None,
            "experiment_id": f"id of digits at {tmp_path.as_uri()}",
        },
    )
    assert [len(call[1]) for call in calls if call[0] == "log_params"] == [100, 51]
    assert calls[-2:] == [("log_metrics", {"loss": 2.0}, {"step": 3}), ("end_run",)]
    assert "the 10 characters" in caplog.text
    assert "'note' is a str" in caplog.text

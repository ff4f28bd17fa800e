"""Training that runs is paused, saved, changed and stopped from the notebook, on all ranks after the same step."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate.base.config.project import ProjectConfiguration
from nb_accelerate.base.progress_page import Phase, Sample, here
from nb_accelerate.base.progress_page.commands import CommandWriter
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.errors import CheckpointError, ConfigError, DeadlineError, LaunchError
from nb_accelerate.notebook.display.panel import Action
from nb_accelerate.notebook.launch import Launch, notebook_launcher
from nb_accelerate.notebook.ranks.steering_buttons import steering_actions
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.accelerator.steering import change_learning_rate
from nb_accelerate.training.process import context


def _train(where: str, epochs: int, uses_epochs: bool) -> dict[str, Any]:
    """Train until it is told to stop; write the learning rate of each step, and a line when the first is done."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from nb_accelerate.training.accelerator import Accelerator

    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    data = TensorDataset(torch.arange(64.0).reshape(16, 4) / 64, torch.ones(16, 1))
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, DataLoader(data, batch_size=2))
    rank = accelerator.process_index
    rates: list[float] = []
    done = 0
    for _ in accelerator.epochs(epochs) if uses_epochs else range(epochs):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
            Path(where, f"steps {rank}").write_text(str(len(rates)))
        done += 1
    return {"rates": rates, "epochs": done, "weight": accelerator.unwrap_model(model).weight.detach().tolist()}


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Any]:
    """Return a function that launches training on two ranks, and waits until both have begun."""
    launched: list[Launch] = []

    def launch(*, epochs: int = 1_000_000, uses_epochs: bool = True) -> Launch:
        made = notebook_launcher(
            _train, (str(tmp_path), epochs, uses_epochs), 2, block=False, progress="off", devices="cpu"
        )
        assert isinstance(made, Launch)
        launched.append(made)
        return made

    yield launch
    for one in launched:
        one.stop()


def _steps(where: Path) -> list[int]:
    return [int((where / f"steps {rank}").read_text() or 0) for rank in range(2)]


def test_all_ranks_obey_after_the_same_step(begin: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch = begin()
    launch.pause()  # comes in time even while ranks start
    assert launch.is_paused
    assert launch.status() == "paused"
    stopped = _steps(tmp_path)
    assert stopped[0] == stopped[1] > 0
    launch.set_learning_rate(0.01)
    launch.set_learning_rate(0.02)
    saved = launch.save_checkpoint(tmp_path / "by hand")
    assert json.loads((saved / "checkpoint.json").read_text())["files"].keys() >= {"model.safetensors"}
    with pytest.raises(CheckpointError, match="need a folder"):
        launch.save_checkpoint()
    assert _steps(tmp_path) == stopped
    launch.resume()
    assert launch.status() == "running"
    launch.set_learning_rate(0.5)  # while it runs
    launch.stop_after_epoch()
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith(("training", "the learning"))] == [
        "training is paused",
        "the learning rate is 0.01; it was 0.1",
        "the learning rate is 0.02; it was 0.01",
        "training goes on",
        "the learning rate is 0.5; it was 0.02",
        "training ends after this epoch",
    ]
    found = launch.result(60)
    assert found[0] == found[1]
    rates = found[0]["rates"]
    assert len(rates) == 4 * found[0]["epochs"]
    # A schedule goes on from what it is given; each change comes at one step of all ranks.
    assert [rates[0], rates[stopped[0] - 1], rates[stopped[0]], rates[-1]] == pytest.approx([0.1, 0.1, 0.02, 0.5])
    with pytest.raises(LaunchError, match=r"pause: the launch has ended already.*Start it again"):
        launch.pause()


def test_a_checkpoint_goes_to_the_folder_that_is_named_although_others_are_numbered(tmp_path: Path) -> None:
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(torch.nn.Linear(2, 2))
    named = tmp_path / "by hand"
    assert accelerator._save_on_command(str(named)) == named
    for _ in range(3):
        accelerator.save_state()
    assert (named / "checkpoint.json").exists()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_2"]


def test_an_interrupt_while_ranks_are_told_the_decision_leaves_none_without_it(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = begin()
    decide = CommandWriter.decide

    def decide_and_interrupt(self: CommandWriter, number: int, *, holds: bool) -> None:
        decide(self, number, holds=holds)
        if holds:  # and not in an attempt while ranks start
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(CommandWriter, "decide", decide_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            launch.pause()
    deadline = time.monotonic() + 20.0
    while not launch.is_paused:  # a rank without the decision would wait for it
        assert time.monotonic() < deadline
        time.sleep(0.01)  # there is no event for what another process writes
    launch.resume(timeout=20.0)
    launch.stop_after_epoch(timeout=20.0)
    first, second = launch.result(20.0)
    assert first["epochs"] == second["epochs"]


def test_a_loop_that_cannot_be_ended_says_how_to_write_it(begin: Any) -> None:
    launch = begin(uses_epochs=False)
    launch.pause()
    request, world_size = launch._steered()
    (_, _, stop) = steering_actions(request, world_size, note=print, say=print)
    assert not stop.can()
    launch.resume()
    with pytest.raises(ConfigError, match=r"accelerator\.epochs\(3\)"):
        launch.stop_after_epoch()
    launch.pause()  # it goes on, and is obeyed again
    launch.resume()


def test_buttons_of_a_panel_steer_and_say_what_they_did(begin: Any, tmp_path: Path) -> None:
    launch = begin(epochs=1_000_000)
    launch.pause()
    request, world_size = launch._steered()
    said: list[str] = []
    buttons = {one.title: one for one in steering_actions(request, world_size, note=said.append, say=said.append)}
    assert {title: button.can() for title, button in buttons.items()} == {
        "Pause": True,
        "Save": False,
        "Stop after epoch": True,
    }
    for title in ("Save", "Pause", "Pause", "Stop after epoch", "Pause"):
        thread: Any = buttons[title].do()
        thread.join()
    assert launch.result(60)[0]["epochs"] > 0
    assert said[0].startswith("Numbered checkpoints need a folder")
    assert said[1:] == ["asked to end after this epoch"], "of the others rows and buttons tell"
    assert not steering_actions(request, world_size + 1, note=said.append, say=said.append)  # on another machine


def can(*samples: Sample) -> list[bool]:
    """Whether ranks that are so far can be paused, save and stop."""
    return [button.can() for button in buttons_of(*samples)]


def buttons_of(*samples: Sample) -> tuple[Action, ...]:
    request: Any = SimpleNamespace(
        ranks=[
            SimpleNamespace(handle=SimpleNamespace(page=SimpleNamespace(read=lambda one=one: one))) for one in samples
        ],
        callbacks=[],
    )
    return steering_actions(request, len(samples), note=print, say=print)


def test_of_several_ranks_the_one_that_cannot_obey_decides() -> None:
    obeys = Sample(
        request=1, phase=Phase.RUNNING, steps_before=3, takes_commands=True, has_folder=True, has_epoch_loop=True
    )
    assert can(obeys, obeys) == [True, True, True]
    assert can(obeys, replace(obeys, has_folder=False)) == [True, False, True]
    assert can(replace(obeys, has_epoch_loop=False), obeys) == [True, True, False]
    assert can(obeys, replace(obeys, has_folder=None, has_epoch_loop=None)) == [True, True, True], "not known"


def test_a_button_is_there_while_training_can_obey_it() -> None:
    starts, runs = Sample(), Sample(request=1, phase=Phase.RUNNING, loop=1, step=4)  # a loop of another library
    assert can(starts, runs) == [False, False, False]
    trains = replace(runs, steps_before=3, takes_commands=True, has_folder=False, has_epoch_loop=False)
    assert can(trains) == [True, False, False]
    assert can(replace(trains, steps_before=0)) == [True, False, True], "the loop over epochs may be still to come"
    assert can(replace(trains, phase=Phase.ENDED)) == [False, False, False]


def test_that_a_loop_over_epochs_was_ended_before_its_last_is_noted(tmp_path: Path) -> None:
    context.reset()
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    _, loader = accelerator.prepare(torch.nn.Linear(2, 1), data)

    def ends(epochs: Iterable[object], at: int) -> tuple[int, int] | None:
        here().begin_request()
        for number, _ in enumerate(epochs, start=1):
            accelerator.core.steering.stops = number == at
        return read(here()._memory).ended_after

    assert ends(accelerator.epochs(25), 1) == (1, 25)
    assert ends(accelerator.epochs(25, start=4), 2) == (6, 25)
    assert ends(accelerator.epochs(3), 3) is None, "nothing was left to train"
    assert ends(accelerator.epochs(3), 0) is None
    assert ends(accelerator.resumable(loader, epochs=3), 2) == (2, 3)
    here().begin_request()
    context.reset()


def test_a_step_outside_of_loops_or_a_loop_is_what_takes_commands() -> None:
    context.reset()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([parameter := torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    data = DataLoader(TensorDataset(torch.ones(2, 2)), batch_size=2)
    _, optimizer, loader = accelerator.prepare(torch.nn.Linear(2, 1), optimizer, data)
    here().begin_request()
    assert not read(here()._memory).takes_commands
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert read(here()._memory).takes_commands
    here().begin_request()  # of a new cell
    assert not read(here()._memory).takes_commands
    for _ in loader:
        assert read(here()._memory).takes_commands
    here().begin_request()
    context.reset()


def test_what_training_could_obey_is_noted_when_a_loop_begins_and_ends(tmp_path: Path) -> None:
    def said() -> tuple[bool | None, bool | None]:
        sample = read(here()._memory)
        return sample.has_folder, sample.has_epoch_loop

    context.reset()
    here().begin_request()
    accelerator = Accelerator(cpu=True)
    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    _, loader = accelerator.prepare(torch.nn.Linear(2, 1), data)
    assert said() == (None, None)
    assert [said() for _ in loader] == [(False, False)] * 2
    accelerator.project_configuration.set_directories(tmp_path)
    assert [said() for _ in accelerator.epochs(2) for _ in loader] == [(True, True)] * 4
    assert said() == (True, False)
    assert [said() for _, batches in accelerator.resumable(loader, epochs=1) for _ in batches] == [(True, True)] * 2
    for _ in accelerator.epochs(1):
        here().begin_request()  # of a new cell
        assert said() == (None, None)
        assert [said() for _ in loader] == [(True, True)] * 2
    assert [said() for _ in Accelerator(cpu=True).epochs(1) for _ in loader] == [(True, False)] * 2, (
        "another one's loop"
    )
    here().begin_request()
    context.reset()


def test_a_rank_that_takes_no_steps_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    def train(where: str) -> int:
        import torch
        from torch import nn

        from nb_accelerate.training.accelerator import Accelerator

        accelerator = Accelerator(cpu=True)
        wrapped, optimizer = accelerator.prepare(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        if accelerator.process_index == 0:
            Path(where, "begun").touch()
            while not Path(where, "end").exists():
                model.weight.grad = torch.ones(1, 1)
                with accelerator.no_sync(wrapped):  # this rank trains for itself
                    optimizer.step()
                time.sleep(0.001)
        else:
            while not Path(where, "end").exists():
                time.sleep(0.001)
        return 7

    launch = notebook_launcher(train, (str(tmp_path),), 2, block=False, progress="off", devices="cpu")
    assert isinstance(launch, Launch)
    try:
        while not (tmp_path / "begun").exists() and not launch.wait(0.01):
            pass
        with pytest.raises(DeadlineError, match="Rank 1 began no batch"):
            launch.pause(timeout=1.0)
        assert not launch.is_paused
        (tmp_path / "end").touch()
        assert launch.result(60) == [7, 7]
    finally:
        launch.stop()


def test_a_command_between_two_attempts_is_for_the_second(tmp_path: Path) -> None:
    def train(where: str) -> dict[str, Any]:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("the first attempt")
        return _train(where, 1_000_000, uses_epochs=True)

    launch = notebook_launcher(train, (str(tmp_path),), 2, block=False, progress="off", devices="cpu", max_restarts=1)
    assert isinstance(launch, Launch)
    try:
        while not launch._requests:
            assert not launch.wait(0.001)
        launch._requests[0].done.wait()
        launch.pause()
        launch.resume()
        launch.stop_after_epoch()
        first, second = launch.result(60)
        assert first["epochs"] == second["epochs"]
    finally:
        launch.stop()


def test_a_command_waits_for_the_one_before_as_long_as_it_was_told(begin: Any) -> None:
    launch = begin()
    launch.pause()
    request, _ = launch._steered()
    with request.steering, pytest.raises(DeadlineError, match=r"Resume: another command has not ended within 0\.01 s"):
        launch.resume(timeout=0.01)
    launch.resume()
    launch.stop_after_epoch()


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20),
        lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
    ],
    ids=["lambda", "steps", "cosine", "linear"],
)
def test_schedules_go_on_by_the_same_factor(make: Any) -> None:
    def rates(factor_at: int | None) -> list[list[float]]:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.2, 0.3)]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        schedule = make(optimizer)
        found = []
        for step in range(12):
            if step == factor_at:
                before = optimizer.param_groups[0]["lr"]
                holder: Any = SimpleNamespace(scheduler=schedule)
                said = change_learning_rate(before / 2, [optimizer], [holder])  # type: ignore[list-item]
                assert float(said) == before
            optimizer.step()
            found.append([group["lr"] for group in optimizer.param_groups])
            schedule.step()
        return found

    plain, changed = rates(None), rates(3)
    assert changed[:3] == plain[:3]
    for now, before in zip(changed[3:], plain[3:], strict=True):
        assert now == pytest.approx([rate / 2 for rate in before], rel=1e-6)


def test_a_learning_rate_of_nothing_is_not_changed() -> None:
    with pytest.raises(ConfigError, match="no optimizer"):
        change_learning_rate(0.1, [], [])
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    with pytest.raises(ConfigError, match="it is 0 now"):
        change_learning_rate(0.1, [optimizer], [])


def _trains_nothing() -> None:
    while True:
        signal.pause()


def test_commands_that_training_did_not_come_to_say_so_at_its_end() -> None:
    launch = notebook_launcher(_trains_nothing, (), 2, block=False, progress="off", devices="cpu")
    assert isinstance(launch, Launch)
    request, world_size = launch._steered()
    assert request is not None
    said: list[str] = []
    buttons = {one.title: one for one in steering_actions(request, world_size, note=said.append, say=said.append)}
    assert not any(button.can() for button in buttons.values())
    threads: list[Any] = [buttons[title].do() for title in ("Save", "Stop after epoch", "Pause")]
    launch.stop()
    for thread in threads:
        thread.join(20.0)
    assert len(said) == 3
    assert all("had no effect" in line or "has ended already" in line for line in said)
    with pytest.raises(LaunchError, match=r"^stop after epoch: the launch has ended already"):
        launch.stop_after_epoch()
    late: Any = buttons["Save"].do()
    late.join(20.0)
    assert said[-1].startswith("save: the launch has ended already")


def test_training_that_can_be_steered_is_not_kept_in_memory() -> None:
    context.reset()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    prepared = accelerator.prepare(model, optimizer, schedule)
    kept = [weakref.ref(one) for one in (accelerator, model, *prepared)]
    del accelerator, model, optimizer, schedule, prepared
    gc.collect()
    assert [one() for one in kept] == [None] * 5
    context.reset()


def test_what_is_no_learning_rate_is_refused_before_it_is_sent() -> None:
    class NotStarted(Launch):
        def __init__(self) -> None: ...

    for rate in (0, -1.0, float("nan"), float("inf"), True, "0.1"):
        with pytest.raises(ConfigError, match="is not a learning rate"):
            NotStarted().set_learning_rate(rate)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="too long"):
        NotStarted().save_checkpoint("x" * 500 + os.sep)

"""Training that runs saves a checkpoint, and ends after its epoch, when the notebook asks; all ranks at one point."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate.base.progress_page import PageReader, here, layout
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.errors import CheckpointError, ConfigError, DeadlineError, LaunchError
from nb_accelerate.notebook.launch import Launch, notebook_launcher
from nb_accelerate.notebook.ranks.steerable import steering_actions
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context


def _train(project: str | None, kind: str) -> tuple[int, int]:
    """Train until it is told to stop, and return the epochs and the steps."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from nb_accelerate.training.accelerator import Accelerator

    accelerator = Accelerator(cpu=True, project_dir=project)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(64.0).reshape(16, 4) / 64, torch.ones(16, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    steps = 0
    most = 10**6
    loop: Iterable[tuple[int, Iterable[Any]]]
    if kind == "resumable":
        loop = accelerator.resumable(loader, most)
    else:
        loop = ((epoch, loader) for epoch in (accelerator.epochs(most) if kind == "epochs" else range(most)))
    for epoch, batches in loop:  # noqa: B007
        for inputs, targets in batches:
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return epoch + 1, steps


@pytest.fixture
def begin() -> Iterator[Any]:
    """Return a function that launches training in the background."""
    launched: list[Launch] = []

    def launch(function: Any, *args: Any, ranks: int = 2, **options: Any) -> Launch:
        made = notebook_launcher(function, args, ranks, block=False, progress="off", devices="cpu", **options)
        assert isinstance(made, Launch)
        launched.append(made)
        return made

    yield launch
    for one in launched:
        one.stop()


@pytest.mark.contract("training: stopped and saved from the notebook")
@pytest.mark.parametrize("kind", ["epochs", "resumable"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_save_and_stop_at_one_point(begin: Any, tmp_path: Path, kind: str, ranks: int) -> None:
    launch = begin(_train, str(tmp_path), kind, ranks=ranks)
    first, second = launch.save_checkpoint(), launch.save_checkpoint()  # the first comes before the ranks have begun
    assert (first, second) == (tmp_path / "checkpoints" / "checkpoint_0", tmp_path / "checkpoints" / "checkpoint_1")
    steps = [json.loads((saved / "checkpoint.json").read_text())["global_step"] for saved in (first, second)]
    assert kind == "epochs" or 0 < steps[0] < steps[1]
    launch.stop_after_epoch()
    found = launch.result(60)
    epochs, taken = found[0]
    assert found == [(epochs, taken)] * ranks
    assert taken == epochs * 8 // ranks, "epochs are whole"
    with pytest.raises(LaunchError, match="has ended already"):
        launch.save_checkpoint()
    with pytest.raises(LaunchError, match="has ended already"):
        launch.stop_after_epoch()


def test_what_cannot_be_saved_is_raised_and_training_goes_on(begin: Any) -> None:
    launch = begin(_train, None, "epochs")
    with pytest.raises(CheckpointError, match="need a folder"):
        launch.save_checkpoint()
    launch.stop_after_epoch()
    assert launch.result(60)[0][0] > 0


def test_a_loop_that_cannot_be_steered_says_how_to_write_it(begin: Any) -> None:
    launch = begin(_train, None, "plain")
    with pytest.raises(ConfigError, match=r"accelerator\.epochs\(3\)"):
        launch.stop_after_epoch()


def test_a_command_between_two_attempts_is_for_the_second(begin: Any) -> None:
    def train() -> int:
        import os

        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("the first attempt")
        return _train(None, "epochs")[0]

    launch = begin(train, max_restarts=1)
    launch.stop_after_epoch()
    assert len({*launch.result(60)}) == 1


def _with_uneven_batches(project: str, kind: str) -> int:
    import torch
    from torch.utils.data import DataLoader

    from nb_accelerate import ProjectConfiguration
    from nb_accelerate.training.accelerator import Accelerator

    config = ProjectConfiguration(project, save_every="5 steps")
    accelerator = Accelerator(cpu=True, project_config=config)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.ones(5, 1)))
    batches = 0

    def train(epoch: Iterable[Any]) -> None:
        nonlocal batches
        for inputs in epoch:
            accelerator.backward(model(inputs).sum())
            batches += 1

    if kind == "epochs inside":
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for _ in accelerator.epochs(2):
                train(loader)
    elif kind == "resumable inside":
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for _, epoch in accelerator.resumable(loader, 2):
                train(epoch)
    else:
        for _, epoch in accelerator.resumable(loader, 2):
            with accelerator.join_uneven_inputs([model], even_batches=False):
                train(epoch)
    return batches


def test_ranks_with_uneven_batches_ask_each_other_only_where_they_are_together(begin: Any, tmp_path: Path) -> None:
    assert begin(_with_uneven_batches, str(tmp_path / "epochs"), "epochs inside").result(60) == [6, 4]
    assert begin(_with_uneven_batches, str(tmp_path / "resumable"), "resumable outside").result(60) == [6, 4]
    saved = sorted((tmp_path / "resumable" / "checkpoints").iterdir())
    assert [json.loads((one / "checkpoint.json").read_text())["global_step"] for one in saved] == [6]
    with pytest.raises(ConfigError, match="join_uneven_inputs"):
        begin(_with_uneven_batches, str(tmp_path / "refused"), "resumable inside").result(60)


def _stays_in_its_first_epoch(begun: Path) -> None:
    from nb_accelerate.training.accelerator import Accelerator

    for _ in Accelerator(cpu=True, project_dir="nowhere").epochs(3):
        begun.open("w").close()
        signal.pause()


def test_who_waits_for_a_checkpoint_learns_that_it_does_not_come(begin: Any, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    launch = begin(_stays_in_its_first_epoch, begun, ranks=1)
    with begun.open():  # by a rank too: it is in the loop
        pass
    with pytest.raises(DeadlineError, match=r"to save within 0\.5"):
        launch.save_checkpoint(timeout=0.5)
    with pytest.raises(DeadlineError, match="begun no loop"):
        begin(signal.pause).stop_after_epoch(timeout=0.5)


def test_buttons_are_there_while_a_loop_obeys_and_what_comes_later_is_refused() -> None:
    page = PageReader()
    said: list[str] = []
    done = SimpleNamespace(is_set=lambda: False)
    request: Any = SimpleNamespace(ranks=[SimpleNamespace(handle=SimpleNamespace(page=page))], done=done)
    save, stop = steering_actions(request, said.append)

    def obeys(loop: int) -> list[bool]:
        page.write(
            [(8 * word, value.to_bytes(8, "little")) for word, value in ((layout.REQUEST, 1), (layout.OBEYS, loop))]
        )
        return [save.can(), stop.can()]

    assert [obeys(loop) for loop in (0, 1, 2, 0)] == [[False, False], [False, True], [True, True], [False, False]]
    save.do()
    stop.do()
    assert ["has no loop" in one for one in said] == [True, True]
    assert page.copy()[8 * layout.SAVE : 8 * layout.OBEYS] == bytes(16), "nothing is asked of the next cell"
    obeys(2)
    stop.do()
    assert ["ends after this" in one for one in said[2:]] == [True]
    page.close()
    assert [save.can(), stop.can()] == [False, False]


def test_that_a_loop_over_epochs_was_ended_before_its_last_is_noted(tmp_path: Path) -> None:
    context.reset()
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    _, loader = accelerator.prepare(torch.nn.Linear(2, 1), data)

    def ends(epochs: Iterable[object], at: int) -> tuple[int, int] | None:
        here().begin_request()
        for number, _ in enumerate(epochs, start=1):
            accelerator.core.steering.stops = number == at
        return read(here().buffer).ended_after

    assert ends(accelerator.epochs(25), 1) == (1, 25)
    assert ends(accelerator.epochs(25, start=4), 2) == (6, 25)
    assert ends(accelerator.epochs(3), 3) is None, "nothing was left to train"
    assert ends(accelerator.epochs(3), 0) is None
    assert ends(accelerator.resumable(loader, epochs=3), 2) == (2, 3)
    here().begin_request()
    context.reset()

"""Checkpoints that nobody forgets: saved by themselves, in the background too, and gone on from."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.ranks import RunRanks
from torch import nn

import nb_accelerate
from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.base.config.project import ProjectConfiguration, SaveInterval
from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.checkpoint import manifest
from nb_accelerate.training.checkpoint.background import saves


@pytest.fixture(autouse=True)
def _no_save_is_left():
    yield
    saves.close()


class Killed(Exception):
    """Stands for the end of a process."""


def _run(
    where: Path,
    *,
    die_after: int | None = None,
    stateful: bool = False,
    seedable: bool = False,
    resume: bool | None = None,
    **options: Any,
) -> list[Any]:
    """Train for three epochs of 6 steps; return the step, rows and loss of each, and what was drawn after epochs."""
    torch.manual_seed(1)
    configuration = DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=seedable)
    project = ProjectConfiguration(where, **options)
    accelerator = Accelerator(
        cpu=True, project_config=project, dataloader_config=configuration, gradient_accumulation_steps=2
    )
    batch_size = 4 // accelerator.num_processes
    data = torch.utils.data.TensorDataset(torch.arange(24.0)[:, None])
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=True),
    )
    seen: list[Any] = []
    try:
        for epoch, batches in accelerator.resumable(loader, 3, resume=resume):
            for (rows,) in batches:
                with accelerator.accumulate(model):
                    loss = model(rows).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.log({"loss": loss.item()})
                seen.append((rows.flatten().tolist(), loss.item()))
                if len(seen) == die_after:
                    raise Killed
            seen.append((f"after epoch {epoch}", torch.rand(1).item()))
    except Killed:
        pass
    accelerator.free_memory()
    return seen


@pytest.mark.contract("checkpoints: runs go on by themselves")
@pytest.mark.parametrize(
    ("every", "stateful", "deaths"),
    [
        ("1 step", False, (8,)),
        ("4 steps", True, (13,)),
        ("1 epoch", False, (8,)),
        *(
            pytest.param(every, stateful, (1, 5, 7, 8, 13, 19), marks=pytest.mark.slow)
            for every in ("1 step", "4 steps", "1 epoch")
            for stateful in (False, True)
        ),
    ],
)
def test_a_run_that_ends_anywhere_goes_on_with_the_batch_after_the_checkpoint(
    tmp_path: Path, every: str, stateful: bool, deaths: tuple[int, ...]
):
    whole = _run(tmp_path / "whole", stateful=stateful)
    for die_after in deaths:
        where = tmp_path / f"{die_after}"
        first = _run(where, die_after=die_after, save_every=every, total_limit=2, stateful=stateful)
        rest = _run(where, save_every=every, total_limit=2, stateful=stateful)
        assert first == whole[: len(first)]
        assert rest == whole[len(whole) - len(rest) :]
        assert len(first) + len(rest) >= len(whole)
        if every == "1 step":  # and a window of two batches
            assert len(first) + len(rest) <= len(whole) + 3
        assert _run(where, save_every=every, stateful=stateful) == []  # it is over


def test_a_run_of_which_nothing_is_saved_is_warned_of_after_its_first_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    _run(tmp_path / "saved", save_every="1 epoch")
    assert "no checkpoint was saved" not in caplog.text
    _run(tmp_path / "not saved")
    assert caplog.text.count("resumable could go") == 1


def test_a_run_says_where_it_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    options: dict[str, Any] = {"save_every": "2 steps", "die_after": 10}
    _run(tmp_path, **options)
    assert caplog.text == ""
    _run(tmp_path / "other", **options, resume=True)
    nothing = f"There is no checkpoint in {tmp_path / 'other' / 'checkpoints'} to go on from: training begins with the"
    assert [nothing in record.message for record in caplog.records] == [True]
    caplog.clear()
    _run(tmp_path, save_every="2 steps")
    folder = tmp_path / "checkpoints" / "checkpoint_3"
    assert [record.message for record in caplog.records] == [
        f"Training goes on from {folder}, with epoch 2 of 3 after its batch 2."
    ]
    caplog.clear()
    _run(tmp_path / "epochs", save_every="2 epochs", die_after=15)
    _run(tmp_path / "epochs", save_every="2 epochs")
    assert "checkpoint_0, with epoch 3 of 3.\n" in caplog.text
    assert _run(tmp_path / "epochs", save_every="1 epoch") == []
    assert "epoch 3, and epochs=3: nothing" in caplog.text


def test_the_main_process_alone_says_where_a_run_begins(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    for _ in range(2):
        run = nb_accelerate.notebook_launcher(
            _saves_and_fails_once, (str(tmp_path),), 2, progress="off", start_method="forkserver", resume=True
        )
    assert list(run) == [0, 0]
    shown = capfd.readouterr().err
    assert shown.count("no checkpoint") == 1
    assert shown.count("left to train") == 1


def _saves_and_fails_once(where: str, hours: int = 0, after: int = 0) -> int:
    """Train for 4 steps, on two ranks, with a clock that is wrong; fail after a step if a file says so."""
    _set_clock(hours)
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(where, save_every="1 epoch"))
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(torch.ones(4, 1))
    )
    steps = 0
    for _, batches in accelerator.resumable(loader, 2):
        for rows in batches:
            if steps == after and Path(where, "fail").exists():
                accelerator.wait_for_everyone()
                Path(where, "fail").unlink(missing_ok=True)
                raise RuntimeError("a failure")
            accelerator.backward(model(rows).sum())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps


def _set_clock(hours: int) -> None:
    """Have checkpoints say that they were saved so many hours later."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(hours=hours)

    manifest.datetime = Clock  # type: ignore[misc]


def test_ranks_that_are_started_again_go_on_from_no_checkpoint_of_an_earlier_run(tmp_path: Path):
    def launch(**options: Any) -> list[int]:
        run = nb_accelerate.notebook_launcher(
            _saves_and_fails_once, (str(tmp_path),), 2, progress="off", start_method="forkserver", **options
        )
        return list(run)

    assert launch() == [4, 4]
    (tmp_path / "fail").touch()
    assert launch(max_restarts=1) == [4, 4]  # not [0, 0], from the end of the run before
    assert launch(max_restarts=1, resume=True) == [0, 0]


@pytest.mark.parametrize(("before", "now", "after"), [(1, 0, 0), (0, -1, 2)])
def test_no_clock_says_which_checkpoints_are_those_of_a_launch(tmp_path: Path, before: int, now: int, after: int):
    def launch(hours: int, max_restarts: int = 0) -> list[int]:
        return list(
            nb_accelerate.notebook_launcher(
                _saves_and_fails_once,
                (str(tmp_path), hours, after),
                2,
                progress="off",
                start_method="forkserver",
                max_restarts=max_restarts,
            )
        )

    launch(before)
    for path in tmp_path.rglob("*"):
        os.utime(path, (time.time() + 3600 * before,) * 2)
    (tmp_path / "fail").touch()
    assert launch(now, 1) == [4 - after] * 2  # not from the end of the run before, nor from the beginning


def test_ranks_that_have_joined_later_go_on_with_the_run_that_they_join(run_ranks: RunRanks, tmp_path: Path):
    def run(where: str, attempt: int) -> list[Any]:
        os.environ |= {"NB_ACCELERATE_RESUME": "0", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        # The second time, the first of the machines is gone and another has joined.
        os.environ["NB_ACCELERATE_LAUNCH"] = f"of machine {int(os.environ['RANK']) + attempt}"
        return _run(Path(where), save_every="1 epoch")

    assert all(run_ranks(run, str(tmp_path), 0))
    assert run_ranks(run, str(tmp_path), 1) == [[], []]


def test_a_run_that_begins_anew_keeps_checkpoints_of_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def there() -> list[str]:
        return sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())

    options: dict[str, Any] = {"save_every": "1 epoch", "total_limit": 2}
    _run(tmp_path, **options)
    assert there() == ["checkpoint_1", "checkpoint_2"]
    assert "earlier run" not in caplog.text
    first = _run(tmp_path, **options, resume=False, die_after=15)
    assert there() == ["checkpoint_1", "checkpoint_2", "checkpoint_3", "checkpoint_4"]
    assert "checkpoint_2. This run begins" in caplog.text
    rest = _run(tmp_path, **options)  # it goes on with the second one, and is that run from there on
    assert first[:14] + rest == _run(tmp_path / "whole")
    assert there() == ["checkpoint_4", "checkpoint_5"]


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_a_run_on_another_number_of_ranks_goes_on_with_the_rows_that_are_left(
    run_ranks: RunRanks, tmp_path: Path, before: int, after: int
):
    def run(where: str, die_after: int | None) -> list[Any]:
        from training.checkpoint.test_checkpoints_resumed import _run

        return _run(Path(where), die_after=die_after, save_every="1 step", resume=True, seedable=True)

    def rows(of_ranks: list[list[Any]]) -> list[Any]:
        steps = zip(*([rows for rows, _ in one if isinstance(rows, list)] for one in of_ranks), strict=True)
        return [[row for rows in step for row in rows] for step in steps]

    whole = rows([_run(tmp_path / "whole", seedable=True)])  # dropout on other ranks would draw other orders
    first = rows(run_ranks(run, str(tmp_path / "run"), 10, world_size=before))  # with what was drawn after an epoch
    rest = rows(run_ranks(run, str(tmp_path / "run"), None, world_size=after))
    assert first == whole[:9]
    assert rest == whole[8:]  # the ninth was in the middle of an accumulation window


def test_a_run_whose_steps_have_other_sizes_is_told_that_rows_would_come_twice(tmp_path: Path):
    def loader(accelerator: Accelerator, batch_size: int) -> Any:
        return accelerator.prepare(torch.utils.data.DataLoader(torch.arange(24.0), batch_size=batch_size))

    numbered = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=numbered)
    for _, batches in accelerator.resumable(loader(accelerator, 4), 1):
        next(batches)
        accelerator.save_state()
    for batch_size, left in ((2, 10), (5, None)):
        accelerator = Accelerator(cpu=True, project_dir=tmp_path)
        accelerator.free_memory()
        if left is None:
            with pytest.raises(CheckpointError, match=r"4 rows, .*reads 5"):
                accelerator.resumable(loader(accelerator, batch_size), 1)
        else:
            assert [len(list(batches)) for _, batches in accelerator.resumable(loader(accelerator, batch_size), 1)] == [
                left
            ]


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("every", ["1 epoch", "1 step"])
def test_a_run_that_leaves_its_epochs_early_goes_on_with_the_next_one(tmp_path: Path, every: str, stateful: bool):
    def run(where: str, epochs: int) -> list[Any]:
        configuration = DataLoaderConfiguration(use_stateful_dataloader=stateful)
        project = ProjectConfiguration(tmp_path / where, save_every=every)
        accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=configuration)
        accelerator.free_memory()
        torch.manual_seed(1)
        data = torch.utils.data.TensorDataset(torch.arange(24.0))
        loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
        seen: list[Any] = []
        for epoch, batches in accelerator.resumable(loader, epochs):
            for number, (rows,) in enumerate(batches):
                seen.append((epoch, rows.tolist()))
                if number == 1:
                    break
        return [*seen, accelerator.core.registry.progress.global_step]

    whole = run("whole", 3)
    assert whole[-1] == 6
    assert [*run("run", 2)[:-1], *run("run", 3)] == whole
    assert run("run", 3) == [6]


@pytest.mark.parametrize("stateful", [False, True])
def test_a_save_by_hand_and_one_that_was_due_note_the_same_step(tmp_path: Path, stateful: bool):
    def run(where: str, saves_at: int | None = None) -> list[float]:
        configuration = DataLoaderConfiguration(use_stateful_dataloader=stateful)
        project = ProjectConfiguration(tmp_path / where, save_every="2 steps")
        accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=configuration)
        accelerator.free_memory()
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(4.0)))
        seen: list[float] = []
        for _, batches in accelerator.resumable(loader, 2):
            for rows in batches:
                seen += rows.tolist()
                if len(seen) == saves_at:
                    folder = tmp_path / where / "checkpoints" / f"by hand {saves_at}"
                    accelerator.save_state(folder)
                    return seen
        return seen

    for step, place in ((2, (0, 2)), (4, (1, 0)), (5, (1, 1))):
        run(f"{step}", saves_at=step)
        *due, by_hand = nb_accelerate.checkpoints(tmp_path / f"{step}")
        assert [one.step for one in due] == [2, 4][: (step - 1) // 2]
        assert (by_hand.step, by_hand.epoch) == (step, place)
        by_hand.folder.rename(by_hand.folder.with_name("checkpoint_9"))
        assert len(run(f"{step}")) == 8 - step


def test_a_loop_that_nobody_counts_saves_checkpoints_without_a_step(tmp_path: Path):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path / "counted")
    accelerator.free_memory()
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(4.0)))
    accelerator.save_state(tmp_path / "before")
    for _, batches in accelerator.resumable(loader, 1):
        list(batches)
    accelerator.save_state(tmp_path / "after")
    accelerator.load_state(tmp_path / "after")
    list(loader)
    accelerator.save_state(tmp_path / "uncounted")
    found = {one.folder.name: one.cells()[1] for one in nb_accelerate.checkpoints(tmp_path)}
    assert found == {"before": "-", "after": "4", "uncounted": "-"}


@pytest.mark.parametrize(
    ("shuffle", "now", "left"), [(True, 28, None), (False, 20, None), (False, 28, 6), (True, 24, 5)]
)
def test_a_dataset_of_another_length_is_told_in_the_middle_of_an_epoch(
    tmp_path: Path, shuffle: bool, now: int, left: int | None
):
    def resumed(rows: int) -> Any:
        numbered = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=numbered)
        accelerator.free_memory()
        data = torch.utils.data.TensorDataset(torch.arange(float(rows)))
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=shuffle)
        return accelerator, accelerator.resumable(accelerator.prepare(loader), 1)

    accelerator, epochs = resumed(24)
    for _, batches in epochs:
        next(batches)
        accelerator.save_state()
        break
    if left is None:
        with pytest.raises(CheckpointError, match=f"24 rows, .* {now} now"):
            resumed(now)
    else:
        assert [len(list(batches)) for _, batches in resumed(now)[1]] == [left]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500 steps", (500, "steps")),
        (7, (7, "steps")),
        ("10 min", (600, "seconds")),
        ("0.5h", (1800, "seconds")),
        ("1 Epoch", (1, "epochs")),
        ("0 steps", None),
        ("1.5 epochs", None),
        ("often", None),
        ("10 parsecs", None),
        (True, None),
    ],
)
def test_intervals(text: Any, expected: tuple[float, str] | None):
    if expected is None:
        with pytest.raises(ConfigError, match="'500 steps', '10 min'"):
            ProjectConfiguration(save_every=text)
    else:
        assert SaveInterval.parse(text) == SaveInterval(*expected)


def test_the_best_stay_and_the_last_one(tmp_path: Path):
    project = ProjectConfiguration(
        tmp_path, automatic_checkpoint_naming=True, total_limit=3, keep="best", monitor="accuracy", mode="max"
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(1, 1))
    for accuracy in (0.5, np.float32(0.875), 0.8, 0.2, 0.3):
        accelerator.log({"accuracy": accuracy})
        accelerator.save_state()
    found = nb_accelerate.checkpoints(tmp_path)
    assert [one.metrics["accuracy"] for one in found] == [0.875, 0.8, 0.3]
    accelerator.load_state("latest")
    assert accelerator.core.registry.progress.metrics == {"accuracy": 0.3}


def test_sums_that_are_set_to_zero_after_they_were_logged_are_noted_as_logged(tmp_path: Path):
    accelerator = Accelerator(cpu=True)
    total = torch.tensor(2.5)
    accelerator.log({"loss": total, "complex": torch.tensor(1j), "meta": torch.zeros((), device="meta")})
    total.zero_()
    accelerator.save_state(tmp_path / "state")
    assert nb_accelerate.checkpoints(tmp_path / "state")[0].metrics == {"loss": 2.5}


@pytest.mark.gpu
def test_numbers_on_a_gpu_are_noted_without_waiting_for_it(tmp_path: Path):
    accelerator = Accelerator()
    total = torch.tensor(2.5, device=accelerator.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        accelerator.log({"loss": total})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    total.zero_()
    accelerator.save_state(tmp_path / "state")
    assert nb_accelerate.checkpoints(tmp_path / "state")[0].metrics == {"loss": 2.5}


def test_a_table_of_checkpoints_needs_no_torch_and_says_what_is_damaged(tmp_path: Path):
    _run(tmp_path, save_every="6 steps")
    (tmp_path / "checkpoints" / "checkpoint_1" / "optimizer.bin").write_bytes(b"")
    weights = tmp_path / "checkpoints" / "checkpoint_0" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    program = (
        "import sys, nb_accelerate\n"
        "found = nb_accelerate.checkpoints(sys.argv[1])\n"
        "print(found)\n"
        "print([one.is_whole for one in nb_accelerate.checkpoints(sys.argv[1], read=True)], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    head, first, second, third, last = done.stdout.splitlines()
    assert re.split("  +", head) == ["checkpoint", "step", "saved after", "saved at", "size", "logged last", "whole"]
    assert re.split("  +", first)[:3] == ["checkpoint_0", "6", "epoch 1"]
    assert " kB  " in first
    assert first.endswith("yes")
    assert "no: " in second
    assert "optimizer.bin has 0 bytes" in second
    assert re.split("  +", third)[1:3] == ["18", "epoch 3"]
    assert last == "[False, False, True] False"
    assert nb_accelerate.checkpoints(tmp_path)._repr_html_().count("<tr>") == 4
    with pytest.raises(ConfigError, match="no folder"):
        nb_accelerate.checkpoints(tmp_path / "nowhere")


def test_a_table_of_checkpoints_counts_from_1_and_has_what_was_logged_last(tmp_path: Path):
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(30.0)))
    accelerator.save_state()
    for epoch in range(3):
        for number, _ in enumerate(loader, start=1):
            if (epoch, number) == (2, 22):
                accelerator.log({"accuracy": 0.5})
                accelerator.save_state()
        if epoch == 1:
            accelerator.save_state()
    accelerator.log({"train_loss": 0.25})
    accelerator.save_state()
    places = [re.split("  +", line)[2] for line in str(nb_accelerate.checkpoints(tmp_path)).splitlines()]
    assert places == ["saved after", "the beginning", "epoch 2", "epoch 3, batch 22", "epoch 3"]
    logged = [one.cells()[5] for one in nb_accelerate.checkpoints(tmp_path)]
    assert logged == ["", "", "accuracy 0.5", "train_loss 0.25"]


def test_a_signal_saves_a_checkpoint_and_then_does_what_it_did_before(tmp_path: Path):
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        project = ProjectConfiguration(tmp_path, save_on_signal="SIGUSR1")
        accelerator = Accelerator(cpu=True, project_config=project)
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8.0)))

        def train() -> None:
            for _, batches in accelerator.resumable(loader, 2):
                for number, _ in enumerate(batches):
                    if number == 2:
                        os.kill(os.getpid(), signal.SIGUSR1)

        with pytest.raises(SystemExit) as caught:
            train()
        assert caught.value.code == 128 + signal.SIGUSR1
        assert received == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [one.epoch for one in nb_accelerate.checkpoints(tmp_path)] == [(0, 3)]

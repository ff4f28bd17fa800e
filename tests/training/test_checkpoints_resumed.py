"""Checkpoints that nobody forgets: saved by themselves, in the background too, and gone on from."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.panels import LOOK, Run
from fixtures.ranks import RunRanks
from torch import nn

import nb_accelerate
from nb_accelerate.accelerator import Accelerator
from nb_accelerate.checkpoint import state
from nb_accelerate.checkpoint.background import StoreExchange, saves
from nb_accelerate.checkpoint.host_copies import HostCopies
from nb_accelerate.config.loader import DataLoaderConfiguration
from nb_accelerate.config.project import ProjectConfiguration, SaveInterval
from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.process import context, group
from nb_accelerate.progress_page import Phase, here, layout, page
from nb_accelerate.progress_page.sample import read
from nb_accelerate.strategies.parts import OptimizerPart


@pytest.fixture(autouse=True)
def _forget():
    context.reset()
    yield
    saves.close()
    group.close()


class Killed(Exception):
    """Stands for the end of a process."""


def _run(
    where: Path,
    *,
    die_after: int | None = None,
    stateful: bool = False,
    resume: bool | None = None,
    **options: Any,
) -> list[Any]:
    """Train for three epochs of 6 steps; return the step, rows and loss of each, and what was drawn after epochs."""
    torch.manual_seed(1)
    configuration = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=stateful)
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


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_a_run_on_another_number_of_ranks_goes_on_with_the_rows_that_are_left(
    run_ranks: RunRanks, tmp_path: Path, before: int, after: int
):
    def run(where: str, die_after: int | None) -> list[Any]:
        from training.test_checkpoints_resumed import _run

        return _run(Path(where), die_after=die_after, save_every="1 step", resume=True)

    def rows(of_ranks: list[list[Any]]) -> list[Any]:
        steps = zip(*([rows for rows, _ in one if isinstance(rows, list)] for one in of_ranks), strict=True)
        return [[row for rows in step for row in rows] for step in steps]

    whole = rows([_run(tmp_path / "whole")])
    first = rows(run_ranks(run, str(tmp_path / "run"), 10, world_size=before))  # with what was drawn after an epoch
    rest = rows(run_ranks(run, str(tmp_path / "run"), None, world_size=after))
    assert first == whole[:9]
    assert rest == whole[8:]  # the ninth was in the middle of an accumulation window


def test_a_run_whose_steps_have_other_sizes_is_told_that_rows_would_come_twice(tmp_path: Path):
    def loader(accelerator: Accelerator, batch_size: int) -> Any:
        return accelerator.prepare(torch.utils.data.DataLoader(torch.arange(24.0), batch_size=batch_size))

    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    for _, batches in accelerator.resumable(loader(accelerator, 4), 1):
        next(batches)
        accelerator._save_numbered()
    for batch_size, left in ((2, 10), (5, None)):
        accelerator = Accelerator(cpu=True, project_dir=tmp_path)
        accelerator.free_memory()
        if left is None:
            with pytest.raises(
                CheckpointError, match=r"after 1 batches of 4 rows, 4 in all, .* reads 5 rows at a time"
            ):
                accelerator.resumable(loader(accelerator, batch_size), 1)
        else:
            assert [len(list(batches)) for _, batches in accelerator.resumable(loader(accelerator, batch_size), 1)] == [
                left
            ]


def test_an_order_that_cannot_be_drawn_again_is_refused_before_training(tmp_path: Path):
    project = ProjectConfiguration(tmp_path, save_every="5 steps")
    accelerator = Accelerator(cpu=True, project_config=project)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8.0), shuffle=True))
    with pytest.raises(ConfigError, match="use_seedable_sampler=True"):
        accelerator.resumable(loader, 1)
    project.save_every = "1 epoch"
    assert len(list(accelerator.resumable(loader, 1))) == 1


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
        with pytest.raises(ConfigError, match="'500 steps', '10 min', '1 epoch'"):
            ProjectConfiguration(save_every=text)
    else:
        assert SaveInterval.parse(text) == SaveInterval(*expected)


def test_the_best_stay_and_the_last_one(tmp_path: Path):
    project = ProjectConfiguration(
        tmp_path, automatic_checkpoint_naming=True, total_limit=3, keep="best", monitor="accuracy", mode="max"
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(1, 1))
    for accuracy in (0.5, 0.9, 0.8, 0.2, 0.3):
        accelerator.log({"accuracy": accuracy})
        accelerator.save_state()
    found = nb_accelerate.checkpoints(tmp_path)
    assert [one.metrics["accuracy"] for one in found] == [0.9, 0.8, 0.3]
    accelerator.load_state("latest")
    assert accelerator.core.registry.progress.metrics == {"accuracy": 0.3}


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
    assert head.split() == ["checkpoint", "step", "epoch", "saved", "size", "loss", "whole"]
    assert first.split()[:3] == ["checkpoint_0", "6", "1"]
    assert first.endswith("yes")
    assert "no: " in second
    assert "optimizer.bin has 0 bytes" in second
    assert third.split()[1:3] == ["18", "3"]
    assert last == "[False, False, True] False"
    assert nb_accelerate.checkpoints(tmp_path)._repr_html_().count("<tr>") == 4
    with pytest.raises(ConfigError, match="no folder"):
        nb_accelerate.checkpoints(tmp_path / "nowhere")


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


# --- In the background -------------------------------------------------------------------------------------------


def _filled(value: float) -> tuple[Accelerator, nn.Linear, Any]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(nn.Linear(300, 300), torch.optim.AdamW([torch.zeros(1)]))
    plain = accelerator.unwrap_model(model)
    with torch.no_grad():
        plain.weight.fill_(value)
    return accelerator, plain, optimizer


def test_what_is_saved_in_the_background_is_what_was_there_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    may_write = threading.Event()
    write = state.StateWriter.write

    def write_later(*args: Any) -> Any:
        assert may_write.wait(30)
        return write(*args)

    monkeypatch.setattr(state.StateWriter, "write", write_later)
    accelerator, model, _ = _filled(1.0)
    handle = accelerator.save_state(tmp_path / "state", async_save=True)
    assert not handle.done()
    with pytest.raises(TimeoutError, match="goes on"):
        handle.wait(0.01)
    model.weight.data.fill_(2.0)
    drawn = torch.rand(3)
    may_write.set()
    assert handle.wait() == tmp_path / "state"
    assert handle.done()
    assert accelerator.wait_for_checkpoint() == tmp_path / "state"
    assert accelerator.wait_for_checkpoint() is None
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.weight, torch.ones(300, 300))
    assert torch.equal(torch.rand(3), drawn)


def test_an_error_in_the_background_is_raised_once_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    accelerator, model, _ = _filled(1.0)
    accelerator.save_state(tmp_path / "state", async_save=True).wait()
    with monkeypatch.context() as patch:
        patch.setattr(state, "write", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        accelerator.save_state(tmp_path / "state", async_save=True)
        with pytest.raises(OSError, match="No space"):
            accelerator.save_state(tmp_path / "state")
    assert sorted(os.listdir(tmp_path)) == ["state"]
    model.weight.data.fill_(2.0)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.weight, torch.ones(300, 300))


def test_ranks_that_save_in_the_background_all_learn_how_it_ended(run_ranks: RunRanks, tmp_path: Path):
    def save(where: str) -> Any:
        import torch
        from training.test_checkpoints_resumed import _filled

        from nb_accelerate.checkpoint import state

        accelerator, model, _ = _filled(1.0)
        handle = accelerator.save_state(where, async_save=True)
        accelerator.reduce(torch.ones(1))  # collectives of the training go on meanwhile
        handle.wait()
        told = []
        write = state.write
        if accelerator.process_index == 1:
            state.write = lambda *_, **__: (_ for _ in ()).throw(ZeroDivisionError("on purpose"))
        accelerator.save_state(where, async_save=True)
        try:
            accelerator.wait_for_checkpoint()
        except (CheckpointError, ZeroDivisionError) as error:
            told.append(str(error))
        state.write = write
        model.weight.data.fill_(3.0)
        accelerator.load_state(where)
        # The end of the function waits for the last one.
        accelerator.save_state(f"{where}/last", async_save=True)
        return told, model.weight.mean().item(), accelerator.core.registry.copies.num_bytes

    first, second = run_ranks(save, str(tmp_path / "state"))
    assert first[:2] == (["on rank 1: ZeroDivisionError: on purpose"], 1.0)
    assert second[:2] == (["on purpose"], 1.0)
    assert first[2] > second[2]  # one rank writes the weights
    assert nb_accelerate.checkpoints(tmp_path / "state" / "last")[0].is_whole


def test_buffers_are_used_again_and_tied_tensors_stay_tied(caplog: pytest.LogCaptureFixture):
    copies = HostCopies()
    tensor = torch.arange(6.0)
    tree = [{"a": tensor, "b": tensor, "c": tensor[2:]}, ("text", 3, [torch.ones(2, dtype=torch.int8)])]
    first = copies.copy(tree)
    assert first[0]["a"] is first[0]["b"]
    assert first[0]["a"].data_ptr() != tensor.data_ptr()
    assert torch.equal(first[0]["c"], tensor[2:])
    places = [one.data_ptr() for one in copies._buffers]
    tensor.add_(1)
    second = copies.copy(tree)
    assert [one.data_ptr() for one in copies._buffers] == places
    assert torch.equal(second[0]["a"], tensor)
    copies.copy([torch.ones(4)])
    assert copies.num_bytes == 16
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_second_signal_ends_a_process_that_had_no_handler(tmp_path: Path):
    program = (
        "import os, signal, sys, torch\n"
        "from nb_accelerate import Accelerator\n"
        "from nb_accelerate.config.project import ProjectConfiguration\n"
        "project = ProjectConfiguration(sys.argv[1], save_on_signal='SIGTERM')\n"
        "accelerator = Accelerator(cpu=True, project_config=project)\n"
        "loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8.0)))\n"
        "for _, batches in accelerator.resumable(loader, 1):\n"
        "    for _ in batches:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch):
    """Hold saves back until it is set."""
    may_write = threading.Event()
    write = state.StateWriter.write

    def write_later(*args: Any) -> Any:
        assert may_write.wait(30)
        return write(*args)

    monkeypatch.setattr(state.StateWriter, "write", write_later)
    yield may_write
    may_write.set()


def test_a_save_whose_wait_was_interrupted_is_still_waited_for(tmp_path: Path, held_back: threading.Event):
    accelerator, model, _ = _filled(1.0)
    accelerator.save_state(tmp_path / "state", async_save=True)
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        accelerator.wait_for_checkpoint()
    interrupt.join()
    model.weight.data.fill_(2.0)
    held_back.set()
    assert accelerator.wait_for_checkpoint() == tmp_path / "state"
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.weight, torch.ones(300, 300))


def test_the_panel_says_that_a_checkpoint_is_saved_in_the_background_as_long_as_it_is(
    tmp_path: Path, held_back: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    memory = bytearray(layout.SIZE)
    monkeypatch.setattr(page, "_page", page.ProgressPage(memory))
    here().begin_request()
    panel = Run(1)

    def now() -> str:
        panel.ranks[0] = replace(panel.ranks[0], sample=read(memory))
        panel.wait(LOOK)
        return panel.row(0).now

    accelerator, _, _ = _filled(1.0)
    here().enter(Phase.FORWARD)
    assert now() == "forward"
    handle = accelerator.save_state(tmp_path / "state", async_save=True)
    here().enter(Phase.FORWARD)
    assert now() == "forward, saving"
    held_back.set()
    handle.wait()
    assert now() == "forward"


def test_a_save_whose_thread_could_not_be_started_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    accelerator, _, _ = _filled(1.0)
    with monkeypatch.context() as refused:
        refused.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            accelerator.save_state(tmp_path / "state", async_save=True)
    assert accelerator.wait_for_checkpoint() is None
    assert not here()._words[layout.SAVES]  # or a launcher would wait for it
    assert os.listdir(tmp_path) == []


def test_a_process_that_was_forked_does_not_wait_for_the_save_of_the_other(tmp_path: Path, held_back: threading.Event):
    accelerator, _, _ = _filled(1.0)
    accelerator.save_state(tmp_path / "state", async_save=True)
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(0 if saves.join() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    held_back.set()
    assert accelerator.wait_for_checkpoint() == tmp_path / "state"


def test_only_the_copies_stay_in_memory_while_they_are_written(tmp_path: Path, held_back: threading.Event):
    accelerator, _, _ = _filled(1.0)
    handle = accelerator.save_state(tmp_path / "state", async_save=True)
    assert not [one for one in gc.get_objects() if type(one) is OptimizerPart]  # which holds what it gathered
    assert accelerator.core.registry.copies.num_bytes
    accelerator.free_memory()
    assert not accelerator.core.registry.copies.num_bytes
    held_back.set()
    handle.wait()
    assert nb_accelerate.checkpoints(tmp_path / "state", read=True)[0].is_whole


def test_a_function_that_leaves_by_exit_has_its_last_save_written(run_ranks: RunRanks, tmp_path: Path):
    def save(where: str) -> None:
        from training.test_checkpoints_resumed import _filled

        from nb_accelerate.checkpoint import state

        accelerator, _, _ = _filled(1.0)
        state.write = lambda *_, **__: (_ for _ in ()).throw(ZeroDivisionError("on purpose"))
        accelerator.save_state(where, async_save=True)
        sys.exit(0)

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        run_ranks(save, str(tmp_path / "state"))


def test_ranks_may_leave_their_group_while_they_save(run_ranks: RunRanks, tmp_path: Path):
    def save(where: str) -> bool:
        from training.test_checkpoints_resumed import _filled

        accelerator, _, _ = _filled(1.0)
        handle = accelerator.save_state(where, async_save=True)
        accelerator.end_training()
        return handle.done()

    assert run_ranks(save, str(tmp_path / "state")) == [True, True]


def test_what_is_planted_in_the_store_is_refused_and_never_run(run_ranks: RunRanks, tmp_path: Path):
    def exchange(ran: str) -> None:
        from training.test_checkpoints_resumed import _Planted

        torch.distributed.init_process_group("gloo")
        told = StoreExchange.open("a save")
        if told._rank == 1:
            told._store.set("0/1", pickle.dumps(_Planted(Path(ran))))
        else:
            with pytest.raises(CheckpointError, match="cannot be read"):
                told.gather(lambda: "written")
        torch.distributed.barrier()

    run_ranks(exchange, str(tmp_path / "ran"))
    assert not (tmp_path / "ran").exists()


class _Planted:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)

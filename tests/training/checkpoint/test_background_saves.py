"""Checkpoints that are written in the background, while training goes on."""

from __future__ import annotations

import gc
import logging
import os
import shutil
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
from nb_accelerate.base.config.project import ProjectConfiguration
from nb_accelerate.base.progress_page import Phase, here, layout, page
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.accelerator.checkpoint_parts import OptimizerPart
from nb_accelerate.training.checkpoint import state
from nb_accelerate.training.checkpoint.background import saves
from nb_accelerate.training.checkpoint.files import load_state_dict, write
from nb_accelerate.training.checkpoint.registry import HostCopies


@pytest.fixture(autouse=True)
def _no_save_is_left():
    yield
    saves.close()


def _filled(value: float) -> tuple[Accelerator, nn.Linear, Any]:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(nn.Linear(300, 300), torch.optim.AdamW([torch.zeros(1)]))
    plain = accelerator.unwrap_model(model)
    with torch.no_grad():
        plain.weight.fill_(value)
    return accelerator, plain, optimizer


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch):
    """Hold saves back until it is set."""
    may_write = threading.Event()
    write = state.write_content

    def write_later(*args: Any) -> Any:
        assert may_write.wait(30)
        return write(*args)

    monkeypatch.setattr(state, "write_content", write_later)
    yield may_write
    may_write.set()


def test_what_is_saved_in_the_background_is_what_was_there_when_it_was_asked_for(
    tmp_path: Path, held_back: threading.Event
):
    accelerator, model, _ = _filled(1.0)
    handle = accelerator.save_state(tmp_path / "state", async_save=True)
    assert not handle.done()
    with pytest.raises(TimeoutError, match="goes on"):
        handle.wait(0.01)
    model.weight.data.fill_(2.0)
    drawn = torch.rand(3)
    held_back.set()
    assert handle.wait() == tmp_path / "state"
    assert handle.done()
    assert accelerator.wait_for_checkpoint() == tmp_path / "state"
    assert accelerator.wait_for_checkpoint() is None
    accelerator.load_state(tmp_path / "state")
    assert model.weight.eq(1).all()
    assert torch.equal(torch.rand(3), drawn)


def test_an_error_in_the_background_is_raised_once_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    accelerator, model, _ = _filled(1.0)
    accelerator.save_state(tmp_path / "state", async_save=True).wait()
    with monkeypatch.context() as patch:
        patch.setattr(state, "write", _no_space)
        handle = accelerator.save_state(tmp_path / "state", async_save=True)
        assert handle._ended.wait(30)
        assert f"{tmp_path / 'state'} was not saved: " in caplog.text
        with pytest.raises(OSError, match="No space"):
            accelerator.save_state(tmp_path / "state")
        assert accelerator.wait_for_checkpoint() is None
    assert sorted(os.listdir(tmp_path)) == ["state"]
    model.weight.data.fill_(2.0)
    accelerator.load_state(tmp_path / "state")
    assert model.weight.eq(1).all()


def _no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.contract("checkpoints: in the background")
def test_ranks_that_save_in_the_background_all_learn_how_it_ended(run_ranks: RunRanks, tmp_path: Path):
    def save(where: str) -> Any:
        import torch
        from training.checkpoint.test_background_saves import _filled

        from nb_accelerate.training.checkpoint import state

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
    places = [one.data_ptr() for one in (first[0]["a"], first[1][2][0])]
    tensor.add_(1)
    second = copies.copy(tree)
    assert [one.data_ptr() for one in (second[0]["a"], second[1][2][0])] == places
    assert torch.equal(second[0]["a"], tensor)
    copies.copy([torch.ones(4)])
    assert copies.num_bytes == 16
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_conjugated_view_is_saved_as_what_it_shows(tmp_path: Path):
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    shown = numbers.conj()
    copies: Any = HostCopies().copy([numbers, shown])
    assert torch.equal(copies[0], numbers)
    assert torch.equal(copies[1], shown)
    write({"numbers": numbers, "shown": shown, "imag": shown.imag}, tmp_path / "a.safetensors", safe_serialization=True)
    found = load_state_dict(tmp_path / "a.safetensors")
    assert found["numbers"].tolist() == [1 + 2j, 3 - 4j]
    assert found["shown"].tolist() == [1 - 2j, 3 + 4j]
    assert found["imag"].tolist() == [-2, 4]


def test_a_second_signal_ends_a_process_that_had_no_handler(tmp_path: Path):
    child = os.fork()
    if not child:
        signal.alarm(20)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        project = ProjectConfiguration(str(tmp_path), save_on_signal="SIGTERM")
        accelerator = Accelerator(cpu=True, project_config=project)
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8.0)))
        for _, batches in accelerator.resumable(loader, 1):
            for _ in batches:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM


def test_a_save_whose_wait_was_interrupted_is_still_waited_for(tmp_path: Path, held_back: threading.Event):
    accelerator, model, _ = _filled(1.0)
    accelerator.save_state(tmp_path / "state", async_save=True)
    main, interrupted = threading.get_ident(), threading.Event()

    def interrupt() -> None:
        # Python begins to wait all the same if a signal comes right before, and handles that at the end of the wait.
        for seconds in (0.2, 5, 5):
            if not interrupted.wait(seconds):
                signal.pthread_kill(main, signal.SIGINT)

    interrupts = threading.Thread(target=interrupt)
    interrupts.start()
    with pytest.raises(KeyboardInterrupt):
        accelerator.wait_for_checkpoint()
    interrupted.set()
    interrupts.join()
    model.weight.data.fill_(2.0)
    held_back.set()
    assert accelerator.wait_for_checkpoint() == tmp_path / "state"
    accelerator.load_state(tmp_path / "state")
    assert model.weight.eq(1).all()


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
    assert not here().words[layout.SAVES]  # or a launcher would wait for it
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
        from training.checkpoint.test_background_saves import _filled

        from nb_accelerate.training.checkpoint import state

        accelerator, _, _ = _filled(1.0)
        state.write = lambda *_, **__: (_ for _ in ()).throw(ZeroDivisionError("on purpose"))
        accelerator.save_state(where, async_save=True)
        sys.exit(0)

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        run_ranks(save, str(tmp_path / "state"))


@pytest.mark.contract("checkpoints: under way when a process ends")
def test_a_save_that_is_under_way_when_its_process_ends_is_written(tmp_path: Path):
    program = (
        "import atexit, multiprocessing, os, sys, threading\n"
        "import torch\n"
        "from nb_accelerate.training.accelerator import Accelerator\n"
        "from nb_accelerate.training.checkpoint import state\n"
        "too_late = threading.Event()\n"
        "write = state.write_content\n"
        "def write_later(*args):\n"
        "    too_late.wait(0.5)\n"
        "    return write(*args)\n"
        "state.write_content = write_later\n"
        "def save(how):\n"
        "    accelerator = Accelerator(cpu=True)\n"
        "    accelerator.prepare(torch.nn.Linear(3, 3))\n"
        "    accelerator.save_state(f'{sys.argv[1]}/{how}', async_save=True)\n"
        "    atexit.register(too_late.set)\n"
        "child = multiprocessing.get_context('fork').Process(target=save, args=('fork',))\n"
        "child.start()\n"
        "child.join()\n"
        "if not os.fork():\n"
        "    state.saves._close_at_exit()\n"  # as a save before the fork does
        "    child = os.fork()\n"
        "    if not child:\n"
        "        atexit._clear()\n"
        "        save('fork, by exit handlers alone')\n"
        "        atexit._run_exitfuncs()\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "save('itself')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, check=True)
    assert "was not saved" not in done.stderr.decode()
    ways = ["fork", "fork, by exit handlers alone", "itself"]
    assert sorted(os.listdir(tmp_path)) == ways
    assert all(nb_accelerate.checkpoints(tmp_path / way, read=True)[0].is_whole for way in ways)


def test_a_process_that_goes_to_another_folder_while_it_saves_removes_no_checkpoints_there(
    tmp_path: Path, held_back: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(cpu=True, project_config=project)
    accelerator.prepare(nn.Linear(1, 1))
    held_back.set()
    accelerator.save_state()
    shutil.copytree(tmp_path / "here" / "run", tmp_path / "elsewhere" / "run")
    held_back.clear()
    handle = accelerator.save_state(async_save=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    held_back.set()
    handle.wait()
    assert os.listdir(tmp_path / "elsewhere" / "run" / "checkpoints") == ["checkpoint_0"]
    assert os.listdir(tmp_path / "here" / "run" / "checkpoints") == ["checkpoint_1"]


def test_ranks_may_leave_their_group_while_they_save(run_ranks: RunRanks, tmp_path: Path):
    def save(where: str) -> bool:
        from training.checkpoint.test_background_saves import _filled

        accelerator, _, _ = _filled(1.0)
        handle = accelerator.save_state(where, async_save=True)
        accelerator.end_training()
        return handle.done()

    assert run_ranks(save, str(tmp_path / "state")) == [True, True]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_of_a_save_exchange_objects_one_save_after_the_other(run_ranks: RunRanks, ranks: int):
    def exchange() -> None:
        import torch.distributed as dist

        from nb_accelerate.training.checkpoint.background import SaveGroup

        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        for number in range(20):
            group = SaveGroup(f"{number}", size)
            told = [group.all_gather_object(("x" * 1000 * rank, number, again)) for again in range(2)]
            group.close()  # while others still read
            assert told == [[("x" * 1000 * other, number, again) for other in range(size)] for again in range(2)]
        group = SaveGroup("the last", size)
        if rank == 1:
            group.close()
        else:
            with pytest.raises(CheckpointError, match="rank did not finish"):
                group.all_gather_object(rank)
        dist.barrier()

    run_ranks(exchange, world_size=ranks)

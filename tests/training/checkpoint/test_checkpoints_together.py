"""Ranks that do not come, are interrupted or killed while others save: nobody waits in vain."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.ranks import RunRanks

import nb_accelerate
from nb_accelerate import notebook_launcher
from nb_accelerate.errors import CheckpointError, RankDiedError


def _accelerator() -> Any:
    from nb_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    return accelerator


def test_a_save_of_the_main_process_only_ends_at_once_and_says_what_it_lacks(run_ranks: RunRanks, tmp_path: Path):
    def save(where: str) -> list[str]:
        import logging

        from training.checkpoint.test_checkpoints_together import _accelerator

        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        accelerator = _accelerator()
        logging.getLogger("nb_accelerate").addHandler(handler)

        @accelerator.on_main_process
        def decorated() -> None:
            accelerator.save_state(f"{where}/decorated")

        if accelerator.is_main_process:
            accelerator.save_state(f"{where}/plain")
        if accelerator.is_main_process or accelerator.distributed_type == "DEEPSPEED":  # as diffusers has it
            accelerator.save_state(f"{where}/engine")
        decorated()
        accelerator.backward(accelerator.core.prepared.models[0](torch.ones(1, 2)).sum())
        accelerator.save_state(f"{where}/whole")
        accelerator.wait_for_everyone()
        accelerator.load_state(f"{where}/plain")
        return lines

    first, second = run_ranks(save, str(tmp_path))
    assert len(first) == 3
    assert all("without the other processes" in line for line in first)
    assert len(second) == 1
    assert "main process only" in second[0]
    for name, ranks in (("plain", 1), ("engine", 1), ("decorated", 1), ("whole", 2)):
        assert nb_accelerate.checkpoints(tmp_path / name)[0].is_whole
        assert len(list((tmp_path / name).glob("random_states_*.pkl"))) == ranks


def test_a_save_of_all_ranks_is_not_taken_for_one_of_the_main_process(run_ranks: RunRanks, tmp_path: Path):
    def save(where: str) -> None:
        from training.checkpoint.test_checkpoints_together import _accelerator

        accelerator = _accelerator()
        is_any_process = True
        if accelerator.is_main_process or is_any_process:
            accelerator.save_state(f"{where}/or")
        if not accelerator.is_main_process:
            accelerator.save_state(f"{where}/else")
        else:
            accelerator.save_state(f"{where}/else")

    run_ranks(save, str(tmp_path))
    for name in ("or", "else"):
        assert len(list((tmp_path / name).glob("random_states_*.pkl"))) == 2


def test_a_rank_that_is_killed_while_it_saves_in_the_background_holds_up_nobody(tmp_path: Path):
    def train(where: str) -> None:
        import signal

        from training.checkpoint.test_checkpoints_together import _accelerator

        from nb_accelerate.training.checkpoint import state

        accelerator = _accelerator()
        if accelerator.process_index == 1:
            state.write_content = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assign]
        accelerator.save_state(where, async_save=True).wait()

    began = time.monotonic()
    with pytest.raises(RankDiedError, match="SIGKILL"):
        notebook_launcher(train, (str(tmp_path / "state"),), 2, start_method="forkserver", progress="off")
    assert time.monotonic() - began < 30  # and not the ten minutes that ranks get which save
    assert not (tmp_path / "state").exists()


def test_a_rank_that_is_interrupted_as_a_save_begins_ends_it_for_all_and_the_next_one_is_whole(
    run_ranks: RunRanks, tmp_path: Path
):
    def save(where: str) -> str:
        from training.checkpoint.test_checkpoints_together import _accelerator

        from nb_accelerate.training.checkpoint.background import saves

        accelerator = _accelerator()
        told = ""
        if accelerator.process_index == 1:
            start = saves.start
            saves.start = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                accelerator.save_state(where, async_save=True)
            saves.start = start  # type: ignore[method-assign]
        else:
            handle = accelerator.save_state(where, async_save=True)
            with pytest.raises(CheckpointError) as caught:
                handle.wait(60)
            told = str(caught.value)
            with pytest.raises(CheckpointError):
                accelerator.wait_for_checkpoint()
        assert not Path(where).exists()
        accelerator.save_state(where, async_save=True).wait(60)
        return told

    assert "rank did not finish" in run_ranks(save, str(tmp_path / "state"))[0]
    assert nb_accelerate.checkpoints(tmp_path / "state")[0].is_whole
    assert os.listdir(tmp_path) == ["state"]


def test_a_rank_that_fails_leaves_the_others_the_time_to_end_a_save_in_the_background(tmp_path: Path):
    def train(where: str) -> None:
        import torch
        from training.checkpoint.test_checkpoints_together import _accelerator

        from nb_accelerate.training.checkpoint import state

        accelerator = _accelerator()
        write = state.write_content

        def write_slowly(*args: Any) -> Any:
            time.sleep(2.0)  # a slow disk; ranks are ended 1.1 s after a failure
            return write(*args)

        state.write_content = write_slowly  # type: ignore[method-assign]
        accelerator.save_state(where, async_save=True)
        if accelerator.process_index == 1:
            raise ZeroDivisionError("on purpose")
        accelerator.reduce(torch.ones(1))  # the other rank never comes

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        notebook_launcher(train, (str(tmp_path / "state"),), 2, start_method="forkserver", progress="off")
    assert nb_accelerate.checkpoints(tmp_path / "state", read=True)[0].is_whole
    assert os.listdir(tmp_path) == ["state"]

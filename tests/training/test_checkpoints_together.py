"""Ranks that are late, gone, interrupted or killed while others save: nobody is left out, and nobody waits in vain."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.ranks import RunRanks

import nb_accelerate
from nb_accelerate import notebook_launcher
from nb_accelerate.errors import CheckpointError


def _accelerator() -> Any:
    from nb_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    return accelerator


def test_a_rank_that_is_late_for_the_first_save_of_a_run_is_waited_for(run_ranks: RunRanks, tmp_path: Path):
    def save(where: str) -> None:
        from training.test_checkpoints_together import _accelerator

        from nb_accelerate.checkpoint import presence

        presence._ALIKE = 0.1
        accelerator = _accelerator()
        if accelerator.process_index == 1:
            known = presence.other_ranks_here()
            assert known is not None
            known._store.wait([presence._ASKED])  # the main process has begun to wonder
            time.sleep(1.0)  # ten times as long as a rank has to stand still
        accelerator.save_state(where)

    run_ranks(save, str(tmp_path / "state"))
    state = nb_accelerate.checkpoints(tmp_path / "state")[0]
    assert state.is_whole
    assert (tmp_path / "state" / "random_states_1.pkl").exists()


@pytest.mark.parametrize(
    "where_others_are",
    [
        "returned",
        "in a collective",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("in a backward", "out of the group", "in a collective of another machine")
        ),
    ],
)
def test_a_save_of_the_main_process_only_ends_when_the_others_are_past_it(
    run_ranks: RunRanks, tmp_path: Path, where_others_are: str
):
    def save(where: str, where_others_are: str) -> float:
        from training.test_checkpoints_together import _accelerator

        from nb_accelerate.checkpoint import presence

        if where_others_are == "in a collective of another machine":
            machine = f"machine {os.environ['RANK']}"
            presence._machine = lambda: machine
        accelerator = _accelerator()
        began = time.monotonic()
        if accelerator.is_main_process:
            accelerator.save_state(where)
        took = time.monotonic() - began
        if where_others_are.startswith("in a collective"):
            accelerator.gather(torch.ones(1))
        elif where_others_are == "in a backward":
            accelerator.core.prepared.models[0](torch.ones(1, 2)).sum().backward()
        elif where_others_are == "out of the group":
            accelerator.end_training()
        return took

    took = run_ranks(save, str(tmp_path / "state"), where_others_are)[0]
    assert took < 10  # and not as long as a process group waits, which is half an hour
    assert nb_accelerate.checkpoints(tmp_path / "state")[0].is_whole


def test_a_rank_that_is_interrupted_as_a_save_begins_ends_it_for_all_and_the_next_one_is_whole(
    run_ranks: RunRanks, tmp_path: Path
):
    def save(where: str) -> str:
        from training.test_checkpoints_together import _accelerator

        from nb_accelerate.checkpoint.background import saves

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

    assert run_ranks(save, str(tmp_path / "state"))[0] == "on rank 1: KeyboardInterrupt: "
    assert nb_accelerate.checkpoints(tmp_path / "state")[0].is_whole
    assert os.listdir(tmp_path) == ["state"]


def test_a_rank_that_fails_leaves_the_others_the_time_to_end_a_save_in_the_background(tmp_path: Path):
    def train(where: str) -> None:
        import torch
        from training.test_checkpoints_together import _accelerator

        from nb_accelerate.checkpoint import state

        accelerator = _accelerator()
        write = state.StateWriter.write

        def write_slowly(*args: Any) -> Any:
            time.sleep(2.0)  # a slow disk; ranks are ended 1.1 s after a failure
            return write(*args)

        state.StateWriter.write = write_slowly  # type: ignore[method-assign]
        accelerator.save_state(where, async_save=True)
        if accelerator.process_index == 1:
            raise ZeroDivisionError("on purpose")
        accelerator.reduce(torch.ones(1))  # the other rank never comes

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        notebook_launcher(train, (str(tmp_path / "state"),), 2, start_method="forkserver", progress="off")
    assert nb_accelerate.checkpoints(tmp_path / "state", read=True)[0].is_whole
    assert os.listdir(tmp_path) == ["state"]


PROGRAM = """
import os, signal, sys, time
import torch
from nb_accelerate import Accelerator
from nb_accelerate.checkpoint import presence, state
from nb_accelerate.errors import CheckpointError

where, what = sys.argv[1:]
if what == "killed elsewhere":
    machine = "machine " + os.environ["RANK"]
    presence._machine = lambda: machine
    presence._SILENT = 3
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(2, 2))

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if what in ("killed before", "killed elsewhere"):
    if accelerator.process_index == 1:
        presence.other_ranks_here()._store.wait([presence._ASKED])
        die()
elif what == "killed meanwhile":
    if accelerator.process_index == 1:
        state.StateWriter.write = die
if what != "left" or accelerator.is_main_process:
    try:
        saved = accelerator.save_state(where, async_save=what == "killed meanwhile")
        if what == "killed meanwhile":
            saved.wait(60)
    except CheckpointError as error:
        print(error)
if what == "left" and accelerator.is_main_process:
    assert presence.other_ranks_here()._has_left(1)
sys.stdout.flush()
if what != "left":
    os._exit(0)  # a group that has lost a rank need not be destroyed
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("killed before", "rank 1 did not come to save_state: the process of rank 1 has ended, and nothing was saved"),
        (
            "killed elsewhere",
            "save_state: nothing was heard of rank 1, on another machine, for 3 s, and nothing",
        ),
        ("killed meanwhile", "rank 1 did not finish its part of a checkpoint: its process has ended."),
        ("left", "is saved without the other processes"),
    ],
)
def test_ranks_that_no_launcher_watches_over_are_missed_when_they_are_gone(tmp_path: Path, what: str, told: str):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environ |= {"LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "state"), what],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, _ = ranks[0].communicate(timeout=60)
        assert told in out
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert (tmp_path / "state").exists() == (what == "left")

"""Ranks that are killed at random instants while they save: there is always a whole checkpoint to go on from."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training.checkpoint.soak import soak

PROGRAM = """
import json, os, sys
from pathlib import Path

import torch
from nb_accelerate import Accelerator, notebook_launcher
from nb_accelerate.utils import ProjectConfiguration

where = sys.argv[1]

# One that is replaced, one with other files in it, and numbered ones.
targets = [where + "/one", where + "/beside", None]


class Counter:
    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def run(saves):
    project = ProjectConfiguration(project_dir=where, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(300, 300)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    plain = accelerator.unwrap_model(model)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    rank = accelerator.process_index
    accelerator.backward(model(torch.zeros(1, 300)).sum())
    optimizer.step()

    def is_there(target):
        if target is None:
            return any(Path(where).glob("checkpoints/checkpoint_*"))
        return Path(target, "checkpoint.json").exists()

    newest = 0
    for target in targets:
        if not is_there(target):
            continue
        project.automatic_checkpoint_naming = target is None
        accelerator.load_state(target)
        newest = max(newest, counter.count)
        assert torch.equal(plain.weight, torch.full((300, 300), float(counter.count))), (target, counter.count)
        assert torch.equal(optimizer.state[plain.weight]["step"], torch.tensor(float(counter.count))), target
        expected = torch.Generator().manual_seed(1000 * counter.count + rank)
        assert torch.equal(torch.rand(3), torch.rand(3, generator=expected)), (target, rank, counter.count)
    counter.count = newest
    Path(where, f"rank {rank}").write_text(str(os.getpid()))
    for _ in range(saves):
        for target in targets:
            counter.count += 1
            with torch.no_grad():
                plain.weight.fill_(counter.count)
            optimizer.state[plain.weight]["step"].fill_(counter.count)
            torch.manual_seed(1000 * counter.count + rank)
            project.automatic_checkpoint_naming = target is None
            accelerator.save_state(target)
    return counter.count


for line in sys.stdin:
    try:
        end = notebook_launcher(run, (int(line),), 2, start_method="forkserver", progress="off")[0]
    except Exception as error:
        end = repr(error)
    print(json.dumps(end), flush=True)
"""


@pytest.mark.slow
@pytest.mark.limit(600)
def test_runs_that_are_killed_go_on_by_themselves_to_the_same_end(tmp_path: Path):
    soak(8, 16, tmp_path)


@pytest.mark.slow
@pytest.mark.limit(240)
def test_ranks_that_are_killed_while_they_save_always_leave_a_whole_checkpoint(tmp_path: Path):
    seed = 163
    random_ = random.Random(seed)
    where = tmp_path / "run"
    (where / "beside").mkdir(parents=True)
    (where / "beside" / "README.md").write_text("mine")
    command = [sys.executable, "-c", PROGRAM, str(where)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for attempt in range(4):
                told = f"seed {seed}, attempt {attempt}"
                print(100_000, file=process.stdin, flush=True)
                deadline = time.monotonic() + 60
                while len(files := sorted(where.glob("rank *"))) < 2 or not all(file.read_text() for file in files):
                    assert process.poll() is None, told
                    assert time.monotonic() < deadline, told
                    time.sleep(0.01)
                time.sleep(random_.uniform(0, 0.4))  # the random instant
                pids = [int(file.read_text()) for file in files]
                for pid in random_.choice([pids, pids[:1], pids[1:]]):
                    with contextlib.suppress(ProcessLookupError):  # it was ended after the one before
                        os.kill(pid, signal.SIGKILL)
                # Its ranks had found what the ones before left as it was saved, and were killed while they saved.
                error = json.loads(process.stdout.readline())
                assert "SIGKILL" in error, (told, error)
                for file in files:
                    file.unlink()
            print(1, file=process.stdin, flush=True)
            last = json.loads(process.stdout.readline())
        finally:
            process.kill()
    assert last > 3
    assert not [path for path in where.rglob("*") if ".nb_accelerate-" in path.name]  # the last saves have removed it
    assert (where / "beside" / "README.md").read_text() == "mine"

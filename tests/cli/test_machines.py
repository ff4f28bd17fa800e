"""One job on two machines, started by `nb-accelerate launch` on each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nb_accelerate.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.limit(120)]

# Trains from its last checkpoint; with a step, rank 1 kills itself there in the first attempt.
TRAIN = """
import json, os, signal, sys
import torch
from nb_accelerate import Accelerator

folder, killed_at = sys.argv[1], int(sys.argv[2])
state, losses = os.path.join(folder, "state"), os.path.join(folder, "losses.json")
accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
seen = []
if os.path.isdir(state):
    accelerator.load_state(state)
    with open(losses) as file:
        seen = json.load(file)
for step in range(len(seen), 5):
    x = torch.full((2, 4), float(step + accelerator.process_index))
    loss = (model(x) - 1).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    seen.append(accelerator.gather(loss.detach().reshape(1)).tolist())
    if accelerator.process_index == 1 and step == killed_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.save_state(state)
    if accelerator.is_main_process:
        with open(losses, "w") as file:
            json.dump(seen, file)
    accelerator.wait_for_everyone()
print(accelerator.num_processes, "processes")
"""


def launch(host: int, flags: list[str], script: Path, *arguments: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = ["ip", "netns", "exec", f"nbtest{host}", sys.executable, "-m", "nb_accelerate", "launch", "--cpu"]
    return subprocess.Popen(
        [*command, *flags, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )


def train(folder: Path, address: str, flags: list[str], killed_at: int = -1) -> str:
    """Run the job on both machines; returns its losses."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(TRAIN)
    common = ["--quiet", "--num_machines=2", "--num_processes=2", f"--main_process_ip={address}", *flags]
    jobs = [launch(host, [*common, f"--machine_rank={host}"], script, str(folder), str(killed_at)) for host in range(2)]
    for job in jobs:
        output, error = job.communicate(timeout=100)
        assert job.returncode == 0, error
        assert output == "2 processes\n"
    return (folder / "losses.json").read_text()


def test_a_job_trains_on_two_machines_and_goes_on_after_one_of_its_processes_was_killed(
    tmp_path: Path, two_hosts: list[str]
) -> None:
    numbered = train(tmp_path / "static", two_hosts[0], [])
    again = ["--rdzv_backend=c10d", "--rdzv_conf=join_timeout=60", "--max_restarts=1"]
    assert train(tmp_path / "killed", two_hosts[0], again, killed_at=3) == numbered


def test_a_machine_that_does_not_come_is_named(tmp_path: Path, two_hosts: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('this was run')")
    flags = ["--num_machines=2", f"--main_process_ip={two_hosts[0]}", "--rdzv_backend=c10d"]
    job = launch(0, [*flags, "--rdzv_conf=join_timeout=3"], script)
    _, error = job.communicate(timeout=60)
    assert job.returncode == 1
    assert f"1 of 2 machines came to {two_hosts[0]}:29500 within 3 s; here is {two_hosts[0]}" in error


def test_numbered_machines_cannot_start_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    flags = ["--num_machines=2", "--main_process_ip=10.0.0.1", "--max_restarts=1"]
    assert main(["launch", *flags, str(script)]) == 2
    assert "rdzv_backend='c10d'" in capsys.readouterr().err

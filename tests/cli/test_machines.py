"""One job on two machines, started by `nb-accelerate launch` on each."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from fixtures.hosts import HOSTS
from fixtures.python_template import python_program
from fixtures.screens import Terminal

from nb_accelerate import notebook_launcher

pytestmark = [pytest.mark.slow, pytest.mark.limit(120), pytest.mark.usefixtures("python_template")]

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


_jobs: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def no_jobs_are_left() -> Iterator[None]:
    """End what a test that failed has started: it would fail the tests after it too."""
    yield
    while _jobs:
        with _jobs.pop() as job:
            job.kill()  # its ranks end with it


def launch(host: int, flags: list[str], script: Path, *arguments: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = ["ip", "netns", "exec", HOSTS[host], python_program(), "-m", "nb_accelerate", "launch", "--cpu"]
    job = subprocess.Popen(
        [*command, *flags, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    _jobs.append(job)
    return job


def train(folder: Path, address: str, flags: list[str], killed_at: int) -> str:
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


def train_here(folder: str) -> None:
    sys.argv[1:] = [folder, "-1"]
    exec(TRAIN, {})


@pytest.mark.limit(240)  # it runs two of them
def test_a_job_trains_on_two_machines_and_goes_on_after_one_of_its_processes_was_killed(
    tmp_path: Path, two_hosts: list[str]
) -> None:
    (tmp_path / "here").mkdir()
    notebook_launcher(train_here, (str(tmp_path / "here"),), 2, progress="off")
    alone = (tmp_path / "here" / "losses.json").read_text()
    again = ["--rdzv_conf=join_timeout=60", "--max_restarts=1"]
    for backend in ("static", "c10d"):
        flags = [f"--rdzv_backend={backend}", *again]
        assert train(tmp_path / f"killed_{backend}", two_hosts[0], flags, killed_at=3) == alone


def test_a_machine_that_does_not_come_is_named(tmp_path: Path, two_hosts: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('this was run')")
    flags = ["--num_machines=2", f"--main_process_ip={two_hosts[0]}", "--rdzv_backend=c10d"]
    job = launch(0, [*flags, "--rdzv_conf=join_timeout=3"], script)
    _, error = job.communicate(timeout=60)
    assert job.returncode == 1
    assert f"1 of 2 machines came to {two_hosts[0]}:29500 within 3 s; here is {two_hosts[0]}" in error
    job = launch(0, [*flags[:2], "--rdzv_conf=join_timeout=3", "--machine_rank=0"], script)
    _, error = job.communicate(timeout=60)
    assert f"1 of 2 machines came to {two_hosts[0]}:29500 within 3 s; number 1 is missing" in error


# Prints a line when it begins, takes steps of a loader, and goes on until all ranks find the file that ends it.
GO_ON = """
import os, sys, time
import torch
from nb_accelerate import Accelerator

accelerator, is_told = Accelerator(), False
model, optimizer = torch.nn.Linear(4, 1), None
model, loader = accelerator.prepare(model, torch.utils.data.DataLoader(torch.ones(10**6, 4), batch_size=1))
for x in loader:
    accelerator.backward(model(x).mean())
    if not is_told:
        print("begins", accelerator.process_index, "of", accelerator.num_processes, flush=True)
        is_told = True
    if accelerator.gather(torch.tensor([float(os.path.exists(sys.argv[1]))])).min():
        break
    time.sleep(0.02)
"""

CONF = "--rdzv_conf=join_timeout=60"
ELASTIC = ["--rdzv_backend=c10d", CONF]


def wait_for(stream: IO[str] | None, awaited: str) -> None:
    """Read what a launch prints until a line has some words."""
    assert stream is not None
    lines = []
    for line in stream:
        lines.append(line)
        if awaited in line:
            return
    raise AssertionError("".join(lines))


def pids_of(host: int) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", HOSTS[host]], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


def kill_machine(host: int, job: subprocess.Popen[str]) -> None:
    for pid in pids_of(host):
        with contextlib.suppress(ProcessLookupError):  # it has ended with the one before
            os.kill(pid, signal.SIGKILL)
    job.communicate()


@pytest.fixture
def go_on(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(GO_ON)
    return script


def test_a_machine_that_is_started_after_another_takes_part(tmp_path: Path, two_hosts: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    flags = ["--num_machines=2", "--num_processes=2", f"--main_process_ip={two_hosts[0]}", *ELASTIC]
    first = launch(0, flags, script, str(tmp_path), "-1")
    wait_for(first.stderr, "on each of 2 machines: waiting for the other machines")
    late = launch(1, flags, script, str(tmp_path), "-1")
    for job in (first, late):
        output, error = job.communicate(timeout=60)
        assert job.returncode == 0, error
        assert "2 processes\n" in output
    assert (tmp_path / "losses.json").exists()


def two_machines(two_hosts: list[str], flags: list[str], script: Path, end: Path) -> list[subprocess.Popen[str]]:
    """Start a job on both machines, and wait until its ranks have begun."""
    common = ["--num_machines=2", "--num_processes=2", f"--main_process_ip={two_hosts[0]}", *flags]
    jobs = [launch(host, [*common, f"--machine_rank={host}"], script, str(end)) for host in range(2)]
    for job in jobs:
        wait_for(job.stdout, "begins")
    return jobs


def all_end_well(jobs: list[subprocess.Popen[str]]) -> None:
    for job in jobs:
        _, error = job.communicate(timeout=60)
        assert job.returncode == 0, error


@pytest.mark.parametrize("killed", [0, 1])
def test_a_machine_that_is_killed_is_named_on_the_other(
    tmp_path: Path, two_hosts: list[str], go_on: Path, killed: int
) -> None:
    jobs = two_machines(two_hosts, [], go_on, tmp_path / "end")
    kill_machine(killed, jobs.pop(killed))
    _, error = jobs[0].communicate(timeout=60)
    assert re.search(rf"machine at {two_hosts[killed]}.* was killed", error)
    assert jobs[0].returncode == 1


def test_a_machine_whose_launch_was_killed_is_started_again_and_takes_part(
    tmp_path: Path, two_hosts: list[str], go_on: Path
) -> None:
    end, flags = tmp_path / "end", [CONF, "--max_restarts=1"]
    first, second = two_machines(two_hosts, flags, go_on, end)
    kill_machine(1, second)
    wait_for(first.stderr, "start 2 of 2")
    common = ["--num_machines=2", "--num_processes=2", f"--main_process_ip={two_hosts[0]}", *flags]
    second = launch(1, [*common, "--machine_rank=1"], go_on, str(end))
    for job in (first, second):
        wait_for(job.stdout, "begins")
    end.touch()
    all_end_well([first, second])


FAIL = """
import os, sys, time
from nb_accelerate import Accelerator

accelerator = Accelerator()
print("begins", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
raise ValueError("no rows")
"""


def test_a_machine_whose_rank_fails_just_after_the_network_ends_at_once(tmp_path: Path, two_hosts: list[str]) -> None:
    script, end = tmp_path / "fail.py", tmp_path / "end"
    script.write_text(FAIL)
    flags = ["--num_machines=2", "--num_processes=2", f"--main_process_ip={two_hosts[0]}", *ELASTIC]
    jobs = [launch(host, [*flags, f"--machine_rank={host}"], script, str(end)) for host in range(2)]
    for job in jobs:
        wait_for(job.stdout, "begins")
    subprocess.run(["ip", "-n", HOSTS[1], "link", "set", "nbveth1", "down"], check=True)
    end.touch()  # long before the machines can know of each other's silence
    for job in jobs:
        _, error = job.communicate(timeout=30)  # the store's own timeout is 60 s
        assert "ValueError: no rows" in error


def test_a_first_machine_that_never_answers_is_named(two_hosts: list[str], go_on: Path) -> None:
    flags = ["--num_machines=2", "--machine_rank=1", f"--main_process_ip={two_hosts[0]}"]
    job = launch(1, [*flags, "--rdzv_conf=join_timeout=1"], go_on, "end")
    _, error = job.communicate(timeout=60)
    assert job.returncode == 1
    assert re.search(rf"{two_hosts[0]}:29500, .*\(Connection refused\)", error)


def test_the_panel_of_each_machine_has_its_ranks(tmp_path: Path, two_hosts: list[str], go_on: Path) -> None:
    end = tmp_path / "end"
    flags = ["--num_machines=2", "--num_processes=2", f"--main_process_ip={two_hosts[0]}"]
    first = launch(0, [*flags, "--machine_rank=0"], go_on, str(end))
    command = ["ip", "netns", "exec", HOSTS[1], python_program(), "-m", "nb_accelerate", "launch", "--cpu", *flags]
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    second = Terminal([*command, "--machine_rank=1", str(go_on), str(end)], environ)
    try:
        shown = second.wait_for(lambda text: re.search(r"^ +1 .* [\d,]+ / 500,000 ", text, re.MULTILINE) is not None)
        end.touch()
        assert "· 2 machines" in shown
        assert second.finish() == 0
    finally:
        second.close()
        end.touch()
    all_end_well([first])

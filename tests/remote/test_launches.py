"""Launches whose ranks are on two machines: what they do, and how each end is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from nb_accelerate.errors import ConfigError, LaunchError, RankDiedError, StartError
from nb_accelerate.notebook.launch import notebook_launcher
from nb_accelerate.notebook.remote import sender

if TYPE_CHECKING:
    from collections.abc import Callable

    from fixtures.engines import Machines

LINES = 3000


def wait_for(is_there: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait for what processes bring about that send this one no event."""
    deadline = time.monotonic() + seconds
    while not (found := is_there()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.mark.contract("machines: a command")
def test_values_numbers_output_and_what_is_sent(machines: Machines, capfd: pytest.CaptureFixture[str]) -> None:
    sent = torch.arange(300_000)

    def train(tensor: torch.Tensor) -> tuple[Any, ...]:
        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        for line in range(LINES):
            print(f"line {line}")
        total = accelerator.reduce(torch.tensor([2.0**accelerator.process_index]), "sum")
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
        numbers = tuple(int(os.environ[name]) for name in names)
        return total.item(), numbers, tensor * 2, os.environ["OWN"], os.environ["GIVEN"], "NOT_SENT" in os.environ

    os.environ["NOT_SENT"] = "of the kernel"
    try:
        values = notebook_launcher(train, (sent,), progress="off", env={"GIVEN": "by the call"})
    finally:
        del os.environ["NOT_SENT"]
    assert [value[0] for value in values] == [7.0, 7.0, 7.0]
    assert [value[1] for value in values] == [(0, 0, 0, 3, 1, 2), (1, 0, 1, 3, 2, 2), (2, 1, 1, 3, 2, 2)]
    assert all(torch.equal(value[2], sent * 2) for value in values)
    assert [value[3:] for value in values] == [(host, "by the call", False) for host in "abb"]
    assert capfd.readouterr().out.splitlines() == [f"line {line}" for line in range(LINES)]


@pytest.mark.slow
def test_an_exception_comes_with_its_type_and_its_rank(machines: Machines) -> None:
    def train() -> None:
        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        if accelerator.process_index == 2:
            raise KeyError("no such key")
        accelerator.wait_for_everyone()

    with pytest.raises(KeyError, match="no such key") as caught:
        notebook_launcher(train, progress="off")
    assert "rank 2 of 3" in "".join(caught.value.__notes__)


@pytest.mark.slow
def test_ranks_are_started_again(machines: Machines) -> None:
    def train() -> tuple[float, str]:
        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        total = accelerator.reduce(torch.tensor([1.0]), "sum").item()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.wait_for_everyone()
        return total, os.environ["TORCHELASTIC_RESTART_COUNT"]

    assert notebook_launcher(train, max_restarts=1, progress="off") == [(3.0, "1")] * 3


def waits(gate: str) -> int:
    """Wait in a collective that rank 0 joins when a file is there."""
    from nb_accelerate import Accelerator

    accelerator = Accelerator()
    Path(f"{gate}.{accelerator.process_index}").touch()
    while accelerator.process_index == 0 and not Path(gate).exists():
        time.sleep(0.01)
    accelerator.wait_for_everyone()
    return accelerator.process_index


def launched(tmp_path: Path) -> Any:
    """Launch `waits`, and return when all ranks run it."""
    launch = notebook_launcher(waits, (str(tmp_path / "gate"),), progress="off", block=False)
    wait_for(lambda: launch.status() not in ("starting", "running") or len([*tmp_path.glob("gate.*")]) == 3)
    return launch


@pytest.mark.slow
def test_an_interrupt_ends_all_ranks(machines: Machines, tmp_path: Path) -> None:
    launch = launched(tmp_path)
    launch.interrupt()
    with pytest.raises(KeyboardInterrupt):
        launch.result(timeout=30)


@pytest.mark.slow
def test_training_is_steered_from_the_notebook(machines: Machines, tmp_path: Path) -> None:
    def train(folder: str) -> int:
        from nb_accelerate import Accelerator

        accelerator = Accelerator(project_dir=folder)
        accelerator.prepare(torch.nn.Linear(1, 1))
        for epoch in accelerator.epochs(100_000):  # noqa: B007
            time.sleep(0.005)
        return epoch

    launch = notebook_launcher(train, (str(tmp_path),), progress="off", block=False)
    assert launch.save_checkpoint(timeout=60) == tmp_path / "checkpoints" / "checkpoint_0"
    launch.stop_after_epoch()
    first, *others = launch.result(timeout=30)
    assert others == [first, first]
    assert first < 99_999


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(machines: Machines, tmp_path: Path) -> None:
    launch = launched(tmp_path)
    began = time.monotonic()
    os.kill(launch.ranks[1].pid, signal.SIGKILL)
    with pytest.raises(RankDiedError, match=f"rank 1 on {machines.names[1]} was ended by SIGKILL"):
        launch.result(timeout=30)
    assert time.monotonic() - began < 10


@pytest.mark.slow
@pytest.mark.parametrize("who", ["host", "server"])
def test_a_host_or_its_server_that_is_killed_is_told(machines: Machines, tmp_path: Path, who: str) -> None:
    launch = launched(tmp_path)
    ranks = [psutil.Process(rank.pid) for rank in launch.ranks]
    machines.kill({"host": machines.hosts, "server": machines.servers}[who]()[1])
    name = machines.names[1]
    how = {
        "host": f" is lost: machine {name} is lost: ",
        "server": f" on {name} is lost: the process it was forked from",
    }
    with pytest.raises(LaunchError, match=f"rank [12]{how[who]}"):
        launch.result(timeout=30)
    psutil.wait_procs(ranks, timeout=20)
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
def test_what_the_cell_of_a_launch_in_the_background_says_of_its_end_has_no_output_left_out(
    machines: Machines, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        print("so far", flush=True)
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    launch = notebook_launcher(train, progress="off", block=False)
    with pytest.raises(RankDiedError, match=r"ran\.\nIts last output was:\nso"):
        launch.result(timeout=30)
    said = "rank 1 on b was ended by SIGTERM (terminated) while it ran; .result() raises it here"
    assert capfd.readouterr().err.splitlines() == [said]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "{python} -c 'import pty, sys; pty.spawn(sys.argv[1:])' {command}",
            "It printed:\nnb_accelerate: the command allocates a terminal, which",
        ),
        ("sh -c '{command} | { head -n 2; sleep 60; }'", "1 s: the command buffers output"),
    ],
)
def test_a_command_with_a_terminal_and_one_that_keeps_back_what_ends_no_line_are_told_apart(
    command: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "SILENCE_LIMIT", 1.0)
    template = command.replace("{python}", sys.executable)
    with pytest.raises(StartError, match="machine a cannot") as caught:
        notebook_launcher(
            os.getpid,
            progress="off",
            engine="command",
            hosts=["a"],
            command_template=template,
            remote_python=sys.executable,
        )
    assert said in str(caught.value).replace("\r", "")


def test_a_machine_without_devices_is_named(machines: Machines) -> None:
    with pytest.raises(ConfigError, match=r"devices=\[0\], but no GPU"):
        notebook_launcher(os.getpid, progress="off", devices=[0])


@pytest.mark.slow
def test_ranks_train_as_the_file_of_the_notebook_says_and_not_as_that_of_their_machine(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> tuple[str, bool | None, str]:
        from nb_accelerate import Accelerator
        from nb_accelerate.base.config.env import Environment

        return Accelerator().mixed_precision, Environment().flag("ACCELERATE_DEBUG_MODE"), os.environ["OWN"]

    files = tmp_path / "b" / ".cache" / "huggingface" / "accelerate"
    files.mkdir(parents=True)
    (files / "default_config.yaml").write_text("mixed_precision: fp16\ndebug: true\n")
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("NB_ACCELERATE_CONFIG_FILE", str(tmp_path / "own.yaml"))
    (tmp_path / "own.yaml").write_text("mixed_precision: bf16\n")
    assert notebook_launcher(train, progress="off") == [("bf16", None, host) for host in "abb"]
    assert notebook_launcher(train, progress="off", env={"ACCELERATE_MIXED_PRECISION": "no"})[2] == ("no", None, "b")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert notebook_launcher(train, progress="off")[2] == ("no", None, "b")


@pytest.mark.contract("machines: a lost one is named")
def test_a_machine_that_is_silent_is_lost_and_named(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "SILENCE_LIMIT", 2.0)
    launch = launched(tmp_path)
    host = machines.hosts()[1]
    machines.kill(host, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(LaunchError, match=f"machine {machines.names[1]} is lost:.* 2 s"):
            launch.result(timeout=40)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            host.resume()
    assert time.monotonic() - began < 15


def trains(gate: str) -> None:
    """Train for long, with batches that other processes load."""
    from nb_accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(8, 1)
    batches = torch.utils.data.DataLoader(torch.randn(1 << 16, 8), batch_size=2, num_workers=1)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), batches)
    for step, batch in enumerate(batches):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        if step == 3:
            Path(f"{gate}.{accelerator.process_index}").touch()


KERNEL = """
import sys
sys.path.insert(0, {tests!r})
from remote.test_launches import trains
from nb_accelerate import notebook_launcher
if __name__ == "__main__":
    notebook_launcher(trains, ({gate!r},), progress="off")
"""


def started_since(before: set[psutil.Process]) -> set[psutil.Process]:
    """Return the processes on all sides that have the folder for temporary files of these tests."""
    found = set()
    for process in {*psutil.process_iter()} - before:
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie, which has no environment
            if process.environ().get("TMPDIR") == os.environ["TMPDIR"]:
                found.add(process)
    return found


def listened_at(processes: set[psutil.Process]) -> set[int]:
    """Return the ports at which processes listen, or any process for none."""
    found = [one for process in processes for one in process.net_connections()] or psutil.net_connections()
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_nothing_stays_of_a_kernel_that_is_killed_while_ranks_train(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NB_ACCELERATE_HOSTS", "a:2,b:2")
    before = {*psutil.process_iter()}
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL.format(tests=str(Path(__file__).parents[1]), gate=str(tmp_path / "gate"))]
    )
    wait_for(lambda: len([*tmp_path.glob("gate.*")]) == 4, seconds=60)
    started = started_since(before)
    ports = listened_at(started)
    assert len(started) >= 1 + 2 + 2 + 4 + 4  # kernel, hosts, servers, ranks, loaders
    assert len(ports) >= 1  # the store
    kernel.kill()
    kernel.wait()
    began = time.monotonic()
    wait_for(lambda: not started_since(before))
    print(f"{len(started)} processes had ended after {time.monotonic() - began:.1f} s")
    assert ports.isdisjoint(listened_at(set()))
    # That no file is left on any side is checked after each test.


def test_a_number_of_ranks_that_the_machines_do_not_make_up_is_refused(machines: Machines) -> None:
    with pytest.raises(ConfigError, match=r"num_processes=4 .* a:1, b:2"):
        notebook_launcher(os.getpid, num_processes=4, progress="off")


@pytest.mark.parametrize(
    ("template", "error", "says"),
    [
        ("sh -c 'echo Out of order; exit 3' {command}", StartError, r"machine a .* exit code 3[^\0]*Out of order"),
        pytest.param(
            "sh -c '{command}'", ConfigError, r"one machine: command_template=.*\{host\}", marks=pytest.mark.slow
        ),
    ],
    ids=["a host that does not start", "one machine under two names"],
)
def test_a_template_that_does_not_lead_to_each_machine_is_refused(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, template: str, error: type[Exception], says: str
) -> None:
    monkeypatch.setenv("NB_ACCELERATE_ENGINE", "command")
    monkeypatch.setenv("NB_ACCELERATE_COMMAND_TEMPLATE", template)
    with pytest.raises(error, match=says):
        notebook_launcher(os.getpid, progress="off")


def test_hosts_import_neither_torch_nor_ipython() -> None:
    code = (
        "import json, sys; from nb_accelerate.notebook.launch import host; host.host_facts.facts_of_machine(); "
        "print(json.dumps(sorted({'torch', 'IPython', 'numpy'} & set(sys.modules))))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == []


@pytest.mark.slow
def test_two_launches_at_once_have_hosts_of_their_own(machines: Machines) -> None:
    found: list[Any] = []

    def launch() -> None:
        found.append(notebook_launcher(lambda: int(os.environ["RANK"]), progress="off"))

    threads = [threading.Thread(target=launch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0, 1, 2]] * 2

"""`nb-accelerate status` and `nb-accelerate stop`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fixtures.kernels import Kernel

from nb_accelerate.cli import main
from nb_accelerate.cli.running import _printable, find_runs, is_interactive


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A command with two ranks that do not end by themselves, and their process ids."""
    script = tmp_path / "endless.py"
    script.write_text("import os, threading\nprint(os.getpid(), flush=True)\nthreading.Event().wait()\n")
    command = [sys.executable, "-m", "nb_accelerate", "launch", "--cpu", "--quiet", "--num_processes", "2", str(script)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as program:
        assert program.stdout is not None
        yield program, [int(program.stdout.readline()) for _ in range(2)]
        program.kill()


@pytest.mark.contract("commands: status, stop")
def test_a_command_is_shown_and_ended(job: tuple[subprocess.Popen[str], list[int]], capsys: pytest.CaptureFixture[str]):
    program, ranks = job
    assert main(["status"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.split()[0] == str(program.pid))
    assert row.split()[1] == "2"
    assert row.endswith("endless.py")
    run = next(run for run in find_runs() if run.pid == program.pid)
    assert (run.ranks, run.is_notebook) == ((0, 1), False)
    # The memory that the panel shows for a rank: the whole of its process, torch included.
    assert run.memory == pytest.approx(max(psutil.Process(rank).memory_info().rss for rank in ranks), rel=0.1)
    assert re.search(r" \d+ MB ", row)
    assert main(["stop", str(program.pid)]) == 0
    assert "ended 2 ranks" in capsys.readouterr().out
    program.wait(10)  # its exit code went to whoever waited first, which was the command above
    assert not any(map(psutil.pid_exists, ranks))
    assert not [run for run in find_runs() if run.pid == program.pid]


@pytest.mark.parametrize(
    ("command", "lives_on"),
    [
        ("python -m ipykernel_launcher -f k.json", True),
        ("/usr/bin/python3 /usr/local/bin/ipython", True),
        ("python -m IPython --pylab", True),
        ("python", True),
        ("python -i train.py", True),
        ("python train.py --ipython no", False),
        ("python -m train", False),
        ("python /env/bin/nb-accelerate launch train.py", False),
    ],
)
def test_what_somebody_types_into_lives_on_when_its_ranks_are_ended(command: str, lives_on: bool):
    assert is_interactive(command.split()) is lives_on


def test_only_runs_can_be_stopped(capsys: pytest.CaptureFixture[str]):
    assert main(["stop", str(os.getpid())]) == 2
    assert "run with pid" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.may_leave("descriptors")  # of the loop of an older jupyter_client, if an earlier test has ended the last
def test_a_notebook_loses_its_ranks_and_goes_on_with_its_cell(
    tmp_path: Path, new_kernel: Kernel, capsys: pytest.CaptureFixture[str]
):
    os.mkfifo(tmp_path / "gate")
    new_kernel.run("%load_ext nb_accelerate").ok()
    new_kernel.run("%%distributed -n 2\nkept = rank").ok()
    cell = new_kernel.start(f"print('waits', flush=True)\nopen({str(tmp_path / 'gate')!r}).read()")
    new_kernel.wait_for_output(cell, "waits")
    assert main(["stop", str(new_kernel.pid)]) == 0
    assert "ended 2 ranks" in capsys.readouterr().out
    (tmp_path / "gate").write_text("went on")
    assert new_kernel.finish(cell).ok().value == "'went on'"
    lost = new_kernel.run("%%distributed\nkept")
    assert (lost.error, "SIGTERM" in lost.message) == ("PoolError", True)
    new_kernel.run("%unload_ext nb_accelerate").ok()


def test_a_process_with_the_name_of_a_rank_is_no_run_and_status_prints_no_control_characters(
    tmp_path: Path, job: tuple[subprocess.Popen[str], list[int]], capsys: pytest.CaptureFixture[str]
):
    false_rank = tmp_path / "nb-rank0"
    false_rank.write_text("#!/bin/sh\necho started\nread line\n")
    false_rank.chmod(0o755)
    parent = ["/bin/sh", "-c", f"{false_rank}; true", "\x1b]0;title\x07"]
    with subprocess.Popen(parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "started\n"
        assert [run.pid for run in find_runs() if run.pid in (shell.pid, job[0].pid)] == [job[0].pid]
        shell.communicate("\n")
    assert _printable("\x1b]0;title\x07 run.py") == " ]0;title  run.py"

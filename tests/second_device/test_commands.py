"""The command line where there are two devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simgpu")]


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "nb_accelerate", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_env_names_both_devices():
    assert "simgpu:0 Simulated GPU, 2 GiB; simgpu:1 Simulated GPU, 2 GiB" in run("env")


def test_every_check_passes_with_a_rank_on_each_device():
    lines = run("test").splitlines()
    assert lines[0].startswith("2 ranks on SIMGPU")
    assert lines[-1].startswith("all 5 checks passed in ")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ["simgpu:0 0 0", "simgpu:1 1 1"]),
        (["--multi_gpu", "--num_processes=2", "--gpu_ids=1,0"], ["simgpu:0 0 1", "simgpu:1 1 0"]),
        (["--cpu", "--num_processes=2"], ["cpu", "cpu"]),
    ],
)
def test_a_script_has_a_rank_on_each_device_that_was_chosen(tmp_path: Path, flags: list[str], expected: list[str]):
    script = tmp_path / "where.py"
    script.write_text(
        "import torch\nfrom nb_accelerate import Accelerator\ndevice = Accelerator().device\n"
        "def place():\n    number = torch.simgpu.current_device()\n    return number, torch.simgpu._uuid(number)[-1]\n"
        "print(device, *(() if device.type == 'cpu' else place()), flush=True)"
    )
    said = run("launch", *flags, str(script)).splitlines()
    assert sorted(line.rpartition("] ")[2] for line in said if re.search(r"\b(cpu|simgpu)\b", line)) == expected

"""The command line beside accelerate's: help, and two ranks until each has printed a line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from turns import medians, ratios

_SCRIPT = """
from {package} import Accelerator
print(Accelerator(cpu=True).process_index, flush=True)
"""


def _run(*command: str) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=True)


def _until_printed(ranks: int, *command: str) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    ) as program:
        assert program.stdout is not None
        lines = [line for line in program.stdout if line.strip().isdigit()]
    if sorted(lines) != [f"{rank}\n" for rank in range(ranks)]:
        raise RuntimeError(f"{command} printed {lines}")


def measure() -> list[str]:
    ours = (sys.executable, "-m", "nb_accelerate")
    theirs = (sys.executable, "-m", "accelerate.commands.accelerate_cli")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    helps = {
        "python": (sys.executable, "-c", ""),
        "nb-accelerate --help": (*ours, "--help"),
        "nb-accelerate launch --help": (*ours, "launch", "--help"),
        "accelerate --help": (*theirs, "--help"),
    }
    found = ratios(medians({name: partial(_run, *command) for name, command in helps.items()}, rounds=5), base="python")
    with tempfile.TemporaryDirectory() as folder:
        scripts = {package: str(Path(folder) / f"with_{package}.py") for package in ("nb_accelerate", "accelerate")}
        for package, file in scripts.items():
            Path(file).write_text(_SCRIPT.format(package=package))
        # On CPUs accelerate starts one process by itself; several are started by torchrun.
        launches = {
            "accelerate launch, 1 process": (1, *theirs, "launch", "--cpu", "--num_processes=1", scripts["accelerate"]),
            "nb-accelerate launch, 1": (1, *ours, "launch", "--cpu", "--num_processes=1", scripts["nb_accelerate"]),
            "nb-accelerate launch, 2": (2, *ours, "launch", "--cpu", "--num_processes=2", scripts["nb_accelerate"]),
            "torchrun and accelerate, 2": (2, *torchrun, scripts["accelerate"]),
        }
        actions = {name: partial(_until_printed, *command) for name, command in launches.items()}
        return [*found, *ratios(medians(actions, rounds=3), base="accelerate launch, 1 process")]

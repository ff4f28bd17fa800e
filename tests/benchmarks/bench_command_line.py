"""The command line beside accelerate's: help, and scripts until the first line that they print."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from turns import medians, ratios

_SCRIPT = """
from {package} import Accelerator
print(Accelerator(cpu=True).process_index, flush=True)
"""


_ROUNDS = 5


def _run(*command: str) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=True)


def _first_line(ranks: int, *command: str) -> float:
    """Return the seconds until a rank of the script has printed; all of them do, and the command ends well."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ
    ) as program:
        assert program.stdout is not None
        printed = [
            (line, time.perf_counter() - began) for line in program.stdout if not line.strip().strip("0123456789")
        ]
    # Ranks that share a pipe write into one another's lines.
    numbers = sorted("".join(line.strip() for line, _ in printed))
    if program.returncode or numbers != [str(rank) for rank in range(ranks)]:
        raise RuntimeError(f"{command} printed {printed} and ended with {program.returncode}")
    return printed[0][1]


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
        # With --cpu accelerate starts one process whatever it is asked for; with --multi_gpu it starts all, which here
        # train on the CPU all the same, as the script says.
        several = ("launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0", scripts["accelerate"])
        launches = {
            "accelerate launch, 2 processes": (2, *theirs, *several),
            "nb-accelerate launch, 2": (2, *ours, "launch", "--cpu", "--num_processes=2", scripts["nb_accelerate"]),
            "torchrun and accelerate, 2": (2, *torchrun, scripts["accelerate"]),
            "accelerate launch, 1": (1, *theirs, "launch", "--cpu", "--num_processes=1", scripts["accelerate"]),
            "nb-accelerate launch, 1": (1, *ours, "launch", "--cpu", "--num_processes=1", scripts["nb_accelerate"]),
        }
        taken: dict[str, list[float]] = {name: [] for name in launches}
        for _ in range(_ROUNDS):
            for name, (ranks, *command) in launches.items():
                taken[name].append(_first_line(ranks, *command))
    seconds = {f"{name}, first line": statistics.median(values) for name, values in taken.items()}
    return [*found, *ratios(seconds, base="accelerate launch, 2 processes, first line")]

"""Who else holds memory of the GPUs this launch will use: the usual reason for "out of memory" at step one."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from nb_accelerate.launch.plan import LaunchPlan

_WORTH_SAYING = 512
"""MiB. Less is a driver context or a desktop."""

_QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")


def gpu_warnings(plan: LaunchPlan) -> tuple[str, ...]:
    """A line for each process that holds much GPU memory. Nothing on a CPU, or where nobody can be asked."""
    if plan.device != "cuda":
        return ()
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        command = [program, *_QUERY, f"--id={','.join(plan.gpus)}"]  # what others do on other devices is their affair
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return warnings_from(answer.stdout)


def warnings_from(table: str) -> tuple[str, ...]:
    """What to say about lines of ``pid, MiB``."""
    said = []
    for line in table.splitlines():
        pid, _, memory = line.partition(",")
        if not pid.strip().isdigit() or not memory.strip().isdigit() or int(memory) < _WORTH_SAYING:
            continue
        said.append(f"{_owner(int(pid))} holds {int(memory) / 1024:.1f} GiB of GPU memory")
    return tuple(said)


def _owner(pid: int) -> str:
    if pid == os.getpid():
        return "this notebook itself"
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({process.name()} of {process.username()})"
    except psutil.Error:
        return f"process {pid}"

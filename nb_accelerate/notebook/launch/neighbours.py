"""Find processes that hold memory of the GPUs of a launch: the usual reason for running out of it at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from nb_accelerate.notebook.launch.plan import LaunchPlan

_MIN_MEMORY = 512
"""MiB of GPU memory from which a process is named. A driver context or a desktop has less."""


def gpu_warnings(plan: LaunchPlan) -> tuple[str, ...]:
    """Return a line for each process that holds much GPU memory. None on a CPU, or where nobody can be asked."""
    return warnings_from(plan.kind.memory_users(plan.device_names))


def warnings_from(table: str) -> tuple[str, ...]:
    """Return a line about each process in a table with lines of ``pid, MiB``."""
    said = []
    for line in table.splitlines():
        pid, _, memory = line.partition(",")
        if not pid.strip().isdigit() or not memory.strip().isdigit() or int(memory) < _MIN_MEMORY:
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

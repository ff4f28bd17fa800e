"""Facts about this machine that a launch is planned with. Looking changes nothing: no device is touched."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from nb_accelerate.errors import MissingDependencyError


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What there is to run on.

    Attributes:
        num_cpus: cores this process may use.
        num_gpus: CUDA devices that are visible to it.
        loopback: name of the loopback network interface.
    """

    num_cpus: int
    num_gpus: int
    loopback: str


def look() -> MachineFacts:
    """The facts as they are now.

    Raises:
        MissingDependencyError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("torch", needed_for="starting ranks")
    return MachineFacts(num_cpus=_num_cpus(), num_gpus=_num_gpus(), loopback=_loopback())


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _num_gpus() -> int:
    # torch counts through NVML, without starting CUDA here. Importing it takes seconds, so a kernel that has not
    # done so is only made to when there is a driver to ask.
    if "torch" not in sys.modules and not Path("/proc/driver/nvidia").exists() and not Path("/dev/kfd").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def _loopback() -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == socket.AF_INET and address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"

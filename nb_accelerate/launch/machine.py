"""Facts about this machine that a launch is planned with. Looking changes nothing: no device is touched."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nb_accelerate.config.env import Environment
from nb_accelerate.config.file import read_config
from nb_accelerate.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Mapping


VISIBLE = "CUDA_VISIBLE_DEVICES"

_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvhost-ctrl", "/dev/dxg", "/dev/kfd")
"""Signs of a GPU's driver: NVIDIA's, in a container or sandbox, on a Jetson, on Windows' Linux, and AMD's."""


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What there is to run on, and what this process has done to itself.

    Attributes:
        num_cpus: cores this process may use.
        gpus: the CUDA devices that ranks could see, as ``CUDA_VISIBLE_DEVICES`` writes them.
        prefers_cpu: ``ACCELERATE_USE_CPU`` asks for the CPU.
        num_threads: what ``OMP_NUM_THREADS`` asks for, or None.
        loopback: name of the loopback network interface.
        can_fork: the system has ``fork``.
        is_rocm: the GPUs are AMD's; their runtime does not survive a fork.
        unforkable: why a rank forked from this process could not use its device, or "" if it could.
        shared_memory: bytes free in ``/dev/shm``, or None where there is none.
    """

    num_cpus: int
    gpus: tuple[str, ...] = ()
    prefers_cpu: bool = False
    num_threads: int | None = None
    loopback: str = "lo"
    can_fork: bool = True
    is_rocm: bool = False
    unforkable: str = ""
    shared_memory: int | None = None

    @property
    def num_gpus(self) -> int:
        """How many CUDA devices there are."""
        return len(self.gpus)


def look(env: Mapping[str, str]) -> MachineFacts:
    """The facts as they are now.

    Args:
        env: variables that ranks will have on top of ours; ``CUDA_VISIBLE_DEVICES`` changes what there is.

    Raises:
        ConfigError: ``ACCELERATE_USE_CPU`` is not a yes or no.
        MissingDependencyError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("torch", needed_for="starting ranks")
    shm = Path("/dev/shm")  # noqa: S108 - asked for its size
    file = read_config()
    variables = {**(file.as_variables() if file is not None else {}), **os.environ, **env}
    return MachineFacts(
        num_cpus=_num_cpus(),
        gpus=_gpus(variables.get(VISIBLE), changed=VISIBLE in env),
        prefers_cpu=bool(Environment(variables).use_cpu),
        num_threads=Environment(variables).num_threads,
        loopback=_loopback(),
        can_fork=hasattr(os, "fork"),
        is_rocm=_is_rocm(),
        unforkable=_what_forbids_forking(),
        shared_memory=shutil.disk_usage(shm).free if shm.is_dir() else None,
    )


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gpus(visible: str | None, *, changed: bool) -> tuple[str, ...]:
    # torch counts through NVML, without starting CUDA here. Importing it takes seconds, so a kernel that has not
    # done so is only made to when there is a driver to ask.
    has_driver = any(Path(driver).exists() for driver in _DRIVERS)
    if "torch" not in sys.modules and not has_driver:
        return ()
    import torch

    if visible is None:
        return tuple(map(str, range(torch.cuda.device_count())))
    named = devices_in(visible)
    is_built = torch.version.cuda is not None or torch.version.hip is not None
    if has_driver and is_built and (changed or "MIG-" in visible):
        return named  # torch cannot be asked what others will see, and would start CUDA to count slices of a GPU
    return named[: torch.cuda.device_count()]


def devices_in(visible: str) -> tuple[str, ...]:
    """The devices in a value of ``CUDA_VISIBLE_DEVICES``, as CUDA reads it.

    Nothing counts after an entry that is no device, and a process sees one slice of a GPU (MIG) at most.
    """
    named = tuple(takewhile(lambda device: device not in ("", "-1"), map(str.strip, visible.split(","))))
    return named[:1] if visible.startswith("MIG-") else named


def _is_rocm() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.version.hip is not None


def _what_forbids_forking() -> str:
    """Evidence that a device runtime lives in this process: what torch says, then what the system says."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA was used in this notebook"
    # Any code, not only torch's, may have loaded the driver; then a forked child cannot start it again.
    if is_loaded("libcuda.so.1"):
        return "the CUDA driver is loaded in this notebook"
    if any(_text_of(name).startswith("pt_autograd") for name in Path("/proc/self/task").glob("*/comm")):
        return "a backward pass ran in this notebook"
    return ""


def is_loaded(library: str) -> bool:
    """Is a shared library in this process' memory? By its name in the file (``DT_SONAME``), whoever loaded it."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return False
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _text_of(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # a thread that has just ended; or no /proc: not Linux, no CUDA either
        return ""


@functools.cache
def _loopback() -> str:
    return interface_of("127.0.0.1") or "lo"


def interface_of(address: str) -> str | None:
    """Name of the network interface that has `address`, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == address for entry in addresses):
            return name
    return None

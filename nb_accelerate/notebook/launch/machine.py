"""Find out what a launch is planned with: processors, devices, limits. No device is initialized by that."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.file import read_config
from nb_accelerate.base.config.versions import check_versions
from nb_accelerate.base.devices import DEVICE_KINDS
from nb_accelerate.base.devices.host import num_cpus
from nb_accelerate.base.version import __version__
from nb_accelerate.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.devices import DeviceKind


_MIN_MEMORY = 512  # MiB of GPU memory from which a process is named. A driver context or a desktop has less.


@dataclass(frozen=True, kw_only=True)
class VisibleDevices:
    """The devices of one type that ranks could see."""

    kind: DeviceKind
    names: tuple[str, ...]  # each of them, as the variable that selects among them writes it
    in_use: str = ""  # why a rank forked from this process could not use them, or "" if it could
    forbids_fork: str = ""  # why their runtime does not survive any fork, or "" if it does
    held: str = ""  # why no rank at all could use them, or "" if ranks could


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What a launch can use on this machine, and whether forks of this process could use it."""

    num_cpus: int
    accelerators: tuple[VisibleDevices, ...] = ()  # besides the processor, by type, the preferred type first
    prefers_cpu: bool = False  # ``ACCELERATE_USE_CPU`` asks for the CPU
    num_threads: int | None = None  # what ``OMP_NUM_THREADS`` asks for, or None
    loopback: str = "lo"  # name of the loopback network interface
    shared_memory: int | None = None  # bytes free in ``/dev/shm``, or None where there is none

    @property
    def num_gpus(self) -> int:
        """How many devices of the preferred type there are."""
        return len(self.accelerators[0].names) if self.accelerators else 0


def facts_here(env: Mapping[str, str]) -> MachineFacts:
    """Return the facts as they are now.

    Args:
        env: variables that ranks will have on top of ours; variables that select devices change the result.
    """
    check_versions()
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("torch", needed_for="starting ranks")
    shm = Path("/dev/shm")  # noqa: S108 - asked for its size
    file = read_config()
    variables = {**(file.as_variables() if file is not None else {}), **os.environ, **env}
    return MachineFacts(
        num_cpus=num_cpus(),
        accelerators=tuple(_accelerators(variables, env)),
        prefers_cpu=bool(Environment(variables).use_cpu),
        num_threads=Environment(variables).num_threads,
        loopback=interface_of("127.0.0.1") or "lo",
        shared_memory=shutil.disk_usage(shm).free if shm.is_dir() else None,
    )


def _accelerators(variables: Mapping[str, str], changed: Mapping[str, str]) -> list[VisibleDevices]:
    found = []
    for kind in DEVICE_KINDS:
        names = () if kind.is_host else kind.find(variables.get(kind.visibility), kind.visibility in changed)
        if names:
            in_use = kind.in_use()
            # Threads that torch's engine has for devices, which forks lack, were started by a backward pass.
            if not in_use and any(map(_is_autograds, Path("/proc/self/task").glob("*/comm"))):
                in_use = "a backward pass ran in this notebook"
            found.append(
                VisibleDevices(
                    kind=kind, names=names, in_use=in_use, forbids_fork=kind.forbids_fork(), held=kind.held()
                )
            )
    return found


def _is_autograds(name: Path) -> bool:
    try:
        return name.read_text(errors="replace").startswith("pt_autograd")
    except OSError:  # a thread that has just ended; or no /proc: not Linux, no CUDA either
        return False


def software_here() -> dict[str, str]:
    """Return the versions that have to be alike on all machines; "" for what is not installed."""
    return {"python": platform.python_version(), "torch": _version("torch"), "package": __version__}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has `address`; None if there is none, or the system lists none."""
    with contextlib.suppress(OSError):  # a sandbox without netlink sockets; `process/loopback.py` tells
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address == address for entry in addresses):
                return name
    return None


def gpu_warnings(kind: DeviceKind, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a line for each process that holds much GPU memory. None on a CPU, or where nobody can be asked."""
    return warnings_from(kind.memory_users(names))


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

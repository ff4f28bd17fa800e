"""What a host says about its machine, at first and when it is asked."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import socket
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from nb_accelerate.errors import ConfigError, MissingDependencyError
from nb_accelerate.errors.traceback_lines import is_users
from nb_accelerate.notebook.launch.machine import facts_here, software_here
from nb_accelerate.notebook.remote.connection_back import address_towards, family_of
from nb_accelerate.notebook.worker.connections import addresses_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType


_PROBE_TIMEOUT = 5.0  # seconds for another machine to accept a connection

# What the kernel is sent of `MachineFacts` beside the devices.
SENT_FACTS = ("num_cpus", "prefers_cpu", "num_threads", "loopback", "shared_memory")

# What the environment of a host says about how ranks are to be set up.
_VARIABLES = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def facts_of_machine() -> dict[str, Any]:
    """Return what the kernel is to know about this machine."""
    return {
        **software_here(),
        "monotonic": time.monotonic(),
        "network": _network(),
        "addresses": _addresses(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        **_devices(),
    }


def _network() -> str:
    """Return what only processes have in common that reach one another over the loopback interface; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""


def _addresses() -> dict[str, str]:
    """Return the interface of each address, those of IPv4 first."""
    # Bridges, such as Docker's, come last, because they lead to no machine. Link-local addresses ("%") are left out.
    interface_of = {}
    with contextlib.suppress(OSError):
        interfaces = sorted(
            psutil.net_if_addrs().items(), key=lambda entry: Path(f"/sys/class/net/{entry[0]}/bridge").exists()
        )
        for family in (socket.AF_INET, socket.AF_INET6):
            for name, entries in interfaces:
                addresses = [entry.address for entry in entries if entry.family == family]
                interface_of.update({address: name for address in addresses if "%" not in address})
    return interface_of


def _devices() -> dict[str, Any]:
    try:
        facts = facts_here({})
    except (ConfigError, MissingDependencyError) as error:  # the kernel raises it, with the name of this machine
        return {"devices": {}, "error": str(error)}
    devices = {devices.kind.name: devices.names for devices in facts.accelerators}
    return {"devices": devices, **{name: getattr(facts, name) for name in SENT_FACTS}}


def folders(cwd: str, path: list[str]) -> dict[str, Any]:
    """Return the folder and the search path of ranks: what the kernel has, as far as it is there too."""
    has_folder = bool(cwd) and Path(cwd).is_dir()
    existing = [entry for entry in path if Path(entry).exists()]
    return {
        "cwd": cwd if has_folder else str(Path.cwd()),
        "path": [*existing, *(entry for entry in sys.path if entry and entry not in existing)],
        "missing": [entry for entry in path if entry not in existing],
    }


def routes(others: list[str]) -> dict[str, Any]:
    """Return the addresses of this machine on the ways to those of others, in the same order."""
    own_addresses = _addresses()
    addresses = []
    for other in others:
        with contextlib.suppress(OSError):  # there is no way
            if other not in own_addresses:
                addresses.append(address_towards(other))
    return {"addresses": addresses}


def reach(targets: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Connect to other machines, given by names, addresses and ports, all at once.

    Returns the address and interface of this one on the way to each, in their order.
    """
    deadline = time.monotonic() + _PROBE_TIMEOUT
    interfaces = _addresses()
    with contextlib.ExitStack() as opened:
        probes = [opened.enter_context(socket.socket(family_of(address))) for _, address, _ in targets]
        for probe, (_, *target_address) in zip(probes, targets, strict=True):
            probe.setblocking(False)  # a thread for each would cost more than all else where machines are many
            with contextlib.suppress(OSError):  # `_way_by` connects again, and reports the error
                probe.connect(tuple(target_address))
        ways = [_way_by(probe, deadline, *target) for probe, target in zip(probes, targets, strict=True)]
    for way in ways:
        if "error" in way:
            return way
        way["interface"] = interfaces.get(way["own"], "")
    return {"ways": ways}


def _way_by(probe: socket.socket, deadline: float, name: str, address: str, port: int) -> dict[str, str]:
    poll = select.poll()
    poll.register(probe, select.POLLOUT)
    poll.poll(1000 * max(0.0, deadline - time.monotonic()))
    try:
        probe.connect((address, port))
    except OSError as error:
        if error.errno != errno.EISCONN:
            why = "timed out" if isinstance(error, BlockingIOError) else error.strerror or error
            return {"error": f"cannot reach {name} at {address}:{port}: {why}"}
    return {"own": probe.getsockname()[0]}


def connections(pids: list[int]) -> dict[str, Any]:
    """Return the addresses and ports at which ranks of this machine are connected."""
    addresses: list[tuple[str, int]] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # it has just ended
            addresses += addresses_of(psutil.Process(pid))
    return {"addresses": addresses}


def memory(pid: int | None) -> dict[str, Any]:
    with contextlib.suppress(psutil.Error):  # it has just ended
        return {"bytes": psutil.Process(pid).memory_info().rss if pid else 0}
    return {"bytes": 0}


def own_entries() -> list[str]:
    """Return what the search path of this process has besides what belongs to its Python, which a host has itself."""
    of_python = {Path(entry) for entry in (*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix)}
    entries = []
    for entry in sys.path:
        path = Path(entry or os.curdir).absolute()
        if isinstance(entry, str) and not of_python & {path, *path.parents}:
            entries.append(str(path))
    return entries


def own_modules(entries: Sequence[str]) -> dict[str, ModuleType]:
    """Return the modules of the user's that are imported here from entries of the search path, by their files there."""
    longest_first = sorted(entries, key=len, reverse=True)
    modules = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = Path(file) if isinstance(file, str) else Path()
        # Modules that torch makes without a file have a relative path.
        if path.is_absolute() and name not in ("__main__", "__mp_main__") and is_users(str(path)):
            entry = next((entry for entry in longest_first if path.is_relative_to(entry)), None)
            if entry is not None:
                modules[str(path.relative_to(entry))] = module
    return modules


def versions(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Return a checksum of the file of each module, as it is now; "" for one that is not there any more."""
    return {name: _checksum(Path(str(module.__file__))) for name, module in modules.items()}


def differing_files(files: Mapping[str, str], path: Sequence[str]) -> dict[str, Any]:
    """Return which files this machine does not have with these checksums where Python would look for them first."""
    names = []
    for name, checksum in files.items():
        candidates = (Path(entry, name) for entry in path)
        file = next((file for file in candidates if file.is_file()), None)
        if file is None or _checksum(file) != checksum:
            names.append(name)
    return {"names": names}


def _checksum(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""

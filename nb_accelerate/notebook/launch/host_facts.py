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
    from collections.abc import Iterator, Mapping, Sequence
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
    # Bridges, such as Docker's, are the last: they lead to no machine. Addresses of a link alone are left out.
    found = {}
    with contextlib.suppress(OSError):
        interfaces = sorted(
            psutil.net_if_addrs().items(), key=lambda one: Path(f"/sys/class/net/{one[0]}/bridge").exists()
        )
        for family in (socket.AF_INET, socket.AF_INET6):
            for name, entries in interfaces:
                found.update({one.address: name for one in entries if one.family == family and "%" not in one.address})
    return found


def _devices() -> dict[str, Any]:
    try:
        facts = facts_here({})
    except (ConfigError, MissingDependencyError) as error:  # which the kernel says, with the name of this machine
        return {"devices": {}, "error": str(error)}
    devices = {devices.kind.name: devices.names for devices in facts.accelerators}
    return {"devices": devices, **{name: getattr(facts, name) for name in SENT_FACTS}}


def place(cwd: str, path: list[str]) -> dict[str, Any]:
    """Return the folder and the search path of ranks: what the kernel has, as far as it is there too."""
    is_there = bool(cwd) and Path(cwd).is_dir()
    found = [entry for entry in path if Path(entry).exists()]
    return {
        "cwd": cwd if is_there else str(Path.cwd()),
        "path": [*found, *(entry for entry in sys.path if entry and entry not in found)],
        "missing": [entry for entry in path if entry not in found],
    }


def routes(others: list[str]) -> dict[str, Any]:
    """Return the addresses of this machine on the ways to those of others, in the same order."""
    own = _addresses()
    found = []
    for other in others:
        with contextlib.suppress(OSError):  # there is no way
            if other not in own:
                found.append(address_towards(other))
    return {"addresses": found}


def reach(places: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Connect to other machines, given by names, addresses and ports, all at once.

    Returns the address and interface of this one on the way to each, in their order.
    """
    until, interfaces = time.monotonic() + _PROBE_TIMEOUT, _addresses()
    with contextlib.ExitStack() as opened:
        probes = [opened.enter_context(socket.socket(family_of(address))) for _, address, _ in places]
        for probe, (_, *where) in zip(probes, places, strict=True):
            probe.setblocking(False)  # a thread for each would cost more than all else where machines are many
            with contextlib.suppress(OSError):  # the second attempt tells
                probe.connect(tuple(where))
        found = [_way_by(probe, until, *place) for probe, place in zip(probes, places, strict=True)]
    ways = [{**way, "interface": interfaces.get(way.get("own", ""), "")} for way in found]
    return next((way for way in found if "error" in way), {"ways": ways})


def _way_by(probe: socket.socket, until: float, name: str, address: str, port: int) -> dict[str, str]:
    poll = select.poll()
    poll.register(probe, select.POLLOUT)
    poll.poll(1000 * max(0.0, until - time.monotonic()))
    try:
        probe.connect((address, port))
    except OSError as error:
        if error.errno != errno.EISCONN:
            why = "timed out" if isinstance(error, BlockingIOError) else error.strerror or error
            return {"error": f"cannot reach {name} at {address}:{port}: {why}"}
    return {"own": probe.getsockname()[0]}


def connections(pids: list[int]) -> dict[str, Any]:
    """Return the addresses and ports at which ranks of this machine are connected."""
    found: list[tuple[str, int]] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += addresses_of(psutil.Process(pid))
    return {"addresses": found}


def memory(pid: int | None) -> dict[str, Any]:
    with contextlib.suppress(psutil.Error):  # it has just ended
        return {"bytes": psutil.Process(pid).memory_info().rss if pid else 0}
    return {"bytes": 0}


def own_entries() -> list[str]:
    """Return what the search path of this process has besides what belongs to its Python, which a host has itself."""
    own = {Path(entry) for entry in (*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix)}
    found = []
    for entry in sys.path:
        path = Path(entry or os.curdir).absolute()
        if isinstance(entry, str) and not own & {path, *path.parents}:
            found.append(str(path))
    return found


def own_modules(entries: Sequence[str]) -> dict[str, ModuleType]:
    """Return the modules of the user's that are imported here from entries of the search path, by their files there."""
    return {file: module for file, module in _found(sorted(entries, key=len, reverse=True)) if file}


def _found(entries: Sequence[str]) -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = Path(file) if isinstance(file, str) else Path()
        # What is no file of its own, as modules that torch makes, has no whole path.
        if path.is_absolute() and name not in ("__main__", "__mp_main__") and is_users(str(path)):
            yield next((str(path.relative_to(entry)) for entry in entries if path.is_relative_to(entry)), ""), module


def versions(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Return a checksum of the file of each module, as it is now; "" for one that is not there any more."""
    return {name: _checksum(Path(str(module.__file__))) for name, module in modules.items()}


def others(files: Mapping[str, str], path: Sequence[str]) -> dict[str, Any]:
    """Return which files this machine does not have with these checksums where Python would look for them first."""
    found = {name: next((file for entry in path if (file := Path(entry, name)).is_file()), None) for name in files}
    return {"names": [name for name, file in found.items() if file is None or _checksum(file) != files[name]]}


def _checksum(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""

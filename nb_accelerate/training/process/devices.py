"""Choose the device of this process, from the table in `base.devices`, and keep the process on the cores near it."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.devices import CPU, DEVICE_KINDS, find_kind
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.base.topology import Topology


def device_kind(name: str) -> DeviceKind:
    """Return the row for torch's name of a device type."""
    kind = find_kind(name)
    if kind is None:
        known = ", ".join(kind.name for kind in DEVICE_KINDS)
        raise ConfigError(f"Devices of type {name!r} are not known here. Known are: {known}.")
    return kind


def idle_kind() -> DeviceKind | None:
    """Return the kind of accelerator that ranks leave unused if their process group is one for the CPU, or None."""
    return next((kind for kind in DEVICE_KINDS if kind.backend and not kind.is_host and kind.is_available()), None)


def best_device() -> torch.device:
    """Return the best kind of device of this machine, without a number."""
    return torch.device(next(kind.name for kind in DEVICE_KINDS if kind.is_available()))


def choose_device(topology: Topology, *, cpu: bool, name: str | None = None) -> tuple[DeviceKind, torch.device]:
    """Choose the device of this process: the best kind there is, and of that kind the one with its local rank.

    A kind that cannot carry tensors between ranks (mps) is passed over when there is more than one rank. Where one
    device is visible it is this process' own: ``srun --gpus-per-task=1`` shows every task another one.

    Args:
        name: choose this type of device, and in a single process the one with its number; None for the best there is.
    """
    several = topology.world_size > 1
    if cpu:
        kind = CPU
    elif name is not None:
        kind = device_kind(name.partition(":")[0])
    else:
        kind = next(kind for kind in DEVICE_KINDS if kind.is_available() and (kind.backend or not several))
    if not several or not kind.count():
        return kind, torch.device(kind.name if cpu or name is None or several else name)
    index = topology.local_rank if kind.count() > 1 else 0
    if index >= kind.count():
        raise ConfigError(
            f"Rank {topology.rank} is process {index + 1} of {topology.local_world_size} on this machine, which has "
            f"{kind.count()} {kind.name} devices. Start at most {kind.count()} processes, or train on the CPU with "
            "Accelerator(cpu=True)."
        )
    return kind, torch.device(kind.name, index)


def device_of_group(
    bound: torch.device | None, topology: Topology, *, guessed: bool, cpu: bool
) -> tuple[DeviceKind, torch.device]:
    """Find the device that a process uses in a group that others made."""
    if bound is not None and not cpu:
        return device_kind(bound.type), bound
    if not guessed:
        return choose_device(topology, cpu=cpu)
    kind, first = choose_device(replace(topology, local_rank=0), cpu=cpu)
    if first.index is None:
        return kind, first
    # Number 0 is also what is current where nobody has chosen. Machines with as many ranks as devices are usual.
    return kind, torch.device(kind.name, kind.current_device() or topology.rank % kind.count())


logger = logging.getLogger("nb_accelerate")

_DEVICES = Path("/sys/bus/pci/devices")


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Let this process run only on cores of the NUMA node that its device is connected to.

    It leaves cores alone where the machine does not say which those are, and never takes one that the process was
    not allowed to use before (in a container, say).

    Args:
        local_process_index: the number of the device on this machine.
        verbose: log which cores; by default with ``ACCELERATE_DEBUG_MODE``.
    """
    bind_near(next(kind for kind in DEVICE_KINDS if kind.is_available()), local_process_index, verbose)


def bind_near(kind: DeviceKind, index: int, verbose: bool | None = None) -> None:
    """Do what `set_numa_affinity` does, for the device of a type with a number."""
    address = kind.pci_address(index)
    if address is None or not hasattr(os, "sched_setaffinity"):
        return
    try:
        cores = near_cores(address) & os.sched_getaffinity(0)
        if not cores:
            return
        os.sched_setaffinity(0, cores)
    except OSError:  # a sandbox may refuse it; the process is slower then, and no less right
        return
    if Environment().debug_mode if verbose is None else verbose:
        logger.info("Process %d runs on %d cores: %s", index, len(cores), sorted(cores))


def near_cores(address: str, devices: Path = _DEVICES) -> set[int]:
    """Return the cores of the NUMA node of a device on the PCI bus; none if the machine does not say."""
    try:
        text = (devices / address.lower() / "local_cpulist").read_text(encoding="ascii")
    except OSError:
        return set()
    return parse_cores(text)


def parse_cores(text: str) -> set[int]:
    """Return the numbers in a list of ranges such as ``0-3,8,10-11``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores.update(range(int(first), int(last or first) + 1))
    return cores

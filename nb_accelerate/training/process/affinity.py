"""Restrict this process to the processor cores of the NUMA node of its device."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.devices import DEVICE_KINDS

if TYPE_CHECKING:
    from nb_accelerate.base.devices import DeviceKind

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

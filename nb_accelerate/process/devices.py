"""What each kind of device can do, as a table.

A new device is one row. Nobody outside this file asks which kind a device is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.config.distributed import DistributedType
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nb_accelerate.topology import Topology


def _nothing(*_: object) -> None:
    """Do nothing, for rows that have nothing to do."""


def _pci_address(properties: Any) -> str | None:
    """Return an address as the system writes it, from properties in which torch tells it in numbers."""
    try:
        domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:  # torch of before 2.8
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _uuid(properties: Any) -> str | None:
    found = getattr(properties, "uuid", None)  # not in every build of torch
    return None if found is None else str(found)


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One row of the table.

    Attributes:
        name: torch's name for the device type.
        distributed_type: what several ranks on such devices are called.
        backend: the torch.distributed backend for them; None if there is none.
        is_available: whether this machine has such a device.
        count: how many; 0 means that the device has no number (the CPU).
        set_device: make the device with a number the current one.
        current_device: the number of the current one.
        get_rng_state: its random state as a byte tensor on the CPU; None if it has none of its own.
        set_rng_state: put such a state back.
        empty_cache: give cached memory back to the device.
        memory_allocated: bytes that tensors use on it now.
        utilisation: percent of the time in which it computed lately; None where torch cannot say. Raises whatever torch
            and the driver's library raise where that library is missing, or does not know this device.
        supports_bf16: whether it computes in bfloat16.
        pci_address: where the device with a number is on the PCI bus; None if that is not known.
        uuid: names the device with a number among all devices of all machines; None if it has no such name.
        pins_memory: whether copies from it to pinned memory of the host need not be waited for.
    """

    name: str
    distributed_type: DistributedType
    backend: str | None
    is_available: Callable[[], bool]
    count: Callable[[], int]
    set_device: Callable[[int], None] = _nothing
    current_device: Callable[[], int] = lambda: 0
    get_rng_state: Callable[[], torch.Tensor] | None = None
    set_rng_state: Callable[[torch.Tensor], None] = _nothing
    empty_cache: Callable[[], None] = _nothing
    memory_allocated: Callable[[], int] = lambda: 0
    utilisation: Callable[[], int] | None = None
    supports_bf16: Callable[[], bool] = lambda: True
    pci_address: Callable[[int], str | None] = lambda _: None
    uuid: Callable[[int], str | None] = lambda _: None
    pins_memory: bool = False

    @property
    def passes_device_ids(self) -> bool:
        """Whether DistributedDataParallel and nccl want to be told the number of the device."""
        return self.name in ("cuda", "xpu")


CPU = DeviceKind(
    name="cpu",
    distributed_type=DistributedType.MULTI_CPU,
    backend="gloo",
    is_available=lambda: True,
    count=lambda: 0,
)

# In order of preference. The lambdas look up torch's modules when they are called: builds of torch may lack
# one, and tests put stand-ins for hardware there.
# ruff: noqa: PLW0108
DEVICE_KINDS = (
    DeviceKind(
        name="cuda",
        pins_memory=True,
        distributed_type=DistributedType.MULTI_GPU,
        backend="nccl",
        # Not torch.cuda.is_available: it starts the driver, and no rank could be forked from this process any more.
        is_available=lambda: torch.cuda.device_count() > 0,
        count=lambda: torch.cuda.device_count(),
        set_device=lambda index: torch.cuda.set_device(index),
        current_device=lambda: torch.cuda.current_device(),
        get_rng_state=lambda: torch.cuda.get_rng_state(),
        set_rng_state=lambda state: torch.cuda.set_rng_state(state),
        empty_cache=lambda: torch.cuda.empty_cache(),
        memory_allocated=lambda: torch.cuda.memory_allocated(),
        utilisation=lambda: torch.cuda.utilization(),
        supports_bf16=lambda: torch.cuda.is_bf16_supported(),
        pci_address=lambda index: _pci_address(torch.cuda.get_device_properties(index)),
        uuid=lambda index: _uuid(torch.cuda.get_device_properties(index)),
    ),
    DeviceKind(
        name="xpu",
        distributed_type=DistributedType.MULTI_XPU,
        backend="xccl",
        is_available=lambda: torch.xpu.is_available(),
        count=lambda: torch.xpu.device_count(),
        set_device=lambda index: torch.xpu.set_device(index),
        current_device=lambda: torch.xpu.current_device(),
        get_rng_state=lambda: torch.xpu.get_rng_state(),
        set_rng_state=lambda state: torch.xpu.set_rng_state(state),
        empty_cache=lambda: torch.xpu.empty_cache(),
        memory_allocated=lambda: torch.xpu.memory_allocated(),
        # No utilisation: torch.xpu.utilization measures for a tenth of a second, in which the step would wait.
        supports_bf16=lambda: torch.xpu.is_bf16_supported(),
    ),
    DeviceKind(
        name="mps",
        distributed_type=DistributedType.NO,
        backend=None,
        is_available=lambda: torch.backends.mps.is_available(),
        count=lambda: 1,
        get_rng_state=lambda: torch.mps.get_rng_state(),
        set_rng_state=lambda state: torch.mps.set_rng_state(state),
        empty_cache=lambda: torch.mps.empty_cache(),
        memory_allocated=lambda: torch.mps.current_allocated_memory(),
    ),
    CPU,
)


def device_kind(name: str) -> DeviceKind:
    """Return the row for torch's name of a device type.

    Raises:
        ConfigError: there is no such row.
    """
    for kind in DEVICE_KINDS:
        if kind.name == name:
            return kind
    known = ", ".join(kind.name for kind in DEVICE_KINDS)
    raise ConfigError(f"Devices of type {name!r} are not known here. Known are: {known}.")


def idle_kind() -> DeviceKind | None:
    """Return the kind of accelerator that is of no use to ranks whose group is one for the CPU, or None."""
    return next((kind for kind in DEVICE_KINDS if kind.backend and kind is not CPU and kind.is_available()), None)


def best_device() -> torch.device:
    """Return the best kind of device of this machine, without a number."""
    return torch.device(next(kind.name for kind in DEVICE_KINDS if kind.is_available()))


def choose_device(topology: Topology, *, cpu: bool) -> tuple[DeviceKind, torch.device]:
    """Choose the device of this process: the best kind there is, and of that kind the one with its local rank.

    A kind that cannot carry tensors between ranks (mps) is passed over when there is more than one rank. Where one
    device is visible it is this process' own: ``srun --gpus-per-task=1`` shows every task another one.

    Raises:
        ConfigError: there are more processes on this machine than devices.
    """
    several = topology.world_size > 1
    usable = (kind for kind in DEVICE_KINDS if kind.is_available() and (kind.backend or not several))
    kind = CPU if cpu else next(usable)
    if not several or not kind.count():
        return kind, torch.device(kind.name)
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
    """Find the device that a process uses in a group that others made.

    Args:
        bound: the one that the group was told of.
        topology: the place of this process.
        guessed: whether nobody knows which of the processes on this machine it is.
        cpu: use the CPU.

    Raises:
        ConfigError: there are more processes on this machine than devices.
    """
    if bound is not None and not cpu:
        return device_kind(bound.type), bound
    if not guessed:
        return choose_device(topology, cpu=cpu)
    kind, first = choose_device(replace(topology, local_rank=0), cpu=cpu)
    if first.index is None:
        return kind, first
    # Number 0 is also what is current where nobody has chosen. Machines with as many ranks as devices are usual.
    return kind, torch.device(kind.name, kind.current_device() or topology.rank % kind.count())

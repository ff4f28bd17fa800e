"""A row of the device table, how its fields reach torch, and how a backend of torch.distributed behaves."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What carries tensors between ranks. Backends that are not those of a `DeviceKind` have the defaults.

    Attributes:
        name: its name in torch.distributed.
        returns_early: a collective may return before the other ranks have joined it, because it runs on the device.
        polls_store: ranks may wait for keys of the store in Python, which needs the interpreter. False for a backend
            whose own threads wait for keys.
        binds_device: ``init_process_group(device_id=...)`` connects at once, and needs a device for each rank.
        can_abort: collectives that wait for other ranks can be broken off (``ProcessGroup.abort``).
    """

    name: str
    returns_early: bool = True
    polls_store: bool = False
    binds_device: bool = False
    can_abort: bool = False


GLOO = Backend(name="gloo", returns_early=False, polls_store=True)
"""That of the host, and of devices that have none."""


def by_name(dotted: str) -> Callable[..., Any]:
    """Return a function that looks up ``module:function`` when it is called, and calls it.

    The module is imported at the first call, so a table of such functions needs no torch. The last name is looked up at
    every call: builds of torch may lack one, and tests put stand-ins for hardware there.
    """
    module, _, name = dotted.partition(":")

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args)

    return call


def name_and_memory(properties: Any) -> str:
    """Return ``NVIDIA H100 80GB HBM3, 79 GiB`` from properties of a device as torch gives them."""
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _nothing(*_: object) -> None:
    """Do nothing, for rows that have nothing to do."""


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One row: a type of device.

    The fields are in four groups. The first describes the device type. The second is for types whose runtime takes the
    place of torch.distributed, and is used in the ranks. The third is used in the notebook before ranks are started,
    and never starts the driver of a device. The fourth is used in the ranks.

    Attributes:
        name: torch's name for the device type.
        distributed_type: value of the `DistributedType` of several ranks on such devices.
        backend: the torch.distributed backend that carries its tensors between ranks; None if there is none.
        is_host: this is the processor: any number of ranks share it, and it needs no driver.
        uses_host_memory: it has no memory of its own.
        passes_device_ids: DistributedDataParallel and barriers are told the number of the device.
        pins_memory: host memory can be pinned for it, so that ``copy_(..., non_blocking=True)`` returns at once.
        has_storages: its tensors say in which memory they are, so that shared memory is known.
        mixed_precision: names of the precisions that autocast, the loss scaler of fp16 and torchao offer on it.
        compile_backends: those of torch.compile that work on it, by torch's names; empty where all may.
        all_or_one: ranks of a machine use all of them or one; its runtime knows no other number.

        start_runtime: for a runtime of its own, which takes the place of torch.distributed: starts it in this process,
            takes the `Topology` that the environment tells and returns the one that the runtime knows. None for others.
        make_collectives: makes the `Collectives` of such a runtime from a device. None for others.
        make_strategy: makes the `Strategy` for such a runtime from a device, its collectives and a
            `DistributedType`. None for others.
        end_step: makes a function that a prepared loader calls after each step with the number of the step and its
            batch, for a runtime that records operations and runs them later. None for others.

        visibility: environment variable that selects among the devices; "" if there is none.
        hidden: value of that variable that hides all devices; None if no value does.
        find: takes the value that the variable will have in the ranks (None if unset), and whether it differs from the
            value in this process; returns the devices that ranks will see, as the variable writes them.
        forbids_fork: says why its runtime does not survive a fork even if nothing has used it; "" if it does.
        in_use: says what shows that its runtime was started in this process, whose forks cannot use it; "" if nothing.
        held: says why no other process at all can use the devices before this one ends; "" if others can.
        pin: takes the devices of the ranks of this machine and a local rank; returns variables that give the rank its
            device. Empty for a type whose ranks see all devices and select one by their local rank.
        memory_users: takes devices as `find` gives them; returns lines of ``pid, MiB``, one for each process that
            holds memory of them.

        count: number of devices that this process sees; 0 means that the device has no number.
        get_rng_state: random state of the current device as a byte tensor on the CPU; None if it has none of its own.
        get_rng_states: states of all devices that this process sees, by number; None for types with one device.
        set_rng_state: set a random state; takes the state and, optionally, the number of the device.
        memory_allocated: bytes that tensors use on it now.
        memory_used: bytes that count against its limit: for the host, the resident memory of this process; else what
            tensors use; 0 if that is not known.
        memory_left: takes the number of ranks of this machine; returns bytes that this process could have in addition
            to what it uses; 0 if that is not known.
        memory_peak: the most bytes that this process used of it at a time; 0 if that is not known.
        memory_reserved: bytes that this process holds of it now, caches included.
        utilisation: percent of the time in which it computed lately; None where torch cannot say. Errors of torch and
            of the driver's library pass through, where that library is missing or does not know this device.
        reads_later: numbers that it computes are read a step later, because reading one at once would run what was
            recorded so far as a program of its own.
        pci_address: where the device with a number is on the PCI bus; None if that is not known.
        uuid: a name of the device with a number that is unique over all machines; None if it has none.
        describe: product name and memory of the device with a number; "" if torch does not say.
    """

    name: str
    distributed_type: str
    backend: Backend | None
    is_host: bool = False
    uses_host_memory: bool = False
    passes_device_ids: bool = False
    pins_memory: bool = False
    has_storages: bool = True
    mixed_precision: tuple[str, ...] = ("fp16", "bf16")
    compile_backends: tuple[str, ...] = ()
    label: str = "GPU"
    all_or_one: bool = False

    start_runtime: Callable[[Any], Any] | None = None
    make_collectives: Callable[[torch.device], Any] | None = None
    make_strategy: Callable[[torch.device, Any, Any], Any] | None = None
    end_step: Callable[[], Callable[[int, Any], None]] | None = None

    visibility: str = ""
    hidden: str | None = None
    find: Callable[[str | None, bool], tuple[str, ...]] = lambda *_: ()
    forbids_fork: Callable[[], str] = str
    in_use: Callable[[], str] = str
    held: Callable[[], str] = str
    pin: Callable[[Sequence[str], int], Mapping[str, str]] = lambda *_: {}
    memory_users: Callable[[Sequence[str]], str] = lambda _: ""

    is_available: Callable[[], bool] = lambda: True
    count: Callable[[], int] = lambda: 0
    is_initialized: Callable[[], bool] = lambda: False
    set_device: Callable[[int], None] = _nothing
    current_device: Callable[[], int] = lambda: 0
    get_rng_state: Callable[[], torch.Tensor] | None = None
    get_rng_states: Callable[[], Sequence[torch.Tensor]] | None = None
    set_rng_state: Callable[..., None] = _nothing
    empty_cache: Callable[[], None] = _nothing
    memory_allocated: Callable[[], int] = lambda: 0
    memory_reserved: Callable[[], int] = lambda: 0
    memory_used: Callable[[], int] = lambda: 0
    memory_left: Callable[[int], int] = lambda _: 0
    memory_peak: Callable[[], int] = lambda: 0
    utilisation: Callable[[], int] | None = None
    reads_later: bool = False
    supports_bf16: Callable[[], bool] = lambda: True
    supports_fp8: Callable[[], bool] = lambda: True
    pci_address: Callable[[int], str | None] = lambda _: None
    describe: Callable[[int], str] = lambda _: ""
    uuid: Callable[[int], str | None] = lambda _: None

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
    """What carries tensors between ranks. Backends that are not those of a `DeviceKind` have the defaults."""

    name: str  # in torch.distributed
    returns_early: bool = True  # a collective may return before the others have joined it: it runs on the device
    # Ranks may wait for keys of the store in Python, which needs the interpreter; else its own threads wait for keys.
    polls_store: bool = False
    binds_device: bool = False  # ``init_process_group(device_id=...)`` connects at once, with a device for each rank
    can_abort: bool = False  # collectives that wait for others can be broken off (``ProcessGroup.abort``)


GLOO = Backend(name="gloo", returns_early=False, polls_store=True)  # that of the host, and of devices that have none


def by_name(dotted: str) -> Callable[..., Any]:
    """Return a function that looks up ``module:function`` when it is called, and calls it."""
    # The module is imported at the first call, so a table of such functions needs no torch. The last name is looked up
    # at every call: builds of torch may lack one, and tests put stand-ins for hardware there.
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
    """One row: a type of device. The fields are in four groups."""

    name: str  # torch's name
    distributed_type: str  # value of the `DistributedType` of several ranks on such devices
    backend: Backend | None  # carries its tensors between ranks
    is_host: bool = False  # this is the processor: any number of ranks share it, and it needs no driver
    uses_host_memory: bool = False
    passes_device_ids: bool = False  # DistributedDataParallel and barriers are told the number of the device
    pins_memory: bool = False  # host memory can be pinned for it, so that ``copy_(..., non_blocking=True)`` returns
    has_storages: bool = True  # its tensors say in which memory they are, so that shared memory is known
    mixed_precision: tuple[str, ...] = ("fp16", "bf16")  # that autocast, the scaler of fp16 and torchao offer on it
    compile_backends: tuple[str, ...] = ()  # of torch.compile that work on it, by torch's names; empty where all may
    label: str = "GPU"
    all_or_one: bool = False  # ranks of a machine use all of them or one; its runtime knows no other number

    # In the ranks, for a runtime of its own that takes the place of torch.distributed; None for others.
    # Start it in this process: from the `Topology` of the environment to the one that the runtime knows.
    start_runtime: Callable[[Any], Any] | None = None
    make_collectives: Callable[[torch.device], Any] | None = None
    make_strategy: Callable[[torch.device, Any, Any], Any] | None = None  # of a device, collectives, `DistributedType`
    # Make what a prepared loader calls after each step with its number and its batch: operations are run later.
    end_step: Callable[[], Callable[[int, Any], None]] | None = None

    # In the notebook before ranks are started. They never start the driver of a device.
    visibility: str = ""  # environment variable that selects among the devices
    hidden: str | None = None  # value of that variable that hides all devices; None if no value does
    # The devices that ranks will see, as the variable writes them, of the value that it will have in the ranks (None if
    # unset), and whether it differs from the value in this process.
    find: Callable[[str | None, bool], tuple[str, ...]] = lambda *_: ()
    forbids_fork: Callable[[], str] = str  # why its runtime does not survive a fork even if nothing has used it
    in_use: Callable[[], str] = str  # what shows that its runtime was started in this process, which cannot fork then
    held: Callable[[], str] = str  # why no other process at all can use the devices before this one ends
    # Variables that give a rank its device, of the devices of this machine and the local rank. Empty where ranks see
    # all devices and select one by their local rank.
    pin: Callable[[Sequence[str], int], Mapping[str, str]] = lambda *_: {}
    memory_users: Callable[[Sequence[str]], str] = lambda _: ""  # a line of ``pid, MiB`` for each process that has some

    # In the ranks. A number is that of a device. Bytes are 0 where they are not known.
    is_available: Callable[[], bool] = lambda: True
    count: Callable[[], int] = lambda: 0  # of devices that this process sees; 0 means that the device has no number
    is_initialized: Callable[[], bool] = lambda: False
    set_device: Callable[[int], None] = _nothing
    current_device: Callable[[], int] = lambda: 0
    get_rng_state: Callable[[], torch.Tensor] | None = None  # of the current device, on the CPU; None if it has none
    get_rng_states: Callable[[], Sequence[torch.Tensor]] | None = None  # of all devices by number; None for one device
    set_rng_state: Callable[..., None] = _nothing  # of a state and, optionally, a number
    empty_cache: Callable[[], None] = _nothing
    memory_allocated: Callable[[], int] = lambda: 0  # bytes that tensors use now
    memory_used: Callable[[], int] = lambda: 0  # bytes that count against its limit: for the host, those of the process
    memory_left: Callable[[int], int] = lambda _: 0  # more bytes that one of so many ranks of this machine could have
    memory_peak: Callable[[], int] = lambda: 0  # the most bytes that this process used at a time
    # Percent of the time in which it computed lately. Errors of torch and of the driver's library pass through.
    utilisation: Callable[[], int] | None = None
    reads_later: bool = False  # its numbers are read a step later: reading one at once would end a recorded program
    supports_bf16: Callable[[], bool] = lambda: True
    supports_fp8: Callable[[], bool] = lambda: True
    pci_address: Callable[[int], str | None] = lambda _: None
    describe: Callable[[int], str] = lambda _: ""  # product name and memory
    uuid: Callable[[int], str | None] = lambda _: None  # unique over all machines

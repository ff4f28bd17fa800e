"""`torch.simgpu`: for simgpu what `torch.cuda` is for CUDA."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from simgpu.library import library

if TYPE_CHECKING:
    from collections.abc import Iterable

NAME = "simgpu"

Device = torch.device | str | int | None

_this: Any = sys.modules[__name__]

# --- the runtime

_initialized = False  # torch.utils.checkpoint reads it to know whether the device has random states to keep


def _lazy_init() -> None:
    library.initialize()
    _this._initialized = True


def _is_in_bad_fork() -> bool:
    return library.is_bad_fork()


def init() -> None:
    _lazy_init()


def is_initialized() -> bool:
    return library.is_initialized() and not library.is_bad_fork()


def is_available() -> bool:
    return library.device_count() > 0


def device_count() -> int:
    return library.device_count()


# --- the current device


def _index(device: Device) -> int:
    """The number of a device; of the current one where it has none."""
    number = device if isinstance(device, int) or device is None else torch.device(device).index
    return library.current_device() if number is None or number < 0 else number


def current_device() -> int:
    _lazy_init()
    return library.current_device()


def set_device(device: Device) -> None:
    _lazy_init()
    library.set_device(_index(device))


def _exchange_device(device: int) -> int:
    return library.exchange_device(device)


_maybe_exchange_device = _exchange_device


class device(AbstractContextManager[None]):
    """Make a device the current one for a while."""

    def __init__(self, device: Device) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        _lazy_init()
        self.prev_idx = library.exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        library.exchange_device(self.prev_idx)


@dataclass(frozen=True)
class DeviceProperties:
    name: str
    total_memory: int
    multi_processor_count: int = 1


def get_device_properties(device: Device = None) -> DeviceProperties:
    library.check_ordinal(_index(device))
    return DeviceProperties("Simulated GPU", library.memory_limit())


def get_device_name(device: Device = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: Device = None) -> tuple[int, int]:
    return (0, 0)


def utilization(device: Device = None) -> int:
    return 0


def _uuid(index: int) -> str:
    return library.uuid(index)


# --- streams and events


def synchronize(device: Device = None) -> None:
    _lazy_init()
    library.synchronize(_index(device))


class Stream(torch.Stream):
    """A stream of its own, on the current device if not on another."""

    def __new__(cls, device: Device = None, priority: int = 0) -> Stream:
        _lazy_init()
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """A point of a stream. Not a class: torch compares times of its own `torch.Event` only."""
    return torch.Event(device=torch.device(NAME), enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Device = None) -> torch.Stream:
    _lazy_init()
    return torch.accelerator.current_stream(torch.device(NAME, _index(device)))


def default_stream(device: Device = None) -> torch.Stream:
    _lazy_init()
    here = current_stream(device)
    return torch.Stream(stream_id=0, device_index=here.device_index, device_type=here.device_type)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else stream


# --- random numbers


default_generators: tuple[torch.Generator, ...] = ()


def _generator(device: Device) -> torch.Generator:
    return library.default_generator(_index(device))


def get_rng_state(device: Device = NAME) -> torch.Tensor:
    _lazy_init()
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = NAME) -> None:
    _lazy_init()
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(each) for each in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for each, state in enumerate(new_states):
        set_rng_state(state, each)


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for each in range(device_count()):
        _generator(each).manual_seed(int(seed))


def seed() -> int:
    return _generator(None).seed()


def initial_seed() -> int:
    return _generator(None).initial_seed()


# --- memory


def memory_allocated(device: Device = None) -> int:
    return library.memory_use(_index(device))[0]


def max_memory_allocated(device: Device = None) -> int:
    return library.memory_use(_index(device))[1]


def memory_reserved(device: Device = None) -> int:
    return library.memory_use(_index(device))[2]


def max_memory_reserved(device: Device = None) -> int:
    return library.memory_use(_index(device))[3]


def reset_peak_memory_stats(device: Device = None) -> None:
    library.reset_peaks(_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    _lazy_init()
    total = library.memory_limit()
    return total - memory_reserved(device), total


def memory_stats(device: Device = None) -> dict[str, int]:
    allocated, most_allocated, reserved, most_reserved = library.memory_use(_index(device))
    return {
        "allocated_bytes.all.current": allocated,
        "allocated_bytes.all.peak": most_allocated,
        "reserved_bytes.all.current": reserved,
        "reserved_bytes.all.peak": most_reserved,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def empty_cache() -> None:
    library.empty_cache()


# --- autocast


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def register() -> None:
    """Make it `torch.simgpu`, and give tensors and modules ``simgpu()`` and ``is_simgpu``."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _this)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )

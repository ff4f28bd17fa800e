"""The row of simgpu in the table of devices. Imports no torch: notebooks plan launches with it."""

from __future__ import annotations

import os
import sys
from typing import Any

from nb_accelerate.base.devices import DEVICE_KINDS, Backend, DeviceKind
from nb_accelerate.base.devices.kind import by_name, name_and_memory


def _visible_devices(visible: str | None, changed: bool) -> tuple[str, ...]:
    installed = tuple(map(str, range(int(os.environ.get("SIMGPU_DEVICES") or "0"))))
    return installed if visible is None else tuple(name for name in visible.split(",") if name in installed)


def _module() -> Any:
    """torch's module of the device, or None where torch is not imported, or was imported without it."""
    return getattr(sys.modules.get("torch"), "simgpu", None)


def _is_available() -> bool:
    import torch  # noqa: F401

    module = _module()
    return module is not None and module.device_count() > 0


def _in_use() -> str:
    module = _module()
    return "simgpu was used in this notebook" if module is not None and module.is_initialized() else ""


def _memory_left(_ranks: int) -> int:
    module = _module()
    free, _ = module.mem_get_info()
    return free + module.memory_reserved() - module.memory_allocated()


def _is_initialized() -> bool:
    module = _module()
    return module is not None and module.is_initialized()


SIMGPU = DeviceKind(
    name="simgpu",
    distributed_type="MULTI_GPU",
    backend=Backend(name="simccl", binds_device=True, can_abort=True),
    passes_device_ids=True,
    pins_memory=True,
    visibility="SIMGPU_VISIBLE_DEVICES",
    hidden="",
    find=_visible_devices,
    in_use=_in_use,
    is_available=_is_available,
    count=by_name("torch.simgpu:device_count"),
    is_initialized=_is_initialized,
    set_device=by_name("torch.simgpu:set_device"),
    current_device=by_name("torch.simgpu:current_device"),
    get_rng_state=by_name("torch.simgpu:get_rng_state"),
    get_rng_states=by_name("torch.simgpu:get_rng_state_all"),
    set_rng_state=by_name("torch.simgpu:set_rng_state"),
    empty_cache=by_name("torch.simgpu:empty_cache"),
    memory_allocated=by_name("torch.simgpu:memory_allocated"),
    memory_used=by_name("torch.simgpu:memory_allocated"),
    memory_left=_memory_left,
    memory_peak=by_name("torch.simgpu:max_memory_allocated"),
    utilisation=by_name("torch.simgpu:utilization"),
    supports_bf16=by_name("torch.simgpu:is_bf16_supported"),
    supports_fp8=lambda: False,
    describe=lambda index: name_and_memory(by_name("torch.simgpu:get_device_properties")(index)),
    uuid=by_name("torch.simgpu:_uuid"),
)


def add() -> None:
    """Add the row, before those of torch's own devices; once."""
    if SIMGPU not in DEVICE_KINDS:
        DEVICE_KINDS.insert(0, SIMGPU)


def remove() -> None:
    """Take the row out again."""
    if SIMGPU in DEVICE_KINDS:
        DEVICE_KINDS.remove(SIMGPU)

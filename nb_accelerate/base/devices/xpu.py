"""GPUs of Intel."""

from __future__ import annotations

import functools
import importlib.metadata
import sys

from nb_accelerate.base.devices.kind import Backend, DeviceKind, by_name, name_and_memory


def _visible_devices(visible: str | None, changed: bool) -> tuple[str, ...]:
    """Return the devices that ranks will see; see `DeviceKind.find`. Imports torch only if it is a build for them."""
    if not _is_built():
        return ()
    import torch

    count = torch.xpu.device_count()
    if visible is None:
        return tuple(map(str, range(count)))
    named = tuple(device.strip() for device in visible.split(",") if device.strip())
    # The driver has read the variable when torch counted; only what ranks alone will be told is taken as it is written.
    return named if changed and count else named[:count]


def _is_built() -> bool:
    torch = sys.modules.get("torch")
    if torch is not None:
        return bool(torch.xpu._is_compiled())  # noqa: SLF001 - is_available() starts the driver where there is one
    try:
        return _torch_version().endswith("+xpu")
    except importlib.metadata.PackageNotFoundError:
        return False


@functools.cache
def _torch_version() -> str:
    """Read the metadata of torch once: that takes a millisecond, and each launch asks."""
    return importlib.metadata.version("torch")


XPU = DeviceKind(
    name="xpu",
    distributed_type="MULTI_XPU",
    backend=Backend(name="xccl"),
    passes_device_ids=True,
    pins_memory=True,
    visibility="ZE_AFFINITY_MASK",
    find=_visible_devices,
    forbids_fork=lambda: "the runtime of Intel GPUs does not survive a fork",
    is_available=by_name("torch.xpu:is_available"),
    count=by_name("torch.xpu:device_count"),
    is_initialized=by_name("torch.xpu:is_initialized"),
    set_device=by_name("torch.xpu:set_device"),
    current_device=by_name("torch.xpu:current_device"),
    get_rng_state=by_name("torch.xpu:get_rng_state"),
    get_rng_states=by_name("torch.xpu:get_rng_state_all"),
    set_rng_state=by_name("torch.xpu:set_rng_state"),
    empty_cache=by_name("torch.xpu:empty_cache"),
    memory_allocated=by_name("torch.xpu:memory_allocated"),
    memory_used=by_name("torch.xpu:memory_allocated"),
    # No utilisation: torch.xpu.utilization measures for a tenth of a second, in which the step would wait.
    supports_bf16=by_name("torch.xpu:is_bf16_supported"),
    describe=lambda index: name_and_memory(by_name("torch.xpu:get_device_properties")(index)),
)

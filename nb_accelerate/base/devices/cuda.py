"""GPUs of NVIDIA, and of AMD through ROCm, which torch calls CUDA too."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.devices.kind import Backend, DeviceKind, by_name, name_and_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

# Signs of a GPU's driver: NVIDIA's, in a container or sandbox, on a Jetson, on Windows' Linux, and AMD's.
_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/nvhost-ctrl", "/dev/dxg", "/dev/kfd")

_QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")

_QUERY_TIMEOUT = 5.0  # seconds that nvidia-smi has to answer; it takes a fraction of one


def visible_devices(visible: str | None, changed: bool) -> tuple[str, ...]:
    """Return the devices that ranks will see; see `DeviceKind.find`."""
    # torch counts through NVML, without starting CUDA here. Importing it takes seconds, so a process that has not done
    # so is only made to when there is a driver to ask.
    has_driver = any(os.path.exists(driver) for driver in _DRIVERS)  # noqa: PTH110 - pathlib raises where it may not look
    if "torch" not in sys.modules and not has_driver:
        return ()
    import torch

    if visible is None:
        return tuple(map(str, range(torch.cuda.device_count())))
    named = devices_in(visible)
    is_built = torch.version.cuda is not None or torch.version.hip is not None
    if has_driver and is_built and (changed or "MIG-" in visible):
        return named  # torch cannot be asked what others will see, and would start CUDA to count slices of a GPU
    return named[: torch.cuda.device_count()]


def devices_in(visible: str) -> tuple[str, ...]:
    """Return the devices in a value of ``CUDA_VISIBLE_DEVICES``, as CUDA reads it.

    Entries after one that is not a device are ignored, and a process sees at most one slice of a GPU (MIG).
    """
    named = tuple(takewhile(lambda device: device not in ("", "-1"), map(str.strip, visible.split(","))))
    return named[:1] if visible.startswith("MIG-") else named


def _in_use() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA was used in this notebook"
    # Any code, not only torch's, may have loaded the driver; then a forked child cannot start it again.
    return "the CUDA driver is loaded in this notebook" if is_loaded("libcuda.so.1") else ""


def is_loaded(library: str) -> bool:
    """Return whether a shared library (by its ``DT_SONAME``) is loaded in this process, by any package."""
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _memory_users(devices: Sequence[str]) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        command = [program, *_QUERY, f"--id={','.join(devices)}"]  # what others do on other devices is their affair
        return subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def pci_address(properties: Any) -> str | None:
    """Return an address as the system writes it, from properties in which torch tells it in numbers."""
    try:
        domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    except AttributeError:  # not in every build of torch
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _properties(index: int) -> Any:
    return by_name("torch.cuda:get_device_properties")(index)


def _memory_left(_ranks: int) -> int:
    import torch

    free, _ = torch.cuda.mem_get_info()
    return int(free) + int(torch.cuda.memory_reserved()) - int(torch.cuda.memory_allocated())


def _supports_fp8() -> bool:
    import torch

    return torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)  # Ada and newer


CUDA = DeviceKind(
    name="cuda",
    distributed_type="MULTI_GPU",
    backend=Backend(name="nccl", binds_device=True, can_abort=True),
    passes_device_ids=True,
    pins_memory=True,
    mixed_precision=("fp16", "bf16", "fp8"),
    visibility="CUDA_VISIBLE_DEVICES",
    hidden="",
    find=visible_devices,
    forbids_fork=lambda: (
        "the runtime of these GPUs does not survive a fork"
        if getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None) is not None
        else ""
    ),
    in_use=_in_use,
    memory_users=_memory_users,
    # Not torch.cuda.is_available: it starts the driver, and no rank could be forked from this process any more.
    is_available=lambda: bool(by_name("torch.cuda:device_count")() > 0),
    count=by_name("torch.cuda:device_count"),
    is_initialized=by_name("torch.cuda:is_initialized"),
    set_device=by_name("torch.cuda:set_device"),
    current_device=by_name("torch.cuda:current_device"),
    get_rng_state=by_name("torch.cuda:get_rng_state"),
    get_rng_states=by_name("torch.cuda:get_rng_state_all"),
    set_rng_state=by_name("torch.cuda:set_rng_state"),
    empty_cache=by_name("torch.cuda:empty_cache"),
    memory_allocated=by_name("torch.cuda:memory_allocated"),
    memory_used=by_name("torch.cuda:memory_allocated"),
    memory_left=_memory_left,
    memory_peak=by_name("torch.cuda:max_memory_allocated"),
    utilisation=by_name("torch.cuda:utilization"),
    supports_bf16=by_name("torch.cuda:is_bf16_supported"),
    supports_fp8=_supports_fp8,
    pci_address=lambda index: pci_address(_properties(index)),
    describe=lambda index: name_and_memory(_properties(index)),
    uuid=lambda index: str(found) if (found := getattr(_properties(index), "uuid", None)) is not None else None,
)

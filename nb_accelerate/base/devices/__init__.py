"""What each type of device can do, as a table, without importing torch.

A new device is one row of `DEVICE_KINDS`, and a file for what its row calls. The notebook half plans launches with it,
and the training half runs on it.
"""

from __future__ import annotations

import sys

from nb_accelerate.base.devices.cuda import CUDA
from nb_accelerate.base.devices.host import memory_left, memory_peak, memory_used
from nb_accelerate.base.devices.kind import GLOO, Backend, DeviceKind, by_name
from nb_accelerate.base.devices.tpu import TPU
from nb_accelerate.base.devices.xla import XLA
from nb_accelerate.base.devices.xpu import XPU

__all__ = ["CPU", "DEVICE_KINDS", "GLOO", "Backend", "DeviceKind", "backend_named", "find_kind"]


# The GPU of an Apple computer. It carries nothing between ranks: one rank uses it.
MPS = DeviceKind(
    name="mps",
    distributed_type="NO",
    backend=None,
    uses_host_memory=True,
    # Torch is imported on such computers only.
    find=lambda _visible, _changed: ("0",) if sys.platform == "darwin" and MPS.is_available() else (),
    forbids_fork=lambda: "Metal does not survive a fork",
    is_available=by_name("torch.backends.mps:is_available"),
    count=lambda: 1,
    get_rng_state=by_name("torch.mps:get_rng_state"),
    set_rng_state=by_name("torch.mps:set_rng_state"),
    empty_cache=by_name("torch.mps:empty_cache"),
    memory_allocated=by_name("torch.mps:current_allocated_memory"),
    memory_used=by_name("torch.mps:current_allocated_memory"),
)


CPU = DeviceKind(
    name="cpu",
    distributed_type="MULTI_CPU",
    backend=GLOO,
    is_host=True,
    uses_host_memory=True,
    mixed_precision=("fp16", "bf16", "fp8"),
    memory_used=memory_used,
    memory_left=memory_left,
    memory_peak=memory_peak,
)

DEVICE_KINDS: list[DeviceKind] = [CUDA, XPU, MPS, XLA, TPU, CPU]  # the last one is there on every machine


def find_kind(name: str) -> DeviceKind | None:
    """Return the row for torch's name of a device type, or None if there is none."""
    for kind in DEVICE_KINDS:
        if kind.name == name:
            return kind
    return None


def backend_named(name: str) -> Backend:
    """Return the backend of torch.distributed with a name; one with the defaults where no type of device has it."""
    return next(
        (kind.backend for kind in DEVICE_KINDS if kind.backend and kind.backend.name == name), Backend(name=name)
    )

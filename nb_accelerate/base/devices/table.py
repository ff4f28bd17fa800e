"""All types of devices, in order of preference."""

from __future__ import annotations

from nb_accelerate.base.devices.cuda import CUDA
from nb_accelerate.base.devices.host import memory_left, memory_peak, memory_used
from nb_accelerate.base.devices.kind import GLOO, Backend, DeviceKind
from nb_accelerate.base.devices.mps import MPS
from nb_accelerate.base.devices.tpu import TPU
from nb_accelerate.base.devices.xla import XLA
from nb_accelerate.base.devices.xpu import XPU

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

DEVICE_KINDS: list[DeviceKind] = [CUDA, XPU, MPS, XLA, TPU, CPU]
"""The last one is there on every machine."""


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

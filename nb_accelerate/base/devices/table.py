"""All types of devices, in order of preference."""

from __future__ import annotations

from nb_accelerate.base.devices.cuda import CUDA
from nb_accelerate.base.devices.host import memory_left, memory_peak, memory_used
from nb_accelerate.base.devices.kind import DeviceKind
from nb_accelerate.base.devices.mps import MPS
from nb_accelerate.base.devices.tpu import TPU
from nb_accelerate.base.devices.xla import XLA
from nb_accelerate.base.devices.xpu import XPU

CPU = DeviceKind(
    name="cpu",
    distributed_type="MULTI_CPU",
    backend="gloo",
    is_host=True,
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

"""TPUs, and what else torch_xla computes on through its runtime, PJRT. Its CPU device is there for tests.

The variable ``PJRT_DEVICE`` names the type of device that the runtime uses. Where it is not set, chips are looked for
on the PCI bus, as torch_xla does. Neither imports torch_xla, which takes seconds, nor starts its runtime, which holds
chips until the process ends.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from pathlib import Path

from nb_accelerate.base.devices.kind import Backend, DeviceKind, by_name

_VARIABLE = "PJRT_DEVICE"

_BOUNDS = "TPU_PROCESS_BOUNDS"

_BUS = Path("/sys/bus/pci/devices")

_VENDOR = "0x1ae0"  # Google's number on the PCI bus

# Numbers of TPU v2 to v7 on the PCI bus, as in ``torch_xla._internal.tpu``.
_CHIPS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})


def _usable_devices(type_named: str | None, _changed: bool) -> tuple[str, ...]:
    if importlib.util.find_spec("torch_xla") is None:
        return ()
    named = (type_named or "").split("_")[0].upper()
    if named == "CPU":
        return ("0",)
    if named not in ("", "TPU"):
        return ()
    chips = num_chips()
    return tuple(map(str, range(_num_processes(chips) or 1))) if named or chips else ()


def _num_processes(chips: int) -> int:
    """Return how many processes can share the chips of this machine; ``xmp.spawn`` starts as many."""
    # `TPU_PROCESS_BOUNDS` limits them: a product such as `"2,2,1"` over all machines. Where its words are no numbers,
    # torch_xla says so.
    bounds = os.environ.get(_BOUNDS, "").split(",")
    if not all(word.strip().isdecimal() for word in bounds):
        return chips
    return min(chips, math.prod(map(int, bounds)))


def num_chips() -> int:
    """Return how many TPU chips are on the PCI bus of this machine."""
    count = 0
    for vendor in _BUS.glob("*/vendor"):
        try:
            if vendor.read_text().strip() == _VENDOR:
                count += vendor.with_name("device").read_text().strip() in _CHIPS
        except OSError:  # it was taken out of the machine meanwhile
            continue
    return count


def is_started() -> bool:
    """Return whether this process has started the runtime of XLA, by a tensor say."""
    torch_xla = sys.modules.get("torch_xla")
    extension = getattr(torch_xla, "_XLAC", None)
    return extension is not None and bool(extension._xla_runtime_is_initialized())  # noqa: SLF001 - nothing public says


def _held() -> str:
    if not is_started() or os.environ.get(_VARIABLE, "").upper().startswith("CPU"):
        return ""
    return "the XLA runtime was started in this notebook, and holds the TPU until the notebook's kernel ends"


XLA = DeviceKind(
    name="xla",
    distributed_type="XLA",
    backend=Backend(name="xla"),
    mixed_precision=("bf16",),
    compile_backends=("openxla", "aot_eager", "eager"),
    label="XLA device",
    all_or_one=True,
    has_storages=False,
    start_runtime=by_name("nb_accelerate.training.process.xla:start_runtime"),
    make_collectives=by_name("nb_accelerate.training.comm.xla:XLACollectives"),
    make_strategy=by_name("nb_accelerate.training.strategies.xla:choose_strategy"),
    end_step=by_name("nb_accelerate.training.data.xla:StepEnd"),
    visibility=_VARIABLE,
    find=_usable_devices,
    in_use=lambda: "the XLA runtime was started in this notebook" if is_started() else "",
    held=_held,
    is_available=lambda: bool(_usable_devices(os.environ.get(_VARIABLE), False)),
    is_initialized=is_started,
    current_device=by_name("nb_accelerate.training.process.xla:current_device"),
    reads_later=True,
)

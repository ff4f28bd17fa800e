"""The GPU of an Apple computer. It carries nothing between ranks: one rank uses it."""

from __future__ import annotations

import sys

from nb_accelerate.base.devices.kind import DeviceKind, by_name

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
    memory_reserved=by_name("torch.mps:driver_allocated_memory"),
)

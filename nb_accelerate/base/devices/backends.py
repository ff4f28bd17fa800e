"""How the backends of torch.distributed behave, as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One row. A backend without a row has the defaults.

    Attributes:
        device: torch's name for the type of device whose tensors it carries; "" if unknown.
        returns_early: a collective may return before the other ranks have joined it, because it runs on the device.
        polls_store: ranks may wait for keys of the store in Python, which needs the interpreter. False for a backend
            whose own threads wait for keys.
        binds_device: ``init_process_group(device_id=...)`` connects at once, and needs a device for each rank.
        can_abort: collectives that wait for other ranks can be broken off (``ProcessGroup.abort``).
    """

    name: str
    device: str = ""
    returns_early: bool = True
    polls_store: bool = False
    binds_device: bool = False
    can_abort: bool = False


BACKENDS: list[Backend] = [
    Backend(name="gloo", device="cpu", returns_early=False, polls_store=True),
    Backend(name="nccl", device="cuda", binds_device=True, can_abort=True),
    Backend(name="xccl", device="xpu"),
    Backend(name="tpu_dist", device="tpu"),
]


def backend_named(name: str) -> Backend:
    """Return the row of a backend, by its name in torch.distributed; one with the defaults if it has none."""
    return next((backend for backend in BACKENDS if backend.name == name), Backend(name=name))

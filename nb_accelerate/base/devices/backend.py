"""How a backend of torch.distributed behaves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What carries tensors between ranks. Backends that are not those of a `DeviceKind` have the defaults.

    Attributes:
        name: its name in torch.distributed.
        returns_early: a collective may return before the other ranks have joined it, because it runs on the device.
        polls_store: ranks may wait for keys of the store in Python, which needs the interpreter. False for a backend
            whose own threads wait for keys.
        binds_device: ``init_process_group(device_id=...)`` connects at once, and needs a device for each rank.
        can_abort: collectives that wait for other ranks can be broken off (``ProcessGroup.abort``).
    """

    name: str
    returns_early: bool = True
    polls_store: bool = False
    binds_device: bool = False
    can_abort: bool = False


GLOO = Backend(name="gloo", returns_early=False, polls_store=True)
"""That of the host, and of devices that have none."""

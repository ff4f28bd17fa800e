"""What each type of device can do, as a table, without importing torch.

A new device is one row of `DEVICE_KINDS`, and a file for what its row calls. The notebook half plans launches with it,
and the training half runs on it.
"""

from nb_accelerate.base.devices.kind import GLOO, Backend, DeviceKind
from nb_accelerate.base.devices.table import CPU, DEVICE_KINDS, backend_named, find_kind

__all__ = ["CPU", "DEVICE_KINDS", "GLOO", "Backend", "DeviceKind", "backend_named", "find_kind"]

"""Ranks that are threads of one process, as `xmp.spawn` makes them, with XLA's own collectives on its CPU device.

Stock torch_xla cannot: threads wait for one another while they hold what the others need. Each line of `environ` and
`install` takes one such wait away:

- its pool has a thread for each core, and starves where there are fewer cores than devices need;
- scalars 0 and 1 are written into programs, which then differ between ranks;
- a buffer that is given to a program waits, in its destructor, for the other ranks;
- XLA's collectives on the CPU meet by the number of a compiled program, so two threads that compile the same one at the
  same time never meet. They record, compile and submit under a lock, and wait for the device before they take it;
- a submission without operations waits for device 0, whichever is meant, so that there is always one.
"""

import os
import threading
from collections.abc import Sequence


def environ(devices: int) -> dict[str, str]:
    """Return the variables of a process with so many devices."""
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        "XLA_THREAD_POOL_SIZE": str(max(8, 4 * devices)),
        "XLA_NO_SPECIAL_SCALARS": "1",
        "XLA_ENABLE_PARAM_ALIASING": "0",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


def install() -> None:
    """Let threads of this process submit programs one after the other. Before the runtime starts."""
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    extension = torch_xla._XLAC
    lock = threading.Lock()
    step, several = extension._xla_step_marker, extension._xla_sync_multi

    def idle(device: str) -> None:
        extension._xla_wait_device_ops(xm.xla_real_devices([device]))

    def step_marker(device: str, devices: Sequence[str] = (), wait: bool = True, reset_scope: bool = True, **_: object):
        device = device or extension._xla_get_default_device()
        idle(device)
        with lock:
            pending = torch.zeros((), device=device)
            step(device, list(devices), wait=False, reset_scope=reset_scope)
        if wait:
            idle(device)
        del pending

    def sync_multi(tensors: list[torch.Tensor], devices: list[str], wait: bool = True, sync_xla_data: bool = True):
        step_marker("", wait=True)
        several(tensors, devices, wait=wait, sync_xla_data=sync_xla_data)

    extension._xla_step_marker, extension._xla_sync_multi = step_marker, sync_multi


def run(check: str) -> None:
    """Call a function of `two_cores_checks` in a thread for each of two devices, by torch_xla's own `launch`."""
    os.environ |= environ(2)
    import torch_xla
    import two_cores_checks

    install()
    torch_xla.launch(getattr(two_cores_checks, check), start_method="fork")

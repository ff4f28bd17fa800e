"""TPUs by torch_tpu, the successor of torch_xla: an ordinary type of device with its own backend. Experimental.

No TPU was at hand. What its authors document is done: the launch variables, one process for each chip, which sees it as
``tpu:0``, and processes that are spawned. Where torch_xla is installed too, that is used.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys

from nb_accelerate.base.devices.kind import Backend, DeviceKind
from nb_accelerate.base.devices.xla import num_chips

_SECONDS = 120  # for a process that imports torch_tpu and looks at the chips, and does not start them

# Prints, in its last line, what torch_tpu sets before ranks are started. It does so once in a process, for good.
_VARIABLES = (
    "import json, os, sys; before = dict(os.environ); import torch, torch_tpu; from torch.tpu import distributed; "
    "distributed.set_tpu_launch_env(nproc_per_node=int(sys.argv[1])); "
    "print('\\n' + json.dumps({name: os.environ[name] for name in os.environ if before.get(name) != os.environ[name]}))"
)


def _chips(_visible: str | None, _changed: bool) -> tuple[str, ...]:
    return tuple(map(str, range(num_chips()))) if importlib.util.find_spec("torch_tpu") is not None else ()


@functools.cache
def _launch_variables(number: int) -> tuple[tuple[str, str], ...]:
    """Return what ranks have to agree on, in a process of its own: the notebook is left as it is."""
    command = [sys.executable, "-c", _VARIABLES, str(number)]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=True, env=dict(os.environ)
        )
    except subprocess.CalledProcessError as error:
        message = error.stderr.strip().rpartition("\n")[2]
        raise OSError(f"torch_tpu could not prepare a launch of {number} processes: {message}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"torch_tpu has not prepared a launch of {number} processes in {_SECONDS} s.") from error
    return tuple(json.loads(run.stdout.strip().rpartition("\n")[2]).items())


TPU = DeviceKind(
    name="tpu",
    distributed_type="XLA",
    backend=Backend(name="tpu_dist"),
    mixed_precision=("bf16",),
    label="TPU chip",
    all_or_one=True,
    has_storages=False,
    find=_chips,
    forbids_fork=lambda: "torch_tpu asks for spawned processes",
    pin=lambda devices, _local_rank: dict(_launch_variables(len(devices))) if len(devices) > 1 else {},
    is_available=lambda: bool(_chips(None, False)),
    count=lambda: 1,
)

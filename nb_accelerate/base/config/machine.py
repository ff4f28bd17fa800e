"""The configuration of a machine that nobody was asked about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware that the defaults of the questions depend on.

    Attributes:
        num_xla_devices: TPU chips, or other devices of torch_xla, that can have a process each.
    """

    num_gpus: int = 0
    num_cpus: int = 1
    has_tpu: bool = False
    num_xla_devices: int = 0
    has_deepspeed: bool = False


def default_config(machine: Machine, mixed_precision: str = "no") -> dict[str, Any]:
    """Return the configuration of a machine, with the default answer to every question."""
    if machine.num_gpus:
        kind, devices = ("MULTI_GPU" if machine.num_gpus > 1 else "NO"), machine.num_gpus
    else:
        kind, devices = ("XLA" if machine.num_xla_devices else "NO"), machine.num_xla_devices
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": max(1, devices),
        "rdzv_backend": "static",
        "same_network": False,
        "use_cpu": devices == 0,
    }

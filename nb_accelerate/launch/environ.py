"""The environment of a rank: torchrun's variables, so that any code written for torchrun finds what it knows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.launch.plan import LaunchPlan

_KERNELS_OWN = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "JPY_INTERRUPT_EVENT", "PYTEST_CURRENT_TEST")
"""Variables that say who the kernel is; a rank is somebody else."""


def rank_environ(
    plan: LaunchPlan, rank: int, *, base: Mapping[str, str], extra: Mapping[str, str], port: int, run_id: str
) -> dict[str, str]:
    """The whole environment of one rank.

    Args:
        plan: the launch.
        rank: which one.
        base: the kernel's environment as it is now.
        extra: what the user asked for; wins over everything.
        port: where the rendezvous store listens, on loopback.
        run_id: names this launch.
    """
    size = str(plan.num_processes)
    environ = {key: value for key, value in base.items() if key not in _KERNELS_OWN}
    environ.setdefault("OMP_NUM_THREADS", str(plan.num_threads))
    environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Every rank is a client of the store; rank 0 serves it on a socket that was bound for it.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": plan.loopback,
        "NCCL_SOCKET_IFNAME": plan.loopback,
    }
    if plan.mixed_precision != "no":
        environ["ACCELERATE_MIXED_PRECISION"] = plan.mixed_precision
    environ |= {key: os.fspath(value) for key, value in extra.items()}
    return environ

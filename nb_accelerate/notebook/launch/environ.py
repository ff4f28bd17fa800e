"""Compute the environment of a rank. It has torchrun's variables, for code that was written for torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.base.config.env import DEVICE
from nb_accelerate.base.config.file import CONFIG_FILE, read_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.notebook.launch.plan import LaunchPlan
    from nb_accelerate.notebook.launch.rendezvous import Rendezvous

# Variables that describe the kernel's process, and are not true of a rank.
_KERNELS_OWN = ("JPY_PARENT_PID", "JPY_SESSION_NAME", "JPY_INTERRUPT_EVENT", "PYTEST_CURRENT_TEST")


def rank_environ(
    plan: LaunchPlan,
    rendezvous: Rendezvous,
    local_rank: int,
    *,
    base: Mapping[str, str],
    extra: Mapping[str, str],
    attempt: int = 0,
    max_restarts: int = 0,
) -> dict[str, str]:
    """Return the whole environment of one rank.

    Args:
        extra: the user's variables; they override all others except variables that select devices.
    """
    environ = {key: value for key, value in base.items() if key not in _KERNELS_OWN}
    environ.setdefault("OMP_NUM_THREADS", str(plan.num_threads))
    environ |= {
        **plan.topology_of(local_rank, node_rank=rendezvous.node_rank).as_variables(),
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        "TORCHELASTIC_RUN_ID": rendezvous.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
    }
    # For programs that ranks start: they find the store at the master's address, where a rank of ours serves it. On one
    # machine nothing listens there, and they serve one by themselves.
    if rendezvous.num_nodes > 1:
        environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    else:
        environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if not (rendezvous.keeps_interface and variable in environ):
            environ[variable] = rendezvous.interface
    if plan.kind.is_host:
        environ["ACCELERATE_USE_CPU"] = "true"
    elif "ACCELERATE_USE_CPU" in environ:  # and devices were asked for, by number or by name
        environ["ACCELERATE_USE_CPU"] = "false"
    environ.pop(DEVICE, None)  # of this process, if it is a rank itself
    if plan.is_kind_asked_for and not plan.kind.is_host:
        environ[DEVICE] = plan.device
    if plan.mixed_precision != "no":
        environ["ACCELERATE_MIXED_PRECISION"] = plan.mixed_precision
    environ |= {key: os.fspath(value) for key, value in extra.items()}
    return environ | plan.device_variables(local_rank)  # chosen among the devices that were asked for


def variables_of_file(given: Mapping[str, str]) -> dict[str, str]:
    """Return what the configuration file of this process says to an `Accelerator`, for ranks that do not read it.

    Where the environment of this process says otherwise, that counts, as for ranks here.

    Args:
        given: the user's variables. They may name another file, which ranks read.
    """
    file = None if CONFIG_FILE in given else read_config()
    said = {} if file is None else file.as_variables({**os.environ, **given})
    return {name: os.environ.get(name) or value for name, value in said.items()}


def working_directory() -> str:
    """Return the working directory of this process; "" if it was deleted, which ranks then report."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""

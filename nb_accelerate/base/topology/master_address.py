"""Where processes meet that SLURM's ``srun`` or an MPI launcher has started, which do not say so themselves."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.topology.topology import Topology

_FIRST_PORT, _NUM_PORTS = 20000, 10000  # ports below the range of ephemeral ports (from 32768 on Linux)

_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")

# The first node of a list such as ``gpu[07-09,12]-x,login``.
_FIRST_NODE = re.compile(r"(?P<prefix>[^,\[]+)(?:\[(?P<number>[0-9]+)[^\]]*\](?P<suffix>[^,\[]*))?")


def master_address(variables: Mapping[str, str], topology: Topology) -> tuple[str, int] | None:
    """Return the address and the port at which all processes of a job meet; None where it cannot be known.

    In a job of SLURM that is the node of the first process, and the port follows from the numbers of job and step.
    Processes of MPI know nothing of other machines: they meet on their own, at a port that follows from their parent.
    """
    if variables.get("RANK"):  # of a launcher that sets the address too, or of somebody who forgot it
        return None
    nodes = next((variables[name] for name in _NODE_LISTS if variables.get(name)), "")
    if nodes and "SLURM_PROCID" in variables:
        job, step = (_number(variables.get(name, "")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        return first_node(nodes), _FIRST_PORT + (job * 31 + step) % _NUM_PORTS
    if topology.num_nodes == 1 and topology.world_size > 1:
        return "127.0.0.1", _FIRST_PORT + os.getppid() % _NUM_PORTS
    return None


def node_in_step(variables: Mapping[str, str], num_nodes: int) -> tuple[int, str] | None:
    """Return the number of this node in a step of SLURM with a task on each node, and the first node; None for none."""
    nodes, tasks = (_number(variables.get(name, "")) for name in ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"))
    node, names = variables.get("SLURM_NODEID", ""), variables.get("SLURM_STEP_NODELIST", "")
    if not (1 < nodes == tasks == num_nodes and node.isdecimal() and names):
        return None
    return int(node), first_node(names)


def first_node(nodes: str) -> str:
    """Return the first name in a list of nodes as SLURM writes it: ``gpu07`` of ``gpu[07-09,12]``."""
    match = _FIRST_NODE.match(nodes)
    assert match is not None
    return f"{match['prefix']}{match['number'] or ''}{match['suffix'] or ''}"


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0

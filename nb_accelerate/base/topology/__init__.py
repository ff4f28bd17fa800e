"""Rank, local rank, world size and machine of a process. Imports no torch."""

from nb_accelerate.base.topology.topology import Topology, read_topology

__all__ = ["Topology", "read_topology"]

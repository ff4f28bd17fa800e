"""Who am I: the place of this process among all processes of a run. Imports no torch."""

from nb_accelerate.topology.topology import Topology, read_topology

__all__ = ["Topology", "read_topology"]

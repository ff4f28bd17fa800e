"""What is known once per process: the only module-level state of the package.

Every `Accelerator` in a process shares one `ProcessContext`: what the process is. It is made by
`nb_accelerate.process.setup`, and forgotten when the process leaves its group. What is trained outlives that: prepared
objects stay prepared, so `training` is a slot of its own. `reset` forgets both.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nb_accelerate.config.distributed import DistributedType
from nb_accelerate.config.env import Environment
from nb_accelerate.topology import read_topology

if TYPE_CHECKING:
    import torch

    from nb_accelerate.config.kwargs import InitProcessGroupKwargs
    from nb_accelerate.devices import DeviceKind
    from nb_accelerate.topology import Topology


class Slot:
    """Room for one thing that a higher level keeps for this process. Forgotten together with the context.

    Attributes:
        value: the thing, or None.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None


@dataclass(frozen=True, kw_only=True)
class ProcessContext:
    """What this process is.

    Attributes:
        topology: its place among all processes.
        kind: what its device can do.
        device: where its model and batches live.
        group: the default process group, or None when it is alone.
        owns_group: whether we made that group, and so may destroy it.
        options: what the group was asked to be made with.
        newest: what the newest `Accelerator` chose, for those who ask without having one.
        pid: the process this describes. A forked child inherits the variable, but is not that process.
    """

    topology: Topology
    kind: DeviceKind
    device: torch.device
    group: dist.ProcessGroup | None
    owns_group: bool
    options: InitProcessGroupKwargs
    newest: Slot = field(default_factory=Slot)
    pid: int = field(default_factory=os.getpid)

    @property
    def is_here(self) -> bool:
        """Whether it describes the process that asks."""
        return self.pid == _pid

    @property
    def distributed_type(self) -> DistributedType:
        """What this setup is called."""
        return DistributedType(self.kind.distributed_type if self.topology.world_size > 1 else DistributedType.NO)


_context: ProcessContext | None = None

training = Slot()
"""What every `Accelerator` of this process shares about training: a ``SharedTraining``, or None."""

_pid = os.getpid()
"""Of this process. Every backward compares it, and a system call costs more than the rest of what we add there."""


def _forked() -> None:
    global _pid  # noqa: PLW0603 - a fork changes it, and nothing else does
    _pid = os.getpid()
    training.value = None  # what is trained in the other process


os.register_at_fork(after_in_child=_forked)


def current() -> ProcessContext | None:
    """Return what this process is, or None if nobody asked yet.

    A description is out of date, and None is returned, when it was inherited by a fork or when the process group
    it names is no longer torch's default one.
    """
    if _context is None or not _context.is_here or _context.group is not default_group():
        return None
    return _context


def topology_here() -> Topology:
    """Return the place of this process, without connecting it: before that, what its launcher's variables say."""
    known = current()
    return known.topology if known else read_topology(Environment().variables)


def install(context: ProcessContext) -> ProcessContext:
    """Make ``context`` the description of this process."""
    global _context  # noqa: PLW0603 - the one module-level variable of the package
    _context = context
    return context


def leave() -> None:
    """Forget what this process is; the next `Accelerator` looks again. The process group stays."""
    global _context  # noqa: PLW0603 - as above
    _context = None


def reset() -> None:
    """Forget what this process is and what is trained in it. The process group stays."""
    leave()
    training.value = None


def default_group() -> dist.ProcessGroup | None:
    """Return torch's default process group, or None if there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None

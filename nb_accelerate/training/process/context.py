"""The rank, device and process group of this process, kept in a module-level variable.

Every `Accelerator` in a process shares one `ProcessContext`. `training.process.setup` makes it, and it is
forgotten when the process leaves its group. Prepared objects stay prepared then, so what is known about training is
kept apart, in `Rank.training`. `reset` forgets both.

A runtime may make a rank of each thread instead (``xmp.spawn`` does, where a process has several XLA devices). Such a
thread calls `become_rank`, and what is kept here is its own from then on.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.topology import read_topology

if TYPE_CHECKING:
    import torch

    from nb_accelerate.base.config.kwargs import InitProcessGroupKwargs
    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.base.topology import Topology


@dataclass(kw_only=True, eq=False)
class ProcessContext:
    """The rank, device and process group of one process.

    Attributes:
        group: the default process group, or None when it is alone.
        newest: what the newest `Accelerator` chose, for functions that have no `Accelerator` at hand.
        pid: process id. A forked child inherits the object, but is another process.
    """

    topology: Topology
    kind: DeviceKind
    device: torch.device
    group: dist.ProcessGroup | None
    owns_group: bool
    options: InitProcessGroupKwargs
    newest: Any = None
    pid: int = field(default_factory=os.getpid)

    @property
    def is_here(self) -> bool:
        """Whether it describes this process."""
        return self.pid == _pid

    @property
    def distributed_type(self) -> DistributedType:
        """What accelerate calls this setup."""
        is_distributed = self.topology.world_size > 1 or self.kind.start_runtime is not None
        return DistributedType(self.kind.distributed_type if is_distributed else DistributedType.NO)


class Rank:
    """The context of one rank, and what its `Accelerator` objects share about training: a ``SharedTraining``.

    `rehearsal` is the ``Recorder`` of a rank that is rehearsed (`training.rehearsal`), and None in all others.
    """

    def __init__(self) -> None:
        self.context: ProcessContext | None = None
        self.training: Any = None
        self.rehearsal: Any = None


class _Thread(threading.local):
    """The rank of the thread that reads it: the process's rank, unless the thread is a rank by itself."""

    def __init__(self) -> None:
        self.rank = _process


_process = Rank()
_thread = _Thread()

# Process id. Every backward compares it, and a system call costs more than all else that this package adds there.
_pid = os.getpid()


def _forked() -> None:
    global _pid  # noqa: PLW0603 - a fork changes it, and nothing else does
    # The context itself stays: it has the pid of the parent, by which `current` knows that it does not count.
    _pid = os.getpid()
    _thread.rank.training = None  # it is about the models of the parent process


os.register_at_fork(after_in_child=_forked)


def become_rank() -> None:
    """Let this thread be a rank of its own, if it is not yet, with nothing known about it."""
    if _thread.rank is _process:
        _thread.rank = Rank()


def this_rank() -> Rank:
    """Return what is known about the rank that this thread runs for."""
    return _thread.rank


def rehearsal() -> Any:
    """Return the ``Recorder`` of this rank if it is rehearsed; None if it runs."""
    return _thread.rank.rehearsal


def current() -> ProcessContext | None:
    """Return the context of this process, or None if there is none yet.

    One that was inherited by a fork, or whose process group is no longer torch's default one, does not count.
    """
    context = _thread.rank.context
    if context is None or not context.is_here or context.group is not default_group():
        return None
    return context


def topology_here() -> Topology:
    """Return the numbers of this process without connecting it: before that, as its launcher's variables say."""
    process = current()
    return process.topology if process else read_topology(Environment().variables)


def install(context: ProcessContext) -> ProcessContext:
    _thread.rank.context = context
    return context


def leave() -> None:
    """Forget the context; the next `Accelerator` makes another. The process group stays."""
    _thread.rank.context = None


def reset() -> None:
    """Forget the context and what is trained in this process. The process group stays."""
    leave()
    _thread.rank.training = None


def default_group() -> dist.ProcessGroup | None:
    """Return torch's default process group, or None if there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None

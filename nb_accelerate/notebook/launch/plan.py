"""Plan a launch: decide what was left open, from its options and facts about the machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nb_accelerate.base.devices import CPU, DEVICE_KINDS, GLOO
from nb_accelerate.base.start_methods import START_METHODS, Conditions, choose_method
from nb_accelerate.base.topology import Topology
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.launch.machine import VisibleDevices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.config.launch import LaunchOptions
    from nb_accelerate.base.devices import DeviceKind
    from nb_accelerate.base.start_methods import StartMethod
    from nb_accelerate.notebook.launch.machine import MachineFacts

_SHM = "/dev/shm"  # noqa: S108 - a name to say

# Bytes. Containers get 64 MiB by default, which one loader worker with a few large batches fills.
_LITTLE_SHARED_MEMORY = 128 << 20
_LITTLE = (
    f"{_SHM} has only {{}} MiB free: loader workers that fill it die with SIGBUS. Use num_workers=0, or give the "
    "container more (docker run --shm-size=2g)"
)

# A forked rank inherits OpenMP's state without its threads: more than one hangs in the first large operation.
_THREADS_OF_FORKS = 1

_PROCESSOR = VisibleDevices(kind=CPU, names=())


_FEW_ON_A_CORE = 4  # Ranks. With more of them, to start takes long enough to say why.


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A launch, ready to be started."""

    num_processes: int  # ranks on this machine, and on each other one
    num_nodes: int  # machines
    method: StartMethod
    reason: str  # why the method was chosen; "" where it is what one expects
    kind: DeviceKind
    device_names: tuple[str, ...]  # the device of each rank of this machine, by local rank; empty on the processor
    num_threads: int  # intra-op threads of each rank
    num_cpus: int = 0  # cores of this machine; 0 if not known
    loopback: str
    mixed_precision: str  # what `Accelerator()` takes in the ranks by default
    is_kind_asked_for: bool = False  # ranks are told the type of their device, because they might choose another one
    visibility: Mapping[str, str] = field(default_factory=dict)  # variables that select devices
    can_fork: bool = False  # nothing is known here by which forks of this process would fail
    warnings: tuple[str, ...] = ()  # what the user should know before it starts
    machines: tuple[str, ...] = ()  # names of machines where an engine has placed hosts; their ranks are all "here"

    @property
    def device(self) -> str:
        """Torch's name for the type of device that ranks compute on."""
        return self.kind.name

    @property
    def backend(self) -> str:
        """What carries tensors between ranks."""
        return (self.kind.backend or GLOO).name

    @property
    def world_size(self) -> int:
        return self.topology_of(0).world_size

    def topology_of(self, local_rank: int, *, node_rank: int = 0) -> Topology:
        return Topology.of_machine(local_rank, self.num_processes, node_rank=node_rank, num_nodes=self.num_nodes)

    def forked(self, reason: str) -> LaunchPlan:
        """Return the plan for ranks that are forks of this process, where `can_fork`."""
        return replace(self, method=START_METHODS["fork"], reason=reason, num_threads=_THREADS_OF_FORKS)

    def device_variables(self, local_rank: int) -> dict[str, str]:
        return {**self.visibility, **self.kind.pin(self.device_names, local_rank)}

    @property
    def brief(self) -> str:
        """The plan in a few words: ``2 processes on CPU, bf16``; with the start method if there is a reason for it."""
        number = f"{self.num_processes} process{'es' if self.num_processes > 1 else ''}"
        parts = [f"{number} on {self._where}"]
        crowd = self.num_processes // (self.num_cpus or self.num_processes)
        parts += [f"{crowd} on each core"] if crowd > _FEW_ON_A_CORE else []
        parts += [f"{self.method.name} ({self.reason})"] if self.reason else []
        parts += [self.mixed_precision] if self.mixed_precision != "no" else []
        return ", ".join(parts)

    def describe(self) -> str:
        """Return the plan in one line: ``2 ranks on CPU, forkserver, gloo on loopback, bf16``."""
        ranks = "1 rank" if self.num_processes == 1 else f"{self.num_processes} ranks"
        method = f"{self.method.name} ({self.reason})" if self.reason else self.method.name
        parts = [f"{ranks} on {self._where}", method]
        if self.world_size > 1 and self.kind.start_runtime is None:
            between_machines = self.num_nodes > 1 or len(self.machines) > 1
            parts.append(self.backend if between_machines else f"{self.backend} on loopback")
        if self.mixed_precision != "no":
            parts.append(self.mixed_precision)
        return ", ".join(parts)

    @property
    def _where(self) -> str:
        if self.machines:
            return f"{self.device.upper()} of {', '.join(self.machines)}"
        return f"{self.device.upper()}{f' on each of {self.num_nodes} machines' if self.num_nodes > 1 else ''}"


def make_plan(options: LaunchOptions, facts: MachineFacts, *, may_copy: bool = True) -> LaunchPlan:
    """Return the plan of a launch: decide what its options leave open.

    Args:
        may_copy: ranks may have a copy of this process. Not where it would be out of date with the next cell, nor where
            nothing in it is of use to them.
    """
    devices = _choose_kind(options, facts)
    if devices.held:
        raise ConfigError(
            f"Ranks cannot use the {devices.kind.label}s: {devices.held}. Restart the kernel, and touch them (by "
            "Accelerator(), xm.xla_device() or a tensor there) in the function only"
        )
    number, names, visibility = _ranks_and_devices(options, devices)
    conditions = Conditions(
        device=devices.kind.name.upper(),
        is_host=devices.kind.is_host,
        in_use=devices.in_use,
        forbids_fork=devices.forbids_fork,
    )
    method, reason = _start_method(options, conditions, number, may_copy=may_copy)
    shared_out = facts.num_threads or max(1, facts.num_cpus // number)
    memory = facts.shared_memory
    return LaunchPlan(
        num_processes=number,
        num_nodes=options.num_nodes,
        method=method,
        reason=reason,
        kind=devices.kind,
        device_names=names,
        is_kind_asked_for=options.devices == devices.kind.name,
        visibility=visibility,
        num_threads=_THREADS_OF_FORKS if method.copies_notebook else shared_out,
        num_cpus=facts.num_cpus,
        loopback=facts.loopback,
        mixed_precision=options.mixed_precision,
        can_fork=not any(found.in_use or found.forbids_fork for found in facts.accelerators),
        warnings=() if memory is None or memory >= _LITTLE_SHARED_MEMORY else (_LITTLE.format(memory >> 20),),
    )


def _choose_kind(options: LaunchOptions, facts: MachineFacts) -> VisibleDevices:
    """Choose the type of device: the one that was named, or else the first that can do what was asked for."""
    if isinstance(options.devices, str):
        if options.devices == CPU.name:
            return _PROCESSOR
        found = next((devices for devices in facts.accelerators if devices.kind.name == options.devices), None)
        if found is None:
            raise ConfigError(
                f"devices={options.devices!r}, but there is no such device. Write devices={CPU.name!r} or None",
                options=("devices",),
            )
        return found
    if options.devices is not None:
        if not facts.accelerators:
            what = f"no GPU is visible. Write devices={CPU.name!r} or None"
            raise ConfigError(f"devices={options.devices!r}, but {what}", options=("devices",))
        return facts.accelerators[0]
    if facts.prefers_cpu:
        return _PROCESSOR
    several = (options.num_processes or 1) * options.num_nodes > 1
    return next((devices for devices in facts.accelerators if devices.kind.backend or not several), _PROCESSOR)


def _ranks_and_devices(
    options: LaunchOptions, devices: VisibleDevices
) -> tuple[int, tuple[str, ...], Mapping[str, str]]:
    """Return the number of ranks on this machine, their devices, and the variables that select them."""
    kind, names = devices.kind, devices.names
    visibility: dict[str, str] = {}
    # There are as many ranks on processors as were asked for. Accelerators are hidden if devices were asked for.
    if kind.is_host:
        if options.devices is not None:
            visibility = {row.visibility: row.hidden for row in DEVICE_KINDS if row.hidden is not None}
        return options.num_processes or 1, (), visibility
    if kind.start_runtime is not None and options.num_nodes > 1:
        raise ConfigError(
            f"num_nodes={options.num_nodes}, but {kind.label}s of several machines are connected by their own runtime, "
            "which is not supported. Leave num_nodes out",
            options=("num_nodes",),
        )
    # Devices that were chosen by number.
    if options.devices is not None and not isinstance(options.devices, str):
        if kind.all_or_one:
            raise ConfigError(
                f"devices={options.devices!r}, but {kind.label}s cannot be chosen by their numbers: ranks use all "
                f"{len(names)} or one. Leave devices out, or write num_processes=1",
                options=("devices",),
            )
        missing = [number for number in options.devices if number >= len(names)]
        if missing:
            raise ConfigError(
                f"devices={options.devices!r}, but the visible GPUs are 0 to {len(names) - 1}: "
                f"there is no GPU {missing[0]}",
                options=("devices",),
            )
        # Numbers count among the devices that are visible, which may be the fourth to the seventh of the machine.
        names = tuple(names[number] for number in options.devices)
        if kind.visibility:
            visibility = {kind.visibility: ",".join(names)}
    # There are as many ranks as devices; without a backend for collectives there is one.
    available = len(names) if kind.backend else 1
    number = options.num_processes or available
    if number > available:
        there_are = f"there {'are' if available > 1 else 'is'} {available} {kind.label}{'s' if available > 1 else ''}"
        raise ConfigError(
            f"num_processes={number}, but {there_are}, and each rank needs its own. Write num_processes={available}, "
            f"or devices={CPU.name!r} to run on the CPU",
            options=("devices",),
        )
    if kind.all_or_one and number not in (1, available):
        raise ConfigError(
            f"num_processes={number}, but ranks use all {available} {kind.label}s or one. Write "
            f"num_processes={available} or 1"
        )
    if options.num_nodes > 1 and not kind.backend:
        raise ConfigError(
            f"num_nodes={options.num_nodes}, but {kind.name} devices cannot exchange tensors between ranks. Write "
            f"devices={CPU.name!r} to run on the CPU",
            options=("num_nodes", "devices"),
        )
    return number, names[:number], visibility


def _start_method(
    options: LaunchOptions, conditions: Conditions, number: int, *, may_copy: bool
) -> tuple[StartMethod, str]:
    if options.start_method == "auto":
        return choose_method(conditions, may_copy=may_copy)
    method = START_METHODS[options.start_method]
    if method.max_ranks is not None and number > method.max_ranks:
        raise ConfigError(
            f"start_method={method.name!r} runs one rank in this process, but num_processes={number}. Write "
            f"num_processes={method.max_ranks}"
        )
    if obstacle := method.obstacle(conditions):
        more = ", and a forked process cannot start it again" if conditions.in_use else ""
        other, _ = choose_method(conditions, may_copy=may_copy)
        raise ConfigError(
            f"start_method={method.name!r} cannot work: {obstacle}{more}. Write start_method='auto' or {other.name!r}, "
            f"which need no restart"
        )
    return method, ""

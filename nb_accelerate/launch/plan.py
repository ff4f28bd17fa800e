"""What a launch will be, decided before anything starts: pure arithmetic on options and facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from nb_accelerate.config.launch import LaunchOptions
    from nb_accelerate.launch.machine import MachineFacts

_SHM = "/dev/shm"  # noqa: S108 - a name to say
_LITTLE_SHARED_MEMORY = 128 << 20
"""Bytes. Containers get 64 MiB by default, which one loader worker with a few large batches fills."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A launch, ready to be started.

    Attributes:
        num_processes: ranks on this machine.
        num_nodes: machines.
        start_method: how ranks come to be.
        reason: why it was chosen; "" where it is what one expects.
        device: ``"cpu"`` or ``"cuda"``.
        gpus: the devices of the ranks, by local rank, as ``CUDA_VISIBLE_DEVICES`` writes them.
        visible_devices: value of that variable in the ranks, or None to leave it as it is.
        num_threads: intra-op threads of each rank.
        loopback: name of the loopback interface.
        mixed_precision: what `Accelerator()` takes in the ranks by default.
        can_fork: ranks could have the notebook's memory, if that was asked for.
        warnings: what the user should know before it starts.
    """

    num_processes: int
    num_nodes: int
    start_method: str
    reason: str
    device: str
    gpus: tuple[str, ...]
    visible_devices: str | None
    num_threads: int
    loopback: str
    mixed_precision: str
    can_fork: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """What carries collectives."""
        return "nccl" if self.device == "cuda" else "gloo"

    def describe(self) -> str:
        """One line for the user: ``2 ranks on CPU, forkserver, gloo on loopback, bf16``."""
        ranks = "1 rank" if self.num_processes == 1 else f"{self.num_processes} ranks"
        where = f" on each of {self.num_nodes} machines" if self.num_nodes > 1 else ""
        method = f"{self.start_method} ({self.reason})" if self.reason else self.start_method
        parts = [f"{ranks} on {self.device.upper()}{where}", method]
        if self.num_processes * self.num_nodes > 1:
            parts.append(self.backend if self.num_nodes > 1 else f"{self.backend} on loopback")
        if self.mixed_precision != "no":
            parts.append(self.mixed_precision)
        return ", ".join(parts)


def make_plan(options: LaunchOptions, facts: MachineFacts) -> LaunchPlan:
    """Decide everything that was left open.

    Raises:
        ConfigError: more ranks than there are GPUs, a GPU that is not there, or a start method that cannot work.
    """
    wants_cpu = options.devices == "cpu" or (options.devices is None and facts.prefers_cpu)
    use_gpus = facts.num_gpus > 0 and not wants_cpu
    number, gpus, visible = _ranks_and_devices(options, facts, use_gpus=use_gpus)
    method, reason = _start_method(options, facts, number, use_gpus=use_gpus)
    return LaunchPlan(
        num_processes=number,
        num_nodes=options.num_nodes,
        start_method=method,
        reason=reason,
        device="cuda" if use_gpus else "cpu",
        gpus=gpus,
        visible_devices=visible,
        # A forked rank inherits OpenMP's state without its threads: more than one hangs in the first large operation.
        num_threads=1 if method == "fork" else facts.num_threads or max(1, facts.num_cpus // number),
        loopback=facts.loopback,
        mixed_precision=options.mixed_precision,
        can_fork=facts.can_fork and not facts.is_rocm and not (use_gpus and facts.unforkable),
        warnings=_warnings(facts),
    )


def _ranks_and_devices(
    options: LaunchOptions, facts: MachineFacts, *, use_gpus: bool
) -> tuple[int, tuple[str, ...], str | None]:
    if not use_gpus:
        if options.devices not in (None, "cpu"):
            raise ConfigError(f"devices={options.devices!r}, but no GPU is visible here. Write devices='cpu' or None")
        return options.num_processes or 1, (), "" if options.devices == "cpu" else None
    if options.devices is None:
        gpus, visible = facts.gpus, None
    else:
        chosen = [int(device) for device in options.devices]
        missing = [device for device in chosen if device >= facts.num_gpus]
        if missing:
            raise ConfigError(
                f"devices={options.devices!r}, but the visible GPUs are 0 to {facts.num_gpus - 1}: "
                f"there is no GPU {missing[0]}"
            )
        # Numbers count among the devices that are visible, which may be the fourth to the seventh of the machine.
        gpus = tuple(facts.gpus[device] for device in chosen)
        visible = ",".join(gpus)
    available = len(gpus)
    number = options.num_processes or available
    if number > available:
        there_are = f"there {'are' if available > 1 else 'is'} {available} GPU{'s' if available > 1 else ''}"
        raise ConfigError(
            f"num_processes={number}, but {there_are}, and each rank needs its own. Write num_processes={available}, "
            f"or devices='cpu' to run on the CPU"
        )
    return number, gpus[:number], visible


def _start_method(options: LaunchOptions, facts: MachineFacts, number: int, *, use_gpus: bool) -> tuple[str, str]:
    asked = options.start_method
    if asked == "inline" and number > 1:
        raise ConfigError(
            f"start_method='inline' runs one rank in this process, but num_processes={number}. Write num_processes=1"
        )
    if asked == "fork" and use_gpus and facts.unforkable:
        raise ConfigError(
            f"start_method='fork' cannot work: {facts.unforkable}, and a forked process cannot start it again. "
            f"Write start_method='auto' or 'forkserver', which need no restart"
        )
    if asked != "auto":
        return asked, ""
    if not facts.can_fork or facts.is_rocm:
        return "spawn", "the runtime of these GPUs does not survive a fork" if facts.is_rocm else "no fork here"
    if not use_gpus:
        return "forkserver", ""
    if facts.unforkable:
        return "forkserver", facts.unforkable
    return "fork", "CUDA is untouched here, so data in memory is shared"


def _warnings(facts: MachineFacts) -> tuple[str, ...]:
    if facts.shared_memory is None or facts.shared_memory >= _LITTLE_SHARED_MEMORY:
        return ()
    return (
        f"{_SHM} has only {facts.shared_memory >> 20} MiB free: loader workers that fill it die with SIGBUS. Use "
        f"num_workers=0, or give the container more (docker run --shm-size=2g)",
    )

"""What a launch will be, decided before anything starts: pure arithmetic on options and facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from nb_accelerate.config.launch import LaunchOptions
    from nb_accelerate.launch.machine import MachineFacts


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """A launch, ready to be started.

    Attributes:
        num_processes: ranks on this machine.
        start_method: how they come to be.
        device: ``"cpu"`` or ``"cuda"``.
        num_threads: intra-op threads of each rank.
        loopback: interface for everything the ranks say to one another.
        mixed_precision: what `Accelerator()` takes in the ranks by default.
        reason: why it is so, for one line to the user.
    """

    num_processes: int
    start_method: str
    device: str
    num_threads: int
    loopback: str
    mixed_precision: str
    reason: str

    def describe(self) -> str:
        """One line for the user: ``2 ranks on CPU, forkserver, gloo on loopback, bf16``."""
        ranks = "1 rank" if self.num_processes == 1 else f"{self.num_processes} ranks"
        parts = [f"{ranks} on {self.device.upper()}", self.start_method]
        if self.num_processes > 1:
            parts.append(f"{'nccl' if self.device == 'cuda' else 'gloo'} on loopback")
        if self.mixed_precision != "no":
            parts.append(self.mixed_precision)
        return ", ".join(parts) + (f" ({self.reason})" if self.reason else "")


def make_plan(options: LaunchOptions, facts: MachineFacts) -> LaunchPlan:
    """Decide everything that was left open.

    Raises:
        ConfigError: more ranks than there are GPUs.
    """
    use_gpus = facts.num_gpus > 0 and options.env.get("ACCELERATE_USE_CPU", "").lower() not in (
        "1",
        "true",
        "yes",
    )
    number = options.num_processes or (facts.num_gpus if use_gpus else 1)
    if use_gpus and number > facts.num_gpus:
        raise ConfigError(
            f"num_processes={number}, but this machine has {facts.num_gpus} "
            f"GPU{'s' if facts.num_gpus > 1 else ''}, and each rank needs its own. Write "
            f"num_processes={facts.num_gpus}, or env={{'ACCELERATE_USE_CPU': 'true'}} to run on the CPU"
        )
    return LaunchPlan(
        num_processes=number,
        start_method="forkserver",
        device="cuda" if use_gpus else "cpu",
        num_threads=max(1, facts.num_cpus // number),
        loopback=facts.loopback,
        mixed_precision=options.mixed_precision,
        reason="",
    )

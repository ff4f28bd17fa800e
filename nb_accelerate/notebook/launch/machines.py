"""A machine of a launch on several, and the sentences about machines that are missing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nb_accelerate.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.base.config.launch import LaunchOptions


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine of a launch."""

    address: str  # as the other machines reach it
    host: str = ""
    node_rank: int | None = None  # the number it was given by hand; None where torch elastic numbers the machines
    num_processes: int = 1
    num_nodes: str = "1"  # machines that it was started for, as ``2`` or ``1:4``
    launch: str = field(default="", compare=False)  # tells its launch from others on the same machine

    def to_text(self) -> str:
        """Return what torch elastic knows it by. It numbers machines in the order of these texts."""
        number = "" if self.node_rank is None else f"{self.node_rank:06d}"
        return json.dumps([number, self.address, self.host, self.num_processes, self.num_nodes, self.launch])

    @classmethod
    def from_text(cls, text: str) -> Machine:
        """Return the machine that torch elastic knows by a text, which may be another program's."""
        try:
            number, address, host, num_processes, num_nodes, launch = json.loads(text)
            node_rank = int(number) if number else None
        except (ValueError, TypeError):
            return cls(address=text)
        return cls(
            address=str(address),
            host=str(host),
            node_rank=node_rank,
            num_processes=num_processes,
            num_nodes=num_nodes,
            launch=str(launch),
        )

    def __str__(self) -> str:
        """Name it: ``10.0.0.2 (its host name)``."""
        return self.address if self.host in ("", self.address) else f"{self.address} ({self.host})"


def machines_of(options: LaunchOptions) -> str:
    """Return how many machines a launch is for: ``2`` or ``1:4``."""
    fewest, most = options.min_nodes or options.num_nodes, options.num_nodes
    return str(most) if fewest == most else f"{fewest}:{most}"


def refusal(here: Sequence[Machine], new: Machine) -> str:
    """Return why a machine cannot take part with others, or ""."""
    for other in here:
        if other.node_rank == new.node_rank is not None:
            return f"machine {new.node_rank} has come already: it is the one at {other}. Number the machines from 0"
        if new.num_nodes != other.num_nodes:
            return (
                f"this machine was started for {new.num_nodes} machines, but the one at {other} for "
                f"{other.num_nodes}. Start the same launch, with the same number of machines, on all of them"
            )
        if new.num_processes != other.num_processes:
            return (
                f"this machine would start {new.num_processes} ranks, but the one at {other} starts "
                f"{other.num_processes}. Start the same launch, with the same num_processes, on all machines"
            )
    return ""


def not_all_came(
    here: Sequence[Machine], gone: Sequence[Machine], expected: int, endpoint: str, seconds: float
) -> StartError:
    """Build the error about machines that are missing. Those in `gone` took part before."""
    numbers = {machine.node_rank for machine in here}
    if None not in numbers:
        last_seen = {machine.node_rank: f", last seen at {machine}," for machine in gone}
        missing = [f"number {number}{last_seen.get(number, '')}" for number in range(expected) if number not in numbers]
    else:
        missing = [f"the one at {machine}" for machine in gone]
    verb = "is" if len(missing) == 1 else "are"
    who = f"{' and '.join(missing)} {verb} missing" if missing else f"here is {', '.join(map(str, here))}"
    return StartError(
        f"{len(here)} of {expected} machines came to {endpoint} within {seconds:g} s; {who}. Start the same launch on "
        f"each of them, and see that their clocks agree to some seconds"
    )


def no_first_machine(endpoint: str, seconds: float, error: BaseException) -> StartError:
    """Build the error about the machine that all others connect to, from the error of the last attempt."""
    why = getattr(error, "strerror", None) or str(error).split("\n", maxsplit=1)[0]
    return StartError(
        f"the first machine, {endpoint}, did not answer within {seconds:g} s ({why}). Start the same launch there, and "
        f"see that nothing blocks that port"
    )

"""One machine of a launch on several, and the sentences about machines that are missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.config.launch import LaunchOptions

JOIN_TIMEOUT = 600.0
"""Seconds for all machines to come, as torchrun's; ``rdzv_conf={"join_timeout": ...}`` says another number."""

DONE = "is done"
INTERRUPTED = "was interrupted"
FAILED = "has failed"
"""How the launch of a machine can end, as verbs."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine of a launch, as the table has it.

    Attributes:
        number: in the order in which they came; machine 0 keeps the table.
        address: as the other machines reach it.
        host: its name.
        node_rank: the number it was given by hand; None where torch elastic numbers the machines.
        num_processes: ranks on it.
        num_nodes: machines that it was started for, as ``2`` or ``1:4``.
        round_id: names the last rendezvous that its ranks have gone through; "" for none.
        is_waiting: it waits for the next rendezvous.
        failed: why its ranks failed after the last one; "" if they have not.
        ended: how its launch has ended; "" while it runs.
        lost: why nothing is heard of it any more; "" if all is well.
    """

    number: int
    address: str
    host: str = ""
    node_rank: int | None = None
    num_processes: int = 1
    num_nodes: str = "1"
    round_id: str = ""
    is_waiting: bool = True
    failed: str = ""
    ended: str = ""
    lost: str = ""

    @property
    def is_here(self) -> bool:
        """Whether its launch runs, as far as is known."""
        return not (self.ended or self.lost)

    def __str__(self) -> str:
        """Name it: ``10.0.0.2 (its host name)``."""
        return self.address if self.host in ("", self.address) else f"{self.address} ({self.host})"


def silence_limit(conf: Mapping[str, Any] | None) -> float:
    """Return the seconds without a line after which a machine counts as lost: 15, or what torch elastic's options say.

    Args:
        conf: ``rdzv_conf``; its ``keep_alive_interval`` (seconds) and ``keep_alive_max_attempt`` are multiplied.
    """
    conf = conf or {}
    return float(conf.get("keep_alive_interval", 5)) * int(conf.get("keep_alive_max_attempt", 3))


def machines_of(options: LaunchOptions) -> str:
    """Return how many machines a launch is for: ``2`` or ``1:4``."""
    fewest, most = options.min_nodes or options.num_nodes, options.num_nodes
    return str(most) if fewest == most else f"{fewest}:{most}"


def refusal(here: Sequence[Machine], told: Machine) -> str:
    """Return why a machine cannot take part with those that are here, or ""."""
    same = [one for one in here if one.node_rank == told.node_rank is not None]
    if same:
        return f"machine {told.node_rank} has come already: it is the one at {same[0]}. Number the machines from 0"
    first = here[0]
    if told.num_nodes != first.num_nodes:
        return (
            f"this machine was started for {told.num_nodes} machines, but the one at {first} for {first.num_nodes}. "
            f"Start the same launch, with the same number of machines, on all of them"
        )
    if told.num_processes != first.num_processes:
        return (
            f"this machine would start {told.num_processes} ranks, but the one at {first} starts "
            f"{first.num_processes}. Start the same launch, with the same num_processes, on all machines"
        )
    return ""


def not_all_came(
    known: Sequence[Machine], expected: int, place: str, seconds: float, refused: Sequence[str] = ()
) -> StartError:
    """Build the error about machines that are missing.

    Args:
        known: all that ever came.
        expected: how many there should be, at least.
        place: where they were to come to.
        seconds: how long they were waited for.
        refused: sentences about machines that came and were not let in.
    """
    here = [one for one in known if one.is_here]
    gone = [one for one in known if not one.is_here]
    numbers = {one.node_rank for one in here}
    if numbers - {None}:
        last_seen = {one.node_rank: f", last seen at {one}," for one in gone}
        missing = [f"number {one}{last_seen.get(one, '')}" for one in range(expected) if one not in numbers]
    elif len(gone) == expected - len(here):
        missing = [f"the one at {one}" for one in gone]
    else:
        missing = []
    verb = "is" if len(missing) == 1 else "are"
    who = f"{' and '.join(missing)} {verb} missing" if missing else f"here is {', '.join(map(str, here))}"
    advice = "; ".join(dict.fromkeys(refused)) or "Start the same launch on each of them"
    return StartError(f"{len(here)} of {expected} machines came to {place} within {seconds:g} s; {who}. {advice}")


class NotALaunchError(ConnectionError):
    """What listens at an address does not answer as a launch of this package does."""


def no_first_machine(place: str, seconds: float, error: BaseException) -> StartError:
    """Build the error about the machine that all others come to.

    Args:
        place: its address and port.
        seconds: how long it is tried, at most.
        error: of the last attempt.
    """
    advice = "Start the same launch there, and see that nothing blocks that port"
    if isinstance(error, NotALaunchError):
        return StartError(f"what listens at {place}, the address of the first machine, {error}. {advice}")
    why = getattr(error, "strerror", None) or str(error).split("\n", maxsplit=1)[0]
    return StartError(f"the first machine, {place}, did not answer within {seconds:g} s ({why}). {advice}")

"""Engines: each starts one host process on every machine of a launch, and does nothing else there."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from nb_accelerate.base.config.engine import ENGINES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.base.config.engine import EngineOptions
    from nb_accelerate.notebook.remote.streams import Stream


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine on which ranks are to be."""

    name: str  # what users call it
    num_ranks: int | None = None  # none: as many as the launch says, or else as the machine has devices


class Engine(ABC):
    """Starts one process on each machine, and gives the stream to it. It neither schedules nor watches ranks.

    An engine is made by its options, without reaching any machine.

    Attributes:
        idle_limit: seconds for which hosts are kept that no launch uses.
        reserves: it takes places for a number of ranks, which others wait for.
    """

    idle_limit = 300.0
    reserves = False

    def __init__(self, options: EngineOptions) -> None:
        self.options = options

    def machines(self, num_ranks: int | None = None) -> Sequence[Machine]:  # noqa: ARG002 - for those who reserve
        """Return the machines in the order in which ranks are numbered. Called once, before `start`.

        Args:
            num_ranks: of the launch, on all machines together; None if it does not say.
        """
        return [Machine(name=name, num_ranks=ranks) for name, ranks in self.options.machines]

    @abstractmethod
    def start(self, machine: Machine, command: Sequence[str]) -> Stream:
        """Start the host process of a machine; return at once, with the stream to its stdin and from its stdout.

        Called for each machine, and again if its host is lost. What goes wrong there later tells `Stream.why_ended`.

        Args:
            command: the host's, whose first words are the Python of the engine's options.

        Raises:
            StartError: it could not be tried.
        """

    def address(self, machine: Machine) -> str | None:  # noqa: ARG002 - for those who know it
        """Return where other machines reach this one, if the engine knows; called when all have been started."""
        return None

    def close(self) -> None:  # noqa: B027 - most engines have nothing but their streams
        """End what belongs to the engine and is not a stream. Can be called again."""


def open_engine(options: EngineOptions) -> Engine:
    """Return the engine that options name, whose machines are not reached yet."""
    return cast("Engine", pkgutil.resolve_name(ENGINES[options.engine].opens)(options))

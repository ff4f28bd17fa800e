"""The panel of a cell that runs on ranks that stay."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nb_accelerate.board import Sample
from nb_accelerate.diagnostics.render import cell_name, render_report
from nb_accelerate.diagnostics.stacks import DUMP_SIGNAL
from nb_accelerate.display import Action, Seen
from nb_accelerate.display.view import Failure
from nb_accelerate.display.words import label
from nb_accelerate.protocol.messages import Result
from nb_accelerate.ranks.panel import facts_of, make_panel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.display import Panel
    from nb_accelerate.display.frontend import FrontEnd
    from nb_accelerate.display.view import State
    from nb_accelerate.launch.plan import LaunchPlan
    from nb_accelerate.ranks.proxy import Member
    from nb_accelerate.ranks.request import Turn
    from nb_accelerate.ranks.sinks import Sink


class CellRanks:
    """The ranks of a turn, for a panel that watches them.

    Args:
        turn: before it begins.
        interrupt: ends it early.
    """

    def __init__(self, turn: Turn, interrupt: Callable[[], None]) -> None:
        self._turn = turn
        self._interrupt = interrupt
        for member in turn.members:
            member.output.logged.clear()
        self._turns_before = {member.rank: member.handle.board.read().turn for member in turn.members}

    def look(self) -> list[Seen]:
        """The ranks as they are now."""
        return [
            Seen(rank=member.rank, sample=self._sample(member), state=self._state(member), pid=member.handle.pid)
            for member in self._turn.members
        ]

    def ask(self) -> None:
        """Ask the ranks that are busy where they are."""
        if self._turn.stage is None:
            for member in self._turn.waiting:
                member.stacks.clear()
                member.handle.signal(DUMP_SIGNAL)

    def stacks(self) -> dict[int, str]:
        """What they answered."""
        return dict(self._turn.stacks)

    def log(self, rank: int) -> str:
        """The last lines a rank printed."""
        return next(member.output.text for member in self._turn.members if member.rank == rank)

    def runs(self) -> list[str]:
        """Runs that the ranks have logged values of in this cell."""
        return [run for member in self._turn.members for run in member.output.logged]

    def actions(self) -> Sequence[Action]:
        """What the user can do."""
        return (Action("Interrupt", "raise KeyboardInterrupt on every rank; variables stay", self._interrupt),)

    def _sample(self, member: Member) -> Sample:
        sample = member.handle.board.read()
        return sample if sample.turn > self._turns_before[member.rank] else Sample()

    def _state(self, member: Member) -> str:
        if member.handle.ended:
            return "ended"
        answer = self._turn.answers.get(member.rank)
        if answer is None:
            return "running"
        return "returned" if isinstance(answer[0], Result) else "failed"


def cell_panel(
    turn: Turn, filename: str, plan: LaunchPlan, sink: Sink, interrupt: Callable[[], None], front_end: FrontEnd
) -> Panel | None:
    """A panel for a cell that is about to run, or None if nobody wants one."""
    ranks = [member.rank for member in turn.members]
    for member in turn.members:
        member.handle.board.want_rows(front_end != "off")
    name = (cell_name(filename) or "cell").replace("Cell In[", "cell ").rstrip("]")
    facts = facts_of(name, plan)
    if len(ranks) < plan.num_processes:
        facts = replace(facts, setup=(f"{label(ranks)} of {plan.num_processes}", *facts.setup[1:]))
    return make_panel(facts, ranks, sink, CellRanks(turn, interrupt), front_end)


def outcome(turn: Turn) -> tuple[State, Failure | None]:
    """How a panel says that a cell has ended."""
    troubles = turn.troubles
    if not troubles:
        return "done", None
    if any(trouble.kind == "interrupted" for trouble in troubles):
        return "interrupted", None
    first = min(troubles, key=lambda one: (one.failure is not None and one.failure[0].peer_lost, one.when))
    rank = first.member.rank if first.member is not None else None
    if first.failure is not None:
        report = first.failure[0].report
        said = f"{report.type_name}: {report.message}".rstrip(": ").split("\n")[0]
        details = render_report(report, title=f"rank {rank} of {turn.world_size}")
        return "failed", Failure(
            title=f"Rank {rank} failed: {said}", rank=rank, label=f"traceback of rank {rank}", details=details
        )
    if rank is not None:
        return "failed", Failure(title=f"Rank {rank} has ended.", rank=rank)
    return "failed", Failure(title=f"The cell took longer than {turn.timeout:g} s.")

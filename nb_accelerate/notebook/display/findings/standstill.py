"""Sentences about ranks that have not moved for a while: which one is to blame, and who waits where for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.base.topology.rank_lists import named
from nb_accelerate.notebook.diagnostics.stacks import innermost, main_thread, users_line
from nb_accelerate.notebook.diagnostics.waits import who_waits
from nb_accelerate.notebook.display import words
from nb_accelerate.notebook.display.code_lines import short_place
from nb_accelerate.notebook.display.track import METHODS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nb_accelerate.notebook.display.seen import Seen
    from nb_accelerate.notebook.display.track import Track


@dataclass(frozen=True)
class Standstill:
    """What is known of ranks, some of which stand still.

    Attributes:
        seen: state and process of each rank, by rank.
        tracks: recent progress of each rank, by rank.
        stacks: those that have arrived, by rank.
    """

    seen: Mapping[int, Seen]
    tracks: Mapping[int, Track]
    stacks: Mapping[int, str]

    def waits(self, rank: int) -> bool:
        """Return whether a rank waits for others: by its stack, or without one by its phase."""
        if rank in self.stacks:
            return who_waits({rank: self.stacks[rank]}).waits
        return self.tracks[rank].sample.phase in (Phase.WAITING, Phase.BACKWARD)

    def doing(self, rank: int, otherwise: str) -> str:
        """Say what a rank does: the collective in which it waits, by its stack.

        Args:
            otherwise: what to say without a stack, or of a rank that does not wait.
        """
        stack = self.stacks.get(rank)
        return f"waits in {innermost(stack)}" if stack and who_waits({rank: stack}).waits else otherwise

    def place(self, rank: int) -> str:
        """Return the line of the user's code that a rank is at, by its stack; "" if none is known."""
        found = users_line(main_thread(self.stacks.get(rank, "")))
        return short_place(found[0]) if found is not None else ""

    def is_waited_for(self, rank: int, stalled: set[int]) -> bool:
        """Return whether a rank has returned while others stand still and wait."""
        return self.seen[rank].state == "returned" and any(map(self.waits, stalled))

    def sentences(self, stalled: set[int], now: float) -> tuple[str, ...]:
        """Return what to tell the user.

        Args:
            stalled: ranks that have not moved for some time.
            now: `time.monotonic`.
        """
        stopped = [rank for rank, seen in self.seen.items() if seen.state == "stopped"]
        sentences = [
            f"Rank {rank} is stopped (SIGSTOP). To let it go on: kill -CONT {self.seen[rank].pid}" for rank in stopped
        ]
        waiting = [rank for rank in stalled if rank not in stopped and self.waits(rank)]
        elsewhere = sorted(stalled - set(waiting) - set(stopped))
        returned = [rank for rank, seen in self.seen.items() if seen.state == "returned"]
        waited_in = self._place(waiting)
        who = f"{words.capitalized(named(waiting))} {'waits' if len(waiting) == 1 else 'wait'}"
        if elsewhere and (waiting or len(elsewhere) < len(self.tracks)):
            since = now - min(self.tracks[rank].moved_at for rank in elsewhere)
            verb = "has" if len(elsewhere) == 1 else "have"
            text = f"{words.capitalized(named(elsewhere))} {verb} not moved for {words.brief(since)}"
            text += self._place(elsewhere, ": ")
            if waiting:
                text += f"; {who[0].lower()}{who[1:]} for {_it(elsewhere)}{waited_in}"
            sentences.append(text + ".")
        elif waiting and returned:
            have = "has" if len(returned) == 1 else "have"
            one = f"{named(returned)}, which {have} returned"
            knows_lines = any(rank in self.stacks for rank in waiting)
            sentences.append(f"{who} for {one}:{waited_in}." if knows_lines else f"{who}{waited_in} for {one}.")
        elif waiting and stopped:
            sentences[-1] += f". {who} for {_it(stopped)}{waited_in}."
        return tuple(sentences)

    def _place(self, ranks: Sequence[int], before: str = " ") -> str:
        dumps = {rank: self.stacks[rank] for rank in ranks if rank in self.stacks}
        if dumps:
            return before + who_waits(dumps).place
        inside = {self.tracks[rank].sample.waits_in for rank in ranks} - {None}
        return f"{before}in {METHODS[next(iter(inside))]}" if len(inside) == 1 else ""  # type: ignore[index]


def _it(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"

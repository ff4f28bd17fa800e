"""What is said about several failures, and about the end of a rank."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from fixtures.actor_ranks import ActorRank, failure

from nb_accelerate.errors import RankDiedError
from nb_accelerate.notebook.pool.group import _CELL
from nb_accelerate.notebook.ranks.failing.errors import death
from nb_accelerate.notebook.ranks.failing.incidents import Incident, IncidentKind, Wording, first_cause
from nb_accelerate.notebook.ranks.proxy import RankProxy


def incident(kind: IncidentKind, when: float, **options: Any) -> Incident:
    return Incident(kind=kind, when=when, **options)


class TestFirstCause:
    """Of several things that went wrong, which one was it?"""

    EARLY = incident(IncidentKind.DIED, 1.0)
    LATE = incident(IncidentKind.FAILED, 2.0, failure=(failure("Late", 2.0), ()))
    LOST = incident(IncidentKind.FAILED, 0.5, failure=(failure("Lost", 0.5, peer_lost=True), ()))
    OURS = incident(IncidentKind.DIED, 0.1, is_consequence=True)
    USER = incident(IncidentKind.INTERRUPTED, 9.0)

    @pytest.mark.parametrize(
        ("incidents", "cause"),
        [
            ([LATE, EARLY], EARLY),
            ([LOST, LATE], LATE),
            ([OURS, LOST], LOST),
            ([EARLY, USER], USER),
        ],
    )
    def test_is_what_nothing_else_explains(self, incidents: list[Incident], cause: Incident) -> None:
        assert first_cause(incidents) is cause


class TestDeath:
    """A launch and a pool say it in the same words, and both know of the out-of-memory killer."""

    @pytest.mark.parametrize("words", [Wording(), _CELL])
    def test_of_a_rank_that_was_killed_for_its_memory_says_so(self, words: Wording) -> None:
        handle = ActorRank(1, None)
        rank = RankProxy(handle)
        handle.exitcode = -signal.SIGKILL
        error = death(rank, words, "its last words\n", out_of_memory=True)
        assert isinstance(error, RankDiedError)
        assert str(error).startswith("rank 1 was ended")
        assert "out-of-memory killer" in str(error)
        assert str(error).endswith("its last words")
        rank.close()

"""How a request has ended, as its panel shows it."""

from __future__ import annotations

from fixtures.actor_ranks import SOON, ActorRank

from nb_accelerate.errors import DeadlockError
from nb_accelerate.notebook.ranks.failing.errors import error_of, outcome_of
from nb_accelerate.notebook.ranks.failing.incidents import STOPPED, Incident, IncidentKind, Wording
from nb_accelerate.notebook.ranks.loop import RankLoop
from nb_accelerate.notebook.ranks.proxy import RankProxy
from nb_accelerate.notebook.ranks.request import Request
from nb_accelerate.notebook.ranks.steps import call_steps


def test_in_a_deadlock_the_rank_that_left_is_marked_and_not_the_one_that_waits(loop: RankLoop) -> None:
    ranks = [RankProxy(ActorRank(number, None)) for number in (0, 1)]
    for rank in ranks:
        loop.add(rank)

    def end(*waiting: int) -> tuple[str, tuple[int, ...], str]:
        request = Request(
            ranks=ranks, send=lambda _: None, steps=call_steps(SOON), wording=Wording(), world_size=2, on_host=True
        )
        request.abandon(DeadlockError("they wait", stacks=dict.fromkeys(waiting, "in barrier")))
        status, summary = outcome_of(request)
        assert summary is not None
        return status, summary.ranks, summary.what

    assert end(0) == ("failed", (1,), "returned early")
    assert end(0, 1) == ("failed", (0, 1), "deadlocked")


def test_a_panel_says_whether_the_user_has_interrupted_or_stopped(loop: RankLoop) -> None:
    rank = RankProxy(ActorRank(0, None))
    loop.add(rank)

    def end(how: str) -> tuple[str, str]:
        request = Request(
            ranks=[rank], send=lambda _: None, steps=call_steps(SOON), wording=Wording(), world_size=1, on_host=True
        )
        request.incidents.append(Incident(kind=IncidentKind.INTERRUPTED, when=0.0, how=how))
        return outcome_of(request)[0], str(error_of(request)).rpartition(" ")[2]

    assert end("interrupted") == ("interrupted", "interrupted")
    assert end(STOPPED) == ("stopped", "stopped")

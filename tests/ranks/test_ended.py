"""How a request has ended, as its panel shows it."""

from __future__ import annotations

from fixtures.actor_ranks import SOON, ActorRank

from nb_accelerate.errors import DeadlockError
from nb_accelerate.ranks.ended import ended_as
from nb_accelerate.ranks.failures import Wording
from nb_accelerate.ranks.loop import RankLoop
from nb_accelerate.ranks.proxy import RankProxy
from nb_accelerate.ranks.request import Request
from nb_accelerate.ranks.steps import call_steps


def test_in_a_deadlock_the_rank_that_left_is_marked_and_not_the_one_that_waits(loop: RankLoop) -> None:
    ranks = [RankProxy(ActorRank(number, None), loop) for number in (0, 1)]
    for rank in ranks:
        loop.add(rank)

    def end(*waiting: int) -> tuple[str, tuple[int, ...], str]:
        request = Request(
            ranks=ranks, send=lambda _: None, steps=call_steps(SOON), wording=Wording(), world_size=2, on_host=True
        )
        request.abandon(DeadlockError("they wait", stacks=dict.fromkeys(waiting, "in barrier")))
        status, summary = ended_as(request)
        assert summary is not None
        return status, summary.ranks, summary.what

    assert end(0) == ("failed", (1,), "returned early")
    assert end(0, 1) == ("failed", (0, 1), "deadlocked")

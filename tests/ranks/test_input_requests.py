"""Requests for input of several ranks, of which the user answers one at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from nb_accelerate.protocol.messages import InputRequest
from nb_accelerate.ranks.input_requests import InputRequests, PendingInput


def pending(rank: int) -> PendingInput:
    proxy: Any = SimpleNamespace(rank=rank)
    return PendingInput(proxy, InputRequest(number=rank, prompt="(Pdb) "))


def test_what_a_rank_has_asked_before_it_ended_is_not_shown() -> None:
    requests = InputRequests()
    requests.put(pending(1))
    requests.put(pending(2))
    requests.gone(1)
    shown = requests.get()
    assert shown is not None
    assert shown.prompt == "rank 2 (Pdb) "


def test_other_ranks_are_asked_once_the_one_that_the_user_talks_to_has_ended() -> None:
    requests = InputRequests()
    requests.put(pending(0))
    assert requests.get() is not None
    requests.put(pending(0))
    requests.put(pending(1))
    requests.gone(0)
    shown = requests.get()
    assert shown is not None
    assert shown.prompt.startswith("rank 1")

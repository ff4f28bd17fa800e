"""Requests for input of several ranks, of which the user answers one at a time."""

from __future__ import annotations

import builtins
from types import SimpleNamespace
from typing import Any

import pytest

from nb_accelerate.notebook.protocol.messages import InputRequest
from nb_accelerate.notebook.ranks.failing.incidents import Wording
from nb_accelerate.notebook.ranks.input_requests import InputRequests, PendingInput
from nb_accelerate.notebook.ranks.loop import RankLoop
from nb_accelerate.notebook.ranks.request import Request


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


def test_after_an_interrupt_at_a_prompt_no_other_rank_is_asked(loop: RankLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []

    def typed(prompt: str) -> str:
        prompts.append(prompt)
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", typed)
    request = Request(ranks=[], send=lambda _: None, steps=(), wording=Wording())
    for rank in (0, 1):
        request.input_requests.put(pending(rank))

    def interrupt(_: Request) -> None:
        request.input_requests.gone(0)  # rank 0 has ended at once, and rank 1 has not
        request.done.set()
        if len(prompts) > 1:
            request.input_requests.close()

    monkeypatch.setattr(loop, "interrupt", interrupt)
    loop.wait_for(request)
    assert prompts == ["rank 0 (Pdb) "]

"""The order in which blocks compute, and what is fetched ahead."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
from typing_extensions import override

from nb_accelerate.training.bigmodel.placement import Placement
from nb_accelerate.training.bigmodel.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = torch.device("cpu")


class Recorded(Placement):
    """A block without weights. A fetch waits for `may_end`."""

    def __init__(self, name: str, *, wanted_again: bool = True) -> None:
        super().__init__([], CPU)
        self.name = name
        self.wanted_again = wanted_again
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.error: Exception | None = None
        self.happened: list[str] = []

    @override
    def is_wanted(self, *, used: bool = False) -> bool:
        return self.wanted_again or not used

    @override
    def fetch(self) -> None:
        self.has_begun.set()
        self.may_end.wait()
        self.happened.append("fetch")
        if self.error is not None:
            raise self.error

    @override
    def arrive(self) -> None:
        self.happened.append("arrive")

    @override
    def leave(self) -> None:
        self.happened.append("leave")

    @override
    def drop(self) -> None:
        self.happened.append("drop")


@pytest.fixture
def schedule() -> Iterator[Schedule]:
    schedule = Schedule(CPU)
    schedule.events = []
    yield schedule
    schedule.close()


def _add(schedule: Schedule, names: str) -> dict[str, Recorded]:
    blocks = {name: Recorded(name) for name in names}
    for block in blocks.values():
        schedule.add(block)
    return blocks


def _run(schedule: Schedule, blocks: dict[str, Recorded], names: str) -> str:
    """Run a model that computes blocks in an order. Return which block was fetched, in lower case, at which one."""
    schedule.events = events = []
    for name in names:
        schedule.before(blocks[name])
        schedule.after(blocks[name])
    spelt = {"arrive": str.upper, "fetch": str.lower, "leave": lambda _: "", "drop": lambda name: f"-{name.lower()}"}
    return "".join(spelt[what](name) for what, name in events)


def test_the_next_block_is_fetched_when_one_begins(schedule: Schedule) -> None:
    blocks = _add(schedule, "ABC")
    schedule.before(blocks["A"])
    assert blocks["B"].has_begun.wait(10)  # while A computes
    schedule.after(blocks["A"])
    assert schedule.events == [("arrive", "A"), ("fetch", "B"), ("leave", "A")]
    schedule.before(blocks["B"])
    assert blocks["B"].happened == ["fetch", "arrive"]


@pytest.mark.parametrize(
    ("models", "seen"),
    [
        (["ABC", "ABC"], ["AbBcC", "AbBcCa"]),
        (["CBA", "CBA", "CBA"], ["CBc-cAb", "-bCBaAc", "CbBaAc"]),
        (["ABAC", "ABAC"], ["AbBc-cAb-bC", "AbBaAcCa"]),
        (["ABC", "AC", "AC", "ABC", "ABC"], ["AbBcC", "Ab-bC", "AcCa", "Ac-cBcCa", "AbBcCa"]),
        (["AABB", "AABB", "AABB"], ["Ab-bAbBc-cBc", "-cAb-bAbBbBa", "AaAbBbBa"]),
    ],
    ids=["as added", "another order", "a block twice", "a block left out", "twice in a row"],
)
def test_the_order_is_learned_and_learned_anew_when_it_changes(
    schedule: Schedule, models: list[str], seen: list[str]
) -> None:
    blocks = _add(schedule, "ABC")
    assert [_run(schedule, blocks, model) for model in models] == seen


def test_what_the_user_may_change_before_it_computes_again_is_not_fetched_ahead(schedule: Schedule) -> None:
    blocks = _add(schedule, "ABC")
    for block in blocks.values():
        block.wanted_again = False
    assert [_run(schedule, blocks, model) for model in ("ABC", "ABC", "ABC")] == ["AbBcC"] * 3


def test_a_block_waits_for_its_fetch(schedule: Schedule) -> None:
    blocks = _add(schedule, "AB")
    blocks["B"].may_end.clear()
    schedule.before(blocks["A"])
    assert blocks["B"].has_begun.wait(10)
    model = threading.Thread(target=schedule.before, args=[blocks["B"]])
    model.start()
    schedule.after(blocks["A"])
    assert blocks["B"].happened == []
    blocks["B"].may_end.set()
    model.join()
    assert blocks["B"].happened == ["fetch", "arrive"]


def test_what_was_fetched_instead_of_a_block_is_dropped_also_when_it_comes_late(schedule: Schedule) -> None:
    blocks = _add(schedule, "ABC")
    blocks["B"].may_end.clear()
    schedule.before(blocks["A"])
    assert blocks["B"].has_begun.wait(10)
    schedule.after(blocks["A"])
    schedule.before(blocks["C"])
    assert blocks["C"].happened == ["arrive"]
    assert blocks["B"].happened == ["drop"]
    blocks["B"].may_end.set()
    schedule.close()
    assert blocks["B"].happened == ["drop", "fetch", "drop"]


def test_an_interrupt_of_a_block_that_waits_leaves_everything_as_it_was(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = _add(schedule, "AB")
    blocks["B"].may_end.clear()
    schedule.before(blocks["A"])
    schedule.after(blocks["A"])
    assert blocks["B"].has_begun.wait(10)
    with monkeypatch.context() as patch:
        patch.setattr(schedule._condition, "wait", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            schedule.before(blocks["B"])
    schedule.after(blocks["B"])
    blocks["B"].may_end.set()
    assert _run(schedule, blocks, "BA") == "BAb"
    assert blocks["B"].happened[:4] == ["leave", "fetch", "arrive", "leave"]


def test_what_a_fetch_raises_is_raised_by_its_block_once(schedule: Schedule) -> None:
    blocks = _add(schedule, "ABC")
    blocks["B"].error = OSError("the disk is gone")
    schedule.before(blocks["A"])
    assert blocks["B"].has_begun.wait(10)
    schedule.after(blocks["A"])
    with pytest.raises(OSError, match="the disk is gone"):
        schedule.before(blocks["B"])
    blocks["B"].error = None
    schedule.before(blocks["B"])
    assert blocks["C"].has_begun.wait(10)


def test_threads_that_compute_in_one_model_learn_its_order_and_not_their_mixture(schedule: Schedule) -> None:
    blocks = _add(schedule, "CBA")
    barrier = threading.Barrier(2)

    def compute() -> None:
        for name in "ABCABC":
            barrier.wait()
            schedule.before(blocks[name])
            schedule.after(blocks[name])

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    schedule._drop_ahead()
    _run(schedule, blocks, "AB")
    assert _run(schedule, blocks, "CABC") == "CaAbBcCa"


def _thread_of(schedule: Schedule, blocks: dict[str, Recorded]) -> threading.Thread:
    _run(schedule, blocks, "A")
    (thread,) = [each for each in threading.enumerate() if each.name == "nb_accelerate-weights"]
    return thread


def test_the_thread_ends_when_the_schedule_is_closed(schedule: Schedule) -> None:
    thread = _thread_of(schedule, _add(schedule, "AB"))
    schedule.close()
    assert not thread.is_alive()


def test_the_thread_ends_when_it_is_idle_and_gives_back_what_nobody_wanted() -> None:
    schedule = Schedule(CPU)
    blocks = _add(schedule, "AB")
    _thread_of(schedule, blocks).join(10)
    assert blocks["B"].happened == ["fetch", "drop"]
    collected = weakref.ref(schedule)
    del schedule
    gc.collect()
    assert collected() is None


def test_a_forked_process_has_a_thread_of_its_own(schedule: Schedule) -> None:
    blocks = _add(schedule, "ABC")
    blocks["B"].may_end.clear()
    schedule.before(blocks["A"])
    assert blocks["B"].has_begun.wait(10)
    child = os.fork()
    if not child:
        signal.alarm(20)
        blocks["B"].may_end.set()
        schedule.after(blocks["A"])
        seen = _run(schedule, blocks, "BCAB")
        schedule.close()
        os._exit(0 if seen == "BcCAbBc" else 1)
    status = os.waitpid(child, 0)[1]
    blocks["B"].may_end.set()
    assert status == 0


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_has_one_schedule_of_its_own(how: Callable[[object], dict[str, Schedule]]) -> None:
    schedule = Schedule(CPU)
    _run(schedule, _add(schedule, "AB"), "A")  # there is a thread now
    copied = how({"block A": schedule, "block B": schedule})
    assert copied["block A"] is copied["block B"] is not schedule
    blocks = {name: Recorded(name) for name in "AB"}
    assert [_run(copied["block A"], blocks, "AB") for _ in range(2)] == ["AB", "AbBa"]
    copied["block A"].close()
    schedule.close()

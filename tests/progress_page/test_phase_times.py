"""The time of each phase is added up in the rank, to the nanosecond, and read from outside while it goes on."""

from __future__ import annotations

import mmap

import pytest

from nb_accelerate import notebook_launcher
from nb_accelerate.progress_page import Collective, PageReader, Phase, ProgressPage, Sample, layout
from nb_accelerate.progress_page.sample import read
from nb_accelerate.protocol.anonymous_file import anonymous_file


class Clock:
    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        return self.now

    def wait(self, milliseconds: int) -> None:
        self.now += milliseconds * 10**6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr("time.monotonic_ns", one)
    return one


def milliseconds(sample: Sample) -> dict[str, int]:
    return {phase.name: round(1000 * spent) for phase, spent in sample.seconds.items()}


def test_each_phase_has_its_time_and_the_one_that_is_on_counts_too(clock: Clock) -> None:
    memory = bytearray(layout.SIZE)
    page = ProgressPage(memory)
    clock.wait(5000)
    page.begin_request()
    clock.wait(3)
    page.enter(Phase.DATA)
    clock.wait(10)
    page.enter(Phase.BACKWARD)
    clock.wait(20)
    page.wait_after_backward()
    clock.wait(7)
    assert milliseconds(read(memory)) == {"RUNNING": 3, "DATA": 10, "BACKWARD": 20, "WAITING": 7}
    assert read(memory).exchanging == pytest.approx(0.007)
    assert read(memory).waits_in is Collective.backward
    page.enter(Phase.RUNNING)
    before = page.wait_in(Collective.barrier)
    clock.wait(4)
    page.enter(before)
    page.end_request()
    clock.wait(1000)
    assert milliseconds(read(memory)) == {"RUNNING": 3, "DATA": 10, "BACKWARD": 20, "WAITING": 11}
    assert read(memory).exchanging == pytest.approx(0.007)
    page.begin_request()
    assert milliseconds(read(memory)) == {}


def test_a_function_that_an_earlier_loop_holds_goes_on_with_the_times_of_the_new_request(clock: Clock) -> None:
    memory = bytearray(layout.SIZE)
    page = ProgressPage(memory)
    page.begin_request()
    enter = page.enter
    clock.wait(50)
    page.begin_request()
    enter(Phase.FORWARD)
    clock.wait(2)
    enter(Phase.RUNNING)
    assert milliseconds(read(memory)) == {"FORWARD": 2}


def test_a_second_backward_through_a_loss_is_no_exchange(clock: Clock) -> None:
    memory = bytearray(layout.SIZE)
    page = ProgressPage(memory)
    page.begin_request()
    page.wait_after_backward()
    assert read(memory).phase is Phase.RUNNING


def test_a_copy_for_another_machine_has_the_time_until_then_whatever_clock_that_one_has(clock: Clock) -> None:
    reader = PageReader(anonymous_file())
    try:
        page = ProgressPage(mmap.mmap(reader.fd, layout.SIZE))
        page.begin_request()
        page.enter(Phase.FORWARD)
        clock.wait(8)
        copy = reader.copy()
    finally:
        reader.close()
    clock.now = 10**18
    assert milliseconds(read(copy)) == {"FORWARD": 8}


def train(slow: int) -> dict[str, float]:
    import time

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from nb_accelerate import Accelerator
    from nb_accelerate.progress_page import here

    accelerator = Accelerator(cpu=True)

    def collate(rows: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        time.sleep(0.05 if accelerator.process_index == slow else 0.0)
        return torch.stack([row[0] for row in rows])

    loader = DataLoader(TensorDataset(torch.ones(80, 4)), batch_size=4, collate_fn=collate)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    sample = read(here()._memory)
    return {**{phase.name: spent for phase, spent in sample.seconds.items()}, "exchanging": sample.exchanging}


def test_who_waits_for_the_gradients_of_another_rank_waits_and_does_not_compute() -> None:
    first, slow = notebook_launcher(train, (1,), num_processes=2, progress="off")
    assert slow["DATA"] >= 0.5  # ten batches
    assert first["exchanging"] >= 0.4
    assert first["DATA"] < 0.2 > slow["exchanging"]
    assert first["BACKWARD"] < 0.3


def test_a_signal_that_enters_a_phase_while_another_begins_does_not_shift_later_times(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = bytearray(layout.SIZE)
    interrupting: list[int] = []

    def interrupted() -> int:
        now = clock()
        for phase in [interrupting.pop() for _ in interrupting]:
            clock.wait(1)
            page.enter(phase)
        return now

    monkeypatch.setattr("time.monotonic_ns", interrupted)
    page = ProgressPage(memory)
    page.begin_request()
    page.enter(Phase.FORWARD)
    clock.wait(10)
    interrupting.append(Phase.SAVING)
    page.enter(Phase.BACKWARD)
    clock.wait(5)
    page.enter(Phase.RUNNING)
    clock.wait(7)
    assert milliseconds(read(memory)) == {"FORWARD": 11, "BACKWARD": 6, "RUNNING": 7}  # 1 ms is counted twice

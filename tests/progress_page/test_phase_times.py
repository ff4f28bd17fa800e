"""The time of each phase is added up in the rank, to the nanosecond, and read from outside while it goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nb_accelerate import notebook_launcher
from nb_accelerate.base.progress_page import Collective, Phase, ProgressPage, Sample, layout
from nb_accelerate.base.progress_page.sample import read


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
    assert read(memory).waits_in is Collective.backward
    page.enter(Phase.RUNNING)
    before = page.wait_in(Collective.barrier)
    clock.wait(4)
    page.enter(before)
    page.end_request()
    clock.wait(1000)
    assert milliseconds(read(memory)) == {"RUNNING": 3, "DATA": 10, "BACKWARD": 20, "WAITING": 11}
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


def train(slow: int) -> dict[str, float]:
    import time

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from nb_accelerate import Accelerator
    from nb_accelerate.base.progress_page import here

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
    return {phase.name: spent for phase, spent in read(here().buffer).seconds.items()}


def test_who_waits_for_the_gradients_of_another_rank_waits_and_does_not_compute() -> None:
    first, slow = notebook_launcher(train, (1,), num_processes=2, progress="off")
    assert slow["DATA"] >= 0.5  # ten batches
    assert first["WAITING"] >= 0.4
    assert first["DATA"] < 0.2 > slow["WAITING"]
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


def work_before_forward(kind: str) -> dict[str, float]:
    import time

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from nb_accelerate import Accelerator
    from nb_accelerate.base.progress_page import here

    accelerator = Accelerator(cpu=True, dynamo_backend="eager" if kind == "compiled" else "no")
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if kind == "compiled later":
        model = torch.compile(model, backend="eager", fullgraph=accelerator.num_processes == 1)
    if "compiled" in kind:
        for _ in range(2):
            model(torch.ones(4, 4)).mean().backward()  # compiles outside of the loop
    here().begin_request()
    for (batch,) in loader:
        time.sleep(0.02)
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    return {phase.name: spent for phase, spent in read(here().buffer).seconds.items()}


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("usual", 1),
        ("usual", 2),
        ("compiled", 1),
        pytest.param("compiled", 2, marks=pytest.mark.slow),
        ("compiled later", 1),
    ],
)
def test_what_comes_before_the_call_of_the_model_is_no_forward(kind: str, world_size: int) -> None:
    for seconds in notebook_launcher(work_before_forward, (kind,), num_processes=world_size, progress="off"):
        before, other = ("FORWARD", "RUNNING") if kind == "compiled later" else ("RUNNING", "FORWARD")
        assert seconds[before] >= 0.02 * (16 // world_size - 1)
        assert seconds[other] < seconds[before] / 2


@pytest.mark.slow
def test_a_model_that_was_prepared_can_be_loaded_and_compiled_without_this_package(tmp_path: Path) -> None:
    def train() -> None:
        import torch
        from torch import nn

        from nb_accelerate import Accelerator
        from nb_accelerate.base.progress_page import here

        model = Accelerator(cpu=True).prepare(nn.Linear(2, 1))
        model(torch.ones(1, 2))
        assert here().saw_forward
        torch.save(model, tmp_path / "model.pt")

    notebook_launcher(train, num_processes=1, progress="off")
    program = """
import sys
sys.modules["nb_accelerate"] = None
import torch
model = torch.load(sys.argv[1], weights_only=False)
compiled = torch.compile(model, backend="eager", fullgraph=True)
print(torch.equal(model(torch.ones(1, 2)), compiled(torch.ones(1, 2))))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "model.pt")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True\n"

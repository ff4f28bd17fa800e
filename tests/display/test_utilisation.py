"""How busy the device of a rank is: who is asked, how often, and what becomes of it if nobody can say."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nb_accelerate.base.devices import DeviceKind
from nb_accelerate.base.progress_page import ProgressPage, layout
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.base.seam import call_returned
from nb_accelerate.training.accelerator import losses
from nb_accelerate.training.accelerator.losses import LossReport, MemoryReport
from nb_accelerate.training.comm.collectives import SingleCollectives
from nb_accelerate.training.process.devices import CPU, device_kind
from nb_accelerate.training.state.choices import Prepared
from nb_accelerate.training.strategies.strategy import Strategy


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(losses, "time", one)
    return one


@pytest.fixture
def memory() -> bytearray:
    return bytearray(layout.SIZE)


def page_on(memory: bytearray) -> ProgressPage:
    page = ProgressPage(memory)
    page.begin_request()
    return page


def report_on(page: ProgressPage, kind: DeviceKind) -> LossReport:
    strategy = Strategy(torch.device(kind.name), SingleCollectives())
    return LossReport(page, kind, MemoryReport(page, kind, strategy, Prepared(), ranks=1))


def steps(memory: bytearray, utilisation: Callable[[], int] | None, clock: Clock, seconds: float) -> list[int | None]:
    """What the page says after each of many steps with a device that answers like this."""
    report = report_on(page_on(memory), replace(CPU, utilisation=utilisation))
    said, end = [], clock.now + seconds
    while clock.now < end:
        report.report(torch.tensor(1.0))
        said.append(read(memory).utilisation)
        clock.now += 0.03
    return said


def test_a_device_is_asked_once_a_second_and_what_it_says_stays_on_the_page(clock: Clock, memory: bytearray) -> None:
    answers = iter(range(90, 100))
    said = steps(memory, lambda: next(answers), clock, 4.5)
    assert sorted(set(said)) == [90, 91, 92, 93, 94]
    assert said == sorted(said)


def test_a_device_that_cannot_say_is_asked_once(clock: Clock, memory: bytearray) -> None:
    asked = []

    def fails() -> int:
        asked.append(clock.now)
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    assert set(steps(memory, fails, clock, 5.0)) == {None}
    assert len(asked) == 1
    assert read(memory).loss == 1.0


def test_a_kind_of_device_that_nobody_can_ask_says_nothing(clock: Clock, memory: bytearray) -> None:
    assert set(steps(memory, CPU.utilisation, clock, 2.0)) == {None}


@pytest.mark.parametrize("is_of_this_process", [True, False])
def test_when_a_call_returns_its_last_loss_is_reported_and_not_that_of_the_process_it_was_forked_from(
    clock: Clock, memory: bytearray, monkeypatch: pytest.MonkeyPatch, is_of_this_process: bool
) -> None:
    page = page_on(memory)
    if is_of_this_process:
        monkeypatch.setattr(losses, "here", lambda: page)
    report = report_on(page, CPU)
    for loss in (1.0, 2.0):  # the second one too soon
        report.report(torch.tensor(loss))
    assert read(memory).loss == 1.0
    call_returned.fire()
    assert read(memory).loss == (2.0 if is_of_this_process else 1.0)
    report.report(torch.tensor(3.0))  # too soon again, and older than the next one
    clock.now += 1.0
    report.report(torch.tensor(4.0))
    call_returned.fire()
    assert read(memory).loss == 4.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device that answers")
def test_where_torch_has_no_gpu_to_ask_its_error_ends_no_step(clock: Clock, memory: bytearray) -> None:
    ask = device_kind("cuda").utilisation
    assert ask is not None
    with pytest.raises(Exception, match=r".") as caught:
        ask()
    assert not isinstance(caught.value, AttributeError), "torch has another name for it"
    assert set(steps(memory, ask, clock, 2.0)) == {None}


@pytest.mark.gpu
def test_a_gpu_that_computes_says_so_if_its_library_is_installed(memory: bytearray) -> None:
    report = report_on(page_on(memory), device_kind("cuda"))
    has_library = torch.version.hip is None and importlib.util.find_spec("pynvml") is not None
    x = torch.randn(4096, 4096, device="cuda")
    said = set()
    began = torch.cuda.Event(enable_timing=True)
    ended = torch.cuda.Event(enable_timing=True)
    began.record()
    seconds = 0.0
    while seconds < 3.0:
        for _ in range(20):
            x = (x @ x).clamp(-1, 1)
        report.report(x.mean())
        said.add(read(memory).utilisation)
        ended.record()
        ended.synchronize()
        seconds = began.elapsed_time(ended) / 1000
    if not has_library:
        assert said == {None}
    else:
        assert max(one for one in said if one is not None) > 50

"""`sweep`: one call for each configuration, some at a time, each in a process alone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from nb_accelerate import sweep
from nb_accelerate.base.helper_threads import HelperThread
from nb_accelerate.errors import ConfigError, RankDiedError


@pytest.mark.contract("a launch: a sweep")
def test_values_come_in_order_and_calls_are_on_at_a_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def train(index: int) -> tuple[int, str | None, int, int]:
        import torch

        (tmp_path / str(index)).touch()
        until = time.monotonic() + 20
        while index < 2 and len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < until, "the first two are not on at the same time"
            time.sleep(0.01)
        print("hello")
        return index, os.environ.get("WORLD_SIZE"), os.getpid(), torch.get_num_threads()

    found = sweep(train, [{"index": index} for index in range(4)], 2)
    assert [index for index, *_ in found] == [0, 1, 2, 3]
    assert {size for _, size, *_ in found} <= {"1", None}
    assert len({pid for *_, pid, _ in found}) == 4
    assert {threads for *_, threads in found} == {max(1, len(os.sched_getaffinity(0)) // 2)}
    printed = capfd.readouterr()
    lines = (printed.out + printed.err).splitlines()
    for index in range(4):
        assert f"[index={index}] hello" in lines
        assert any(line.startswith(f"[index={index}] done · 0:") for line in lines)


def test_a_call_that_fails_costs_only_itself() -> None:
    def train(index: int) -> int:
        if index == 1:
            raise LookupError("on purpose")
        if index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    with pytest.raises(LookupError, match="on purpose") as caught:
        sweep(train, [{"index": index} for index in range(4)], 2)
    first, second, third, fourth = caught.value.results  # type: ignore[attr-defined]
    assert (first, type(second), type(third), fourth) == (0, LookupError, RankDiedError, 3)


def test_an_interrupt_ends_what_is_on_and_starts_no_more(tmp_path: Path) -> None:
    def train(index: int) -> None:
        (tmp_path / str(index)).touch()
        time.sleep(600)

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    thread = HelperThread(interrupt, name="interrupt")
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sweep(train, [{"index": index} for index in range(5)], 2)
    thread.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def _train(lr: float) -> float:
    return lr


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ({"lr": [0.1]}, "a dict was given"),
        ([], "no configuration"),
        ([{"lr": 1.0}, {"rate": 1.0}], r"1, \{'rate': 1.0\}, does not fit"),
    ],
)
def test_what_is_no_list_of_arguments_is_refused_before_anything_runs(runs: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sweep(_train, runs)


def test_its_calls_are_on_this_machine_whatever_engine_the_notebook_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NB_ACCELERATE_ENGINE", "command")
    monkeypatch.setenv("NB_ACCELERATE_HOSTS", "a:8,b:4")
    monkeypatch.setenv("NB_ACCELERATE_COMMAND_TEMPLATE", "false {host} {command}")
    assert sweep(lambda number: number + 1, [{"number": 6}], 1) == [7]

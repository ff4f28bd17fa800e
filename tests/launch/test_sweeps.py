"""``notebook_launcher(train, sweep=[...])``: a run for each configuration, each in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
from fixtures.kernels import Kernel, message_until

import nb_accelerate
from nb_accelerate.errors import ConfigError, DeadlineError, RankDiedError, ShippingError
from nb_accelerate.notebook.launch import notebook_launcher
from nb_accelerate.notebook.launch.configurations import names_of


def sweep(function: Any, runs: Any, ranks: int | None = 2, **options: Any) -> Any:
    return notebook_launcher(function, num_processes=ranks, sweep=runs, devices="cpu", **{"progress": "off", **options})


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


def test_values_come_in_the_order_of_the_configurations_whichever_run_ends_first(tmp_path: Path) -> None:
    last = tmp_path / "last"

    def train(index: int) -> int:
        if index == 0:
            wait_for(last)  # runs on the other rank while this one waits
        if index == 4:
            last.touch()
        return index

    assert sweep(train, [{"index": index} for index in range(5)]) == [0, 1, 2, 3, 4]


def test_each_run_is_a_process_alone_that_begins_as_all_others_do() -> None:
    def train(lr: float, scale: float) -> tuple[Any, ...]:
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        is_grouped = torch.distributed.is_initialized()
        return lr * scale, accelerator.num_processes, accelerator.process_index, is_grouped, torch.rand(()).item()

    first, second, third = sweep(train, ({"lr": lr} for lr in (1.0, 2.0, 3.0)), ranks=1, kwargs={"scale": 10.0})
    assert [first[:4], second[:4], third[:4]] == [(lr, 1, 0, False) for lr in (10.0, 20.0, 30.0)]
    assert first[4] == second[4] == third[4]


def test_no_more_processes_are_started_than_there_are_configurations_and_they_share_all_cores() -> None:
    def train(lr: float) -> int:
        import torch

        return torch.get_num_threads()

    (alone,) = notebook_launcher(train, (1.0,), 1, devices="cpu", progress="off")
    assert sweep(train, [{"lr": 1.0}], ranks=64) == [alone]


def test_a_configuration_comes_before_what_all_runs_share() -> None:
    def train(lr: float, epochs: int) -> tuple[float, int]:
        return lr, epochs

    assert sweep(train, [{}, {"epochs": 9}], args=(0.1,), kwargs={"epochs": 3}) == [(0.1, 3), (0.1, 9)]


def test_lines_say_which_run_has_printed_them(capsys: pytest.CaptureFixture[str]) -> None:
    sweep(lambda lr, depth: print("hello"), [{"lr": lr, "depth": 3} for lr in (0.1, 0.2)], ranks=1)
    assert capsys.readouterr().out == "[lr=0.1] hello\n[lr=0.2] hello\n"


def test_a_run_that_fails_costs_only_itself(capsys: pytest.CaptureFixture[str]) -> None:
    def train(lr: float) -> float:
        if lr == 0.2:
            raise LookupError("no loss")
        if lr == 0.4:
            raise ValueError("nan")
        return lr

    with pytest.raises(LookupError, match="no loss") as caught:
        sweep(train, [{"lr": lr} for lr in (0.1, 0.2, 0.3, 0.4, 0.5)])
    error: Any = caught.value
    assert [error.results[index] for index in (0, 2, 4)] == [0.1, 0.3, 0.5]
    assert error.results[1] is error
    assert isinstance(error.results[3], ValueError)
    assert error.__notes__ == ["Raised by sweep[1] (lr=0.2)."]
    said = capsys.readouterr().err
    assert "sweep[1] (lr=0.2) failed: LookupError: no loss; the other runs go on" in said
    assert "3 of 5 runs have returned" in said


def test_a_process_that_is_killed_costs_its_run_and_another_takes_its_place() -> None:
    def train(lr: float) -> float:
        if lr == 0.1:
            os.kill(os.getpid(), signal.SIGKILL)
        return lr

    with pytest.raises(RankDiedError, match=r"sweep\[0\] \(lr=0.1\) was ended by SIGKILL") as caught:
        sweep(train, [{"lr": lr} for lr in (0.1, 0.2, 0.3)], ranks=1)
    error: Any = caught.value
    assert error.results == [error, 0.2, 0.3]


def test_a_value_that_cannot_be_sent_back_is_the_failure_of_its_run() -> None:
    def train(lr: float) -> Any:
        return threading.Lock() if lr == 0.1 else lr

    with pytest.raises(ShippingError) as caught:
        sweep(train, [{"lr": 0.1}, {"lr": 0.2}])
    assert caught.value.results[1] == 0.2  # type: ignore[attr-defined]


def test_time_that_is_over_ends_runs_and_starts_no_more() -> None:
    def train(lr: float) -> float:
        if lr == 0.1:
            time.sleep(600)
        return lr

    with pytest.raises(DeadlineError, match=r"sweep\[0\] \(lr=0.1\) had not finished") as caught:
        sweep(train, [{"lr": 0.1}, {"lr": 0.2}], ranks=1, timeout=3.0)
    error: Any = caught.value
    assert "sweep[1] (lr=0.2) was not started" in str(error.results[1])


def test_an_interrupt_ends_all_runs_and_keeps_what_has_returned(tmp_path: Path) -> None:
    waiting = tmp_path / "waiting"

    def train(index: int) -> int:
        if index:
            if index == 2:
                waiting.touch()
            time.sleep(600)
        return index

    def interrupt() -> None:
        wait_for(waiting)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="the sweep was interrupted") as caught:
        sweep(train, [{"index": index} for index in range(5)])
    thread.join()
    results = caught.value.results  # type: ignore[attr-defined]
    assert results[0] == 0
    assert [type(result) for result in results[1:]] == [*[KeyboardInterrupt] * 2, *[CancelledError] * 2]


def test_a_sweep_in_the_background_is_a_handle(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def train(index: int) -> int:
        print("begins")
        wait_for(gate)
        return index

    handle = sweep(train, [{"index": index} for index in range(3)], block=False)
    while [run.state for run in handle.ranks] != ["running"] * 2:
        time.sleep(0.005)
    assert handle.status() == "running"
    assert [run.rank for run in handle.ranks] == [0, 1]
    assert handle.output(2) == ""
    gate.touch()
    assert handle.result() == [0, 1, 2]
    assert handle.output(2) == "begins\n"
    assert handle.status() == "done"


def test_a_sweep_that_is_stopped_says_so(tmp_path: Path) -> None:
    here = tmp_path / "here"

    def train(index: int) -> None:
        here.touch()
        time.sleep(600)

    handle = sweep(train, [{"index": 0}, {"index": 1}], ranks=1, block=False)
    wait_for(here)
    handle.stop()
    assert handle.status() == "stopped"
    with pytest.raises(KeyboardInterrupt, match="the sweep was stopped") as caught:
        handle.result()
    assert isinstance(caught.value.results[1], CancelledError)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("method", "rates"), [("fork", [0.1, 0.2]), ("spawn", [0.1])])
def test_every_start_method_that_makes_processes_runs_a_sweep(method: str, rates: list[float]) -> None:
    def train(lr: float) -> float:
        return lr

    assert sweep(train, [{"lr": lr} for lr in rates], start_method=method) == rates


def named(lr: float, *, depth: int = 1) -> None:
    """Take a configuration."""


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([], "sweep has no configuration"),
        (iter(()), "A generator can be read only once"),
        (3, "sweep=3 is of type int"),
        ({"lr": [0.1, 0.2]}, r"Write sweep=\[dict\(lr=value\) for value in \.\.\.\]"),
        ([{"lr": 0.1}, 0.2], r"sweep\[1\]=0.2 is of type float"),
        ([{"lr": 0.1}, {"lr": 0.1, "width": 2}], r"sweep\[1\]=.* does not fit named.*'width'"),
        ([{"depth": 2}], r"sweep\[0\]=.* does not fit named.*'lr'"),
    ],
)
def test_what_is_no_list_of_configurations_is_refused(runs: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sweep(named, runs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_restarts": 1}, "max_restarts=1 is not for a sweep"),
        ({"num_nodes": 2, "master_addr": "10.0.0.1"}, "num_nodes=2 is not for a sweep"),
        ({"log_line_prefix_template": "${rank}"}, "marked with the configuration"),
        ({"start_method": "inline", "ranks": 1}, "start_method='inline' starts none"),
    ],
)
def test_options_that_a_sweep_cannot_have_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sweep(named, [{"lr": 0.1}], **options)


def test_a_configuration_that_cannot_be_pickled_is_named_before_a_run_begins(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def train(lr: Any) -> None:
        begun.touch()

    with pytest.raises(ShippingError, match=r"sweep\[1\]\['lr'\] cannot be sent"):
        sweep(train, [{"lr": 0.1}, {"lr": threading.Lock()}])
    assert not begun.exists()


def test_a_run_is_named_by_what_differs_from_others() -> None:
    assert names_of([{"lr": 0.1, "depth": 2}, {"lr": 0.2, "depth": 2}]) == ["lr=0.1", "lr=0.2"]
    assert names_of([{"lr": 0.1}]) == ["lr=0.1"]
    assert names_of([{"lr": 0.1}, {"lr": 0.1}]) == ["#0", "#1"]
    assert names_of([{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2}]) == ["#0, lr=0.1", "#1, lr=0.1", "#2, lr=0.2"]
    assert names_of([{"lr": 0.1}, {"lr": 0.1, "clip": 1.0}]) == ["#0", "#1, clip=1"]


def test_runs_are_kept_with_their_configuration_and_how_they_ended() -> None:
    def learn(lr: float, momentum: float = 0.5) -> None:
        import torch

        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        model = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr, momentum))
        for loss in (9.0, 8.0, 7.0):  # in less time than there is between two reports
            accelerator.backward((model(torch.ones(1, 1)) * 0 + loss).mean())
            optimizer.step()

    with pytest.raises(ValueError, match="Invalid learning rate"):
        sweep(learn, [{"lr": 0.1}, {"lr": -1.0}], ranks=1)
    first, second = nb_accelerate.runs()[-2:]
    assert (first.config, first.ended) == ({"lr": 0.1, "momentum": 0.5}, "done")
    assert [loss for _, loss in first.column("loss")] == [7.0]
    assert (second.config, second.ended) == ({"lr": -1.0, "momentum": 0.5}, "failed: ValueError")


def test_a_kernel_keeps_what_an_interrupted_sweep_has_and_nothing_else(kernel: Kernel) -> None:
    kernel.run(
        "import time\nfrom nb_accelerate import notebook_launcher\n"
        "def train(lr):\n    print('here', flush=True)\n    time.sleep(0 if lr == 0.1 else 600)\n    return lr"
    ).ok()
    kernel.run("notebook_launcher(train, sweep=[dict(lr=0.1)], num_processes=2, devices='cpu')").ok()
    before = kernel.counts()
    cell = kernel.start(
        "notebook_launcher(train, sweep=[dict(lr=lr) for lr in (0.1, 0.2, 0.3)], num_processes=1, devices='cpu')"
    )
    kernel.wait_for_output(cell, "[lr=0.2] here")
    kernel.interrupt()
    ended = kernel.finish(cell)
    assert ended.error == "KeyboardInterrupt"
    assert any("1 of 3 runs have returned" in shown.get("text/plain", "") for shown in ended.displays)
    kept = kernel.run("import sys; [type(result).__name__ for result in sys.last_value.results]")
    assert kept.ok().value == "['float', 'KeyboardInterrupt', 'CancelledError']"
    assert kernel.settles_at(before)


@pytest.mark.limit(120)
def test_the_panel_is_a_table_of_runs(kernel: Kernel, tmp_path: Path) -> None:
    kernel.wait_for_server()
    kernel.run(
        "import pathlib, time, torch\nfrom nb_accelerate import Accelerator, notebook_launcher\n"
        "def train(lr, seen):\n"
        "    accelerator = Accelerator()\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    loader = torch.utils.data.DataLoader(torch.ones(8, 1))\n"
        "    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr), loader)\n"
        "    for batch in loader:\n"
        "        accelerator.backward(model(batch).mean())\n"
        "        optimizer.step()\n"
        "    while not pathlib.Path(seen).exists():\n"
        "        time.sleep(0.02)\n"
    ).ok()
    seen = tmp_path / "seen"
    cell = kernel.start(
        f"notebook_launcher(train, kwargs=dict(seen={str(seen)!r}), sweep=[dict(lr=lr) for lr in (0.1, -1.0, 0.3)], "
        "num_processes=1, devices='cpu', progress='widget')"
    )

    def is_in_first_run(message: dict[str, Any]) -> bool:
        head = str(message["content"].get("data", {}).get("text/plain", "")).partition("\n")[0]
        return "1 running" in head and "2 waiting" in head

    message_until(kernel, is_in_first_run)
    seen.touch()
    ended = kernel.finish(cell)
    assert ended.error == "ValueError"
    tables = [
        shown["text/plain"].splitlines() for shown in ended.displays if " at a time" in shown.get("text/plain", "")
    ]
    head, titles, *rows = tables[-1][:5]
    assert "2 of 3 runs have returned" in tables[-1][5], "information is a line of the panel"
    assert head.startswith("✗ train · 3 runs · 1 at a time · CPU · 0:")
    assert head.endswith("2 done · 1 failed")
    assert titles.split() == ["run", "step", "loss", "time", "now"]
    assert [row.split()[0] for row in rows] == ["lr=0.1", "lr=-1", "lr=0.3"]
    assert [row.split()[-1] for row in (rows[0], rows[2])] == ["done"] * 2
    assert "ValueError: Invalid learning rate: -1.0" in rows[1]

"""Clicks on the buttons of a panel while a cell runs, as front ends send them, in whatever ipykernel is installed.

VS Code sends them on the shell channel with a subshell that is null, Colab and Kaggle without one, JupyterLab with one.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.kernels import Kernel, start_in_lab
from fixtures.limits import PATIENCE
from fixtures.panels import EVEN, Run

from nb_accelerate.notebook.display.drawing.notebook_panel import NotebookPanel
from nb_accelerate.notebook.display.widgets import shell_channel

SETUP = """
import os, time, signal
import matplotlib.pyplot as plt
import nb_accelerate
from nb_accelerate import notebook_launcher
%load_ext nb_accelerate
%matplotlib inline

def train(path):
    while not os.path.exists(path):
        time.sleep(0.01)

seen, hooks, clicks = [], [], []
get_ipython().events.register("pre_execute", lambda: hooks.append("pre"))
get_ipython().events.register("post_execute", lambda: hooks.append("post"))

from nb_accelerate.notebook.display.widgets.controls import Controls
toggle = Controls._toggle
Controls._toggle = lambda self, aside: (clicks.append(aside.__name__), toggle(self, aside))[-1]
"""
VIEW = "application/vnd.jupyter.widget-view+json"
WITHOUT = object()
"""A header without a subshell."""


class Page:
    """A page with a cell whose panel has buttons: what it is told, and how it presses them."""

    def __init__(self, kernel: Kernel, code: str) -> None:
        self.kernel, self.session, self.client = kernel, kernel.client.session, kernel.client
        self.messages: list[dict[str, Any]] = []
        self.buttons: dict[str, str] = {}
        self.cell = start_in_lab(kernel, code)
        self.box: str = self.until(lambda one: VIEW in one["content"].get("data", {}))["content"]["data"][VIEW][
            "model_id"
        ]
        self.idle(self.press("More"))

    def read(self, timeout: float) -> dict[str, Any]:
        message: dict[str, Any] = self.client.get_iopub_msg(timeout=max(0.0, timeout))
        self.messages.append(message)
        state = message["content"].get("data", {}).get("state", {}) if message["msg_type"] == "comm_open" else {}
        if state.get("_model_name") == "ButtonModel":
            self.buttons[state["description"]] = message["content"]["comm_id"]
        return message

    def until(self, is_wanted: Any, timeout: float = 30.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while not is_wanted(message := self.read(deadline - time.monotonic())):
            pass
        return message

    def send(self, kind: str, content: dict[str, Any], subshell: Any = None) -> str:
        message = self.session.msg(kind, content)
        if subshell is not WITHOUT:
            message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def press(self, title: str, subshell: Any = None) -> str:
        data = {"method": "custom", "content": {"event": "click"}}
        return self.send("comm_msg", {"comm_id": self.buttons[title], "data": data}, subshell)

    def execute(self, code: str, *, stop_on_error: bool = True) -> str:
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "user_expressions": {}}
        return self.send("execute_request", {**content, "stop_on_error": stop_on_error})

    def idle(self, sent: str, timeout: float = 20.0) -> None:
        """Wait until the kernel has said that it is done with a message."""
        self.until(lambda one: is_idle(one) and one["parent_header"].get("msg_id") == sent, timeout)

    def all_idle(self, sent: list[str]) -> list[str]:
        """Wait until the kernel is done with all of these and the cell; their order in which it was."""
        missing = {*sent, self.cell} - {one["parent_header"].get("msg_id") for one in self.messages if is_idle(one)}
        while missing:
            message = self.read(30.0)
            if is_idle(message):
                missing.discard(message["parent_header"].get("msg_id"))
        done = [one["parent_header"].get("msg_id") for one in self.messages if is_idle(one)]
        return [one for one in done if one in sent]

    def replies(self, sent: list[str]) -> dict[str, dict[str, Any]]:
        """The replies to requests, by request, in the order in which they came."""
        found: dict[str, dict[str, Any]] = {}
        while len(found) < len(sent):
            reply = self.client.get_shell_msg(timeout=30)
            if reply["parent_header"]["msg_id"] in sent:
                found[reply["parent_header"]["msg_id"]] = reply["content"]
        return found

    def output(self) -> str:
        """What was printed in any cell."""
        return "".join(one["content"]["text"] for one in self.messages if one["msg_type"] == "stream")


def is_idle(message: dict[str, Any]) -> bool:
    return message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.run(SETUP).ok()
    shared_kernel.warm_up()
    return shared_kernel


@pytest.fixture
def end(tmp_path: Path) -> Path:
    """The file at which ranks end."""
    return tmp_path / "end"


def value(kernel: Kernel, code: str) -> Any:
    return eval(kernel.run(code).ok().value or "None")  # of a test's own


WAITS = {
    "a launch": "notebook_launcher(train, ({end!r},), 2, progress='widget')",
    "a result": "launch = notebook_launcher(train, ({end!r},), 2, progress='widget', block=False)\nlaunch.result()",
    "an awaited launch": "await notebook_launcher(train, ({end!r},), 2, progress='widget', block=False)",
    "a cell for ranks": "%%distributed -n 2 --progress widget\nimport os, time\n"
    "while not os.path.exists({end!r}):\n    time.sleep(0.01)",
}


@pytest.mark.parametrize("waits", WAITS)
def test_a_click_is_answered_within_a_second_while_the_cell_waits_for(notebook: Kernel, end: Path, waits: str) -> None:
    page = Page(notebook, WAITS[waits].format(end=str(end)))
    seconds = []
    for subshell in (None, WITHOUT, None, "the-id-of-a-subshell", None):
        began = time.monotonic()
        page.idle(page.press("Log", subshell))
        seconds.append(time.monotonic() - began)
    page.idle(page.press("Stacks"))
    page.until(lambda one: "where ranks are" in str(one["content"].get("data")))
    end.touch()
    page.idle(page.cell)
    assert statistics.median(seconds) < 1, seconds
    assert value(notebook, "clicks[-6:]") == [*["_log"] * 5, "_stacks"]
    if "ranks" in waits:
        notebook.run("%distributed stop").ok()


@pytest.mark.contract("panel: clicks")
def test_of_300_clicks_at_once_none_is_lost(notebook: Kernel, end: Path) -> None:
    page = Page(notebook, WAITS["a launch"].format(end=str(end)))
    notebook_clicks = [page.press(title) for title in itertools.islice(itertools.cycle(("Stacks", "Log")), 300)]
    missing = {*notebook_clicks}
    while missing:  # in any order, which is asserted below
        if is_idle(message := page.read(PATIENCE * 20.0)):
            missing.discard(message["parent_header"].get("msg_id"))
    end.touch()
    assert page.all_idle(notebook_clicks) == notebook_clicks
    assert value(notebook, "clicks[-300:]") == ["_stacks", "_log"] * 150


def test_what_comes_before_and_after_the_end_of_a_cell_is_answered_in_order(notebook: Kernel, end: Path) -> None:
    notebook.run("seen.clear()").ok()
    page = Page(notebook, WAITS["a launch"].format(end=str(end)))
    clicks, cells, others = [], [], []
    for number in range(350):
        if number == 150:
            end.touch()
        if number % 5 == 1:
            cells.append(page.execute(f"seen.append({number})"))
        elif number % 5 == 3:
            others.append(page.send("is_complete_request", {"code": "1"}))
        else:
            clicks.append(page.press("Log"))
    replies = page.replies([*cells, *others])
    assert [one for one in replies if one in cells] == cells
    assert [one for one in replies if one in others] == others
    assert {one["status"] for one in replies.values()} == {"ok", "complete"}
    assert page.all_idle(clicks) == clicks
    assert page.all_idle(cells) == cells
    assert "No such comm" not in page.output()
    assert value(notebook, "seen") == [number for number in range(350) if number % 5 == 1]


def test_after_an_error_cells_that_wait_are_not_run_though_buttons_were_pressed(notebook: Kernel, end: Path) -> None:
    notebook.run("seen.clear()").ok()
    page = Page(notebook, f"{WAITS['a launch'].format(end=str(end))}\nraise LookupError('of the user')")
    sent = [page.execute("seen.append(1)")]
    clicks = [page.press("Log") for _ in range(20)]
    sent.append(page.execute("seen.append(2)"))
    for click in clicks:
        page.idle(click)
    end.touch()
    assert [one["status"] for one in page.replies(sent).values()] == ["aborted", "aborted"]
    page.all_idle(sent)
    assert value(notebook, "seen") == []


def test_an_interrupt_between_clicks_ends_the_cell_and_none_is_lost(notebook: Kernel, end: Path) -> None:
    page = Page(notebook, WAITS["a launch"].format(end=str(end)))
    clicks = [page.press("Log") for _ in range(100)]
    notebook.interrupt()
    clicks += [page.press("Log") for _ in range(100)]
    assert page.replies([page.cell])[page.cell]["ename"] == "KeyboardInterrupt"
    assert page.all_idle(clicks) == clicks
    assert "No such comm" not in page.output()


def test_neither_a_click_nor_a_page_that_is_loaded_anew_runs_hooks_or_closes_a_figure(
    notebook: Kernel, end: Path
) -> None:
    launch = WAITS["a launch"].format(end=str(end))
    page = Page(notebook, f"hooks.clear(); plt.plot([1, 2]); plt.title('mine')\n{launch}\nplt.gca().get_title(), hooks")
    page.idle(page.press("Log"))
    page.idle(page.press("Stacks", "the-id-of-a-subshell"))
    control = {"comm_id": "control-of-a-page", "data": {}}
    opening = page.session.msg("comm_open", {**control, "target_name": "jupyter.widget.control"})
    opening["metadata"] = {"version": "1.0.0"}
    page.client.shell_channel.send(opening)
    page.idle(page.send("comm_msg", {**control, "data": {"method": "request_states"}}))
    page.idle(page.send("comm_msg", {"comm_id": page.box, "data": {"method": "request_state"}}, "a-subshell"))
    page.idle(page.send("comm_close", control))
    end.touch()
    page.idle(page.cell)
    results = [one["content"]["data"]["text/plain"] for one in page.messages if one["msg_type"] == "execute_result"]
    assert results == ["('mine', [])"]
    pictures = [one for one in page.messages if "image/png" in one["content"].get("data", {})]
    assert [one["parent_header"]["msg_id"] for one in pictures] == [page.cell]


def test_the_kernel_receives_its_messages_itself_again_when_no_panel_is_left(kernel: Kernel, end: Path) -> None:
    kernel.run(SETUP).ok()
    kernel.put("nb_accelerate.notebook.display.widgets.shell_channel._LINGER", 0.0)
    page = Page(kernel, WAITS["a launch"].format(end=str(end)))
    end.touch()
    page.idle(page.cell)
    kernel.run("from nb_accelerate.notebook.display.widgets import shell_channel").ok()
    deadline = time.monotonic() + 10
    while value(kernel, "len(shell_channel._channels)"):
        assert time.monotonic() < deadline
    assert "_Channel" not in str(value(kernel, "str(get_ipython().kernel.shell_stream._recv_callback)"))


def test_a_channel_that_cannot_be_read_ends_nothing_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError("Stream is closed")

    loop = SimpleNamespace(add_callback=lambda *_: None, call_later=None)
    stream = SimpleNamespace(io_loop=loop, on_recv=lambda *_, **__: None, flush=fail)
    kernel = SimpleNamespace(
        shell_stream=stream, schedule_dispatch=print, dispatch_shell=print, _parents={}, comm_manager=stream
    )
    shell_channel.answer_messages(kernel)
    try:
        assert [shell_channel.read_shell_channel() for _ in range(2)] == [math.inf, math.inf]
    finally:
        del shell_channel._channels[id(kernel)]
    (record,) = caplog.records
    assert "OSError: Stream is closed" in record.getMessage()


class Wire:
    """Keeps what a panel sends to a cell."""

    own_stream = "stdout"

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def write(self, stream: str, text: str) -> None: ...

    def display(self, kind: str, content: dict[str, Any]) -> None:
        self.shown.append(content["data"])


class Nobody:
    def log(self, rank: int) -> str:
        return ""


def test_in_a_kernel_that_cannot_answer_while_a_cell_runs_there_is_a_table_and_no_button() -> None:
    kernel: Any = type("AnotherKernel", (), {"comm_manager": None})()
    assert not shell_channel.can_answer(kernel)
    run, wire = Run(2), Wire()
    run.begin_loop()
    run.train(2, shares=EVEN)
    panel = NotebookPanel(wire, kernel, range(2), Nobody())  # type: ignore[arg-type]
    panel.draw(run.view)
    panel.finish(run.end(), was_drawn=True)
    assert any("nba-rank" in one.get("text/html", "") for one in wire.shown)
    assert not any(VIEW in one for one in wire.shown)

"""A page that is loaded anew while a cell runs: what the kernel answers it before that cell ends."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures.kernels import Kernel, message_until, start_in_lab

SETUP = """
import signal
from nb_accelerate import notebook_launcher

def train(seconds):
    while True:
        signal.pause()
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.run(SETUP).ok()
    return shared_kernel


def start_launch(kernel: Kernel) -> tuple[str, str]:
    """Start a cell that runs until it is interrupted; the ids of its request and of the box of its buttons."""
    cell = start_in_lab(kernel, "notebook_launcher(train, (600,), 2, progress='widget')")
    view = "application/vnd.jupyter.widget-view+json"
    shown = message_until(kernel, lambda one: view in one["content"].get("data", {}))
    return cell, shown["content"]["data"][view]["model_id"]


def test_a_page_that_is_loaded_anew_while_a_cell_runs_is_told_of_the_kernel_and_its_widgets(notebook: Kernel) -> None:
    client, session = notebook.client, notebook.client.session
    cell, box = start_launch(notebook)

    asked = client.kernel_info()
    reply = client.get_shell_msg(timeout=10)
    while reply["parent_header"]["msg_id"] != asked:
        assert reply["parent_header"]["msg_id"] != cell, "it waited for the end of the cell"
        reply = client.get_shell_msg(timeout=10)
    assert reply["content"]["status"] == "ok"

    control = {"comm_id": "control-of-a-page", "data": {}}
    opening = session.msg("comm_open", {**control, "target_name": "jupyter.widget.control"})
    opening["metadata"] = {"version": "1.0.0"}
    client.shell_channel.send(opening)
    client.shell_channel.send(session.msg("comm_msg", {**control, "data": {"method": "request_states"}}))
    told = message_until(
        notebook, lambda one: one["content"].get("data", {}).get("method") == "update_states" and one["content"]
    )
    states = told["content"]["data"]["states"]
    assert states[box]["model_name"] == "VBoxModel"
    again = states[box]["state"]["children"][0].removeprefix("IPY_MODEL_")
    drawn = message_until(notebook, lambda one: one["content"].get("comm_id") == again)
    assert "nba" in drawn["content"]["data"]["state"]["value"], "the widget draws the panel from then on"
    client.shell_channel.send(session.msg("comm_close", control))
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"


def reply_before_the_end(kernel: Kernel, asked: str, running: str) -> dict[str, Any]:
    """The answer to a question on the channel of cells, while one of them runs."""
    while True:
        reply: dict[str, Any] = kernel.client.get_shell_msg(timeout=10)
        assert reply["parent_header"]["msg_id"] != running, "it waited for the end of the cell"
        if reply["parent_header"]["msg_id"] == asked:
            return reply


def test_a_page_that_was_not_told_of_all_widgets_in_time_is_told_of_each_while_a_cell_runs(notebook: Kernel) -> None:
    client, session = notebook.client, notebook.client.session
    cell, box = start_launch(notebook)

    comms = reply_before_the_end(notebook, client.comm_info("jupyter.widget"), cell)["content"]["comms"]
    assert comms[box] == {"target_name": "jupyter.widget"}
    assert reply_before_the_end(notebook, client.comm_info("of-no-comm"), cell)["content"]["comms"] == {}
    asking = session.msg("comm_msg", {"comm_id": box, "data": {"method": "request_state"}})
    client.shell_channel.send(asking)
    told = message_until(
        notebook, lambda one: one["parent_header"].get("msg_id") == asking["header"]["msg_id"] and one["content"]
    )
    while told["msg_type"] == "status":
        told = message_until(notebook, lambda one: one["parent_header"].get("msg_id") == asking["header"]["msg_id"])
    assert told["content"]["comm_id"] == box
    assert told["content"]["data"]["state"]["_model_name"] == "VBoxModel"
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"

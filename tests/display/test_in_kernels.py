"""Panels of real ranks, in a real kernel: what is sent to the front end, and what is left when it is over."""

from __future__ import annotations

import json
import queue
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fixtures.kernels import Kernel, start_in_lab

SETUP = """
import contextlib, functools, io, os, sys, threading, time, torch
from torch.utils.data import DataLoader, TensorDataset
from nb_accelerate import Accelerator, notebook_launcher

def train(seconds):
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    data = DataLoader(TensorDataset(torch.ones(int(seconds * 100), 4)), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
    for (rows,) in data:
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.04)

def bar(seconds):
    from tqdm.auto import tqdm
    for _ in tqdm(range(20), desc="rows"):
        time.sleep(seconds / 20)

def says(seconds):
    print("said at once", flush=True)
    time.sleep(seconds)

def quick():
    return int(os.environ["RANK"])

%load_ext nb_accelerate
"""

RANKS_THAT_STAY = "%%distributed --num-processes 2\nimport time\nfrom tqdm import trange"

LEFT = """
import ipywidgets
print(sorted(t.name for t in threading.enumerate() if "panel" in t.name),
      len(get_ipython().kernel.comm_manager.comms), len(ipywidgets.Widget.widgets))
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.wait_for_server()
    shared_kernel.run(SETUP).ok()
    shared_kernel.run(RANKS_THAT_STAY).ok()
    return shared_kernel


VIEW = "application/vnd.jupyter.widget-view+json"


@dataclass
class Sent:
    """All messages of a kernel while a cell ran."""

    seconds: float = 0.0
    messages: list[dict[str, Any]] = field(default_factory=list)

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [message["content"] for message in self.messages if message["msg_type"] in kinds]

    @property
    def text(self) -> str:
        return "".join(content["text"] for content in self.of("stream"))

    @property
    def tables(self) -> list[str]:
        """Panels, as text."""
        displays = self.of("display_data", "update_display_data")
        return [one["data"]["text/plain"] for one in displays if '"nba"' in one["data"].get("text/html", "")]

    @property
    def html(self) -> list[str]:
        """Panels as HTML."""
        displays = self.of("display_data", "update_display_data")
        return [one["data"]["text/html"] for one in displays if '"nba"' in one["data"].get("text/html", "")]

    @property
    def rows_of_buttons(self) -> list[list[str]]:
        """The titles of the buttons that were there, first and after each change."""
        titles: dict[str, str] = {}
        rows = []
        for content in self.of("comm_open", "comm_msg"):
            state, of = content["data"].get("state", {}), content["comm_id"]
            if state.get("_model_name") == "ButtonModel":
                titles["IPY_MODEL_" + of] = state["description"]
            elif titles.keys() & set(state.get("children", ())):
                rows.append([titles[child] for child in state["children"] if child in titles])
        return rows

    @property
    def buttons(self) -> dict[str, str]:
        """The comms of buttons, by the title that they began with."""
        made = [one for one in self.of("comm_open") if one["data"]["state"].get("_model_name") == "ButtonModel"]
        return {one["data"]["state"]["description"]: one["comm_id"] for one in made}

    @property
    def num_bytes(self) -> int:
        comms = self.of("comm_open", "comm_msg", "comm_close")
        return sum(len(json.dumps(content, default=str)) for content in comms)


def everything(
    kernel: Kernel, code: str, *, until: str = "", timeout: float = 50.0, in_lab: bool = False, presses: str = ""
) -> Sent:
    """Run a cell to its end, and on until it has displayed `until`.

    Args:
        in_lab: as somebody does who sees widgets.
        presses: a button that is pressed as soon as it can be seen.
    """
    sent, began = Sent(), time.monotonic()
    cell, done = (start_in_lab if in_lab else Kernel.start)(kernel, code), False
    while not done or until not in "".join(sent.tables):
        try:
            message = kernel.client.get_iopub_msg(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"nothing came; {sent.text!r} was printed") from None
        sent.messages.append(message)
        content = message["content"]
        assert message["msg_type"] != "error", "\n".join(content.get("traceback", ()))
        if content.get("execution_state") == "idle" and message["parent_header"].get("msg_id") == cell:
            done, sent.seconds = True, time.monotonic() - began
        if presses and VIEW in content.get("data", {}):
            data = {"method": "custom", "content": {"event": "click"}}
            click = {"comm_id": sent.buttons[presses], "data": data}
            kernel.client.shell_channel.send(kernel.client.session.msg("comm_msg", click))
    return sent


@pytest.mark.contract("panel: widgets")
def test_bars_of_ranks_stay_in_the_panel(notebook: Kernel) -> None:
    sent = everything(notebook, "notebook_launcher(bar, (0.3,), 2, progress='text')")
    (table,) = sent.tables
    assert table.startswith("✓ bar · 2")
    assert re.search(r"^rows +20/20 \[00:0\d, +[\d.]+it/s\]$", table, re.MULTILINE)
    assert "it/s]" not in sent.text, "the bar was not printed too"
    assert not sent.of("comm_open")


@pytest.mark.slow
def test_a_plain_training_function_prints_lines_and_leaves_a_table(notebook: Kernel) -> None:
    sent = everything(notebook, "notebook_launcher(train, (7.0,), 2, progress='text')")
    lines = re.findall(r"^train: .*$", sent.text, re.MULTILINE)
    assert 1 <= len(lines) <= 2
    assert re.match(r"train: .*/175 .*loss \d", lines[0])
    (table,) = sent.tables
    assert re.search(r"train .* done|✓ train", table)
    assert "175 steps" in table
    assert len(re.findall(r"^ +[01] .*done$", table, re.MULTILINE)) == 2


def test_a_panel_is_plain_output_with_buttons_that_go_when_it_ends(notebook: Kernel) -> None:
    sent = everything(notebook, "notebook_launcher(train, (2.5,), 2, progress='widget')")
    opened = {content["comm_id"] for content in sent.of("comm_open")}
    closed = {content["comm_id"] for content in sent.of("comm_close")}
    assert opened, "there were no buttons"
    assert opened == closed
    shown: dict[str, list[set[str]]] = {}
    for content in sent.of("display_data", "update_display_data"):
        shown.setdefault(content["transient"]["display_id"], []).append(set(content["data"]))
    panel, buttons, style = shown.values()
    assert panel[0] == {"text/plain"}
    assert all(kinds == {"text/html", "text/plain"} for kinds in panel[1:])
    view = {VIEW, "text/plain"}
    assert buttons == [set(), view, set()], "shown once, and gone at the end"
    assert style == [set(), {"text/html", "text/plain"}, set()]
    frames = sent.tables
    assert all(one.startswith(("○ train", "● train")) for one in frames[:-1])
    assert frames[-1].startswith("✓ train")
    assert 2 <= len(frames) <= 3 + 2 * sent.seconds
    heads = {re.sub(' style="[^"]*"', "", html.split("<thead>")[1].split("</thead>")[0]) for html in sent.html}
    assert len(heads) == 1, "columns that come and go"
    assert ["No news since" in html for html in sent.html] == [True] * (len(frames) - 1) + [False]
    assert sum(map(len, sent.html)) + sent.num_bytes <= 40_000 + 20_000 * sent.seconds, "bytes"
    assert notebook.run(LEFT).ok().stdout == "[] 0 0\n"


@pytest.mark.slow
def test_one_button_ends_the_run_and_another_one_opens_those_that_training_can_obey(notebook: Kernel) -> None:
    code = "notebook_launcher(train, (5.0,), 2, progress='widget')"
    assert everything(notebook, code.replace("5.0", "2.5")).rows_of_buttons == [["Interrupt", "More"]]
    first, *rows = everything(notebook, code, presses="More").rows_of_buttons
    assert first == ["Interrupt", "More"]
    assert [*first, "Stacks", "Log"] in rows
    assert not any("Save" in row for row in rows), "there is no folder"


@pytest.mark.slow
def test_in_a_loop_over_epochs_with_a_folder_all_buttons_are_there(notebook: Kernel, tmp_path: Path) -> None:
    cell = f"""\
def train_in_epochs(seconds):
    accelerator = Accelerator(cpu=True, project_dir={str(tmp_path)!r})
    model = torch.nn.Linear(4, 1)
    data = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), data)
    until = time.monotonic() + seconds
    for _ in accelerator.epochs(1_000_000):
        for (rows,) in data:
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            time.sleep(0.01)
        if accelerator.reduce(torch.tensor(float(time.monotonic() > until))):
            break
notebook_launcher(train_in_epochs, (4.0,), 2, progress='widget')"""
    sent = everything(notebook, cell, presses="More")
    assert ["Interrupt", "More", "Stacks", "Log", "Save now", "Stop after this epoch"] in sent.rows_of_buttons


def test_in_a_cell_without_a_prepared_loader_no_button_steers(notebook: Kernel) -> None:
    code = "%%distributed\nfor _ in trange(100, desc='cell'):\n    time.sleep(0.03)"
    sent = everything(notebook, code, in_lab=True, presses="More")
    assert sent.rows_of_buttons[-1] == ["Interrupt", "More", "Stacks", "Log"]


def test_what_ranks_print_at_once_stands_below_the_table_and_its_buttons(notebook: Kernel) -> None:
    sent = everything(notebook, "notebook_launcher(says, (1.6,), 2, progress='widget')")
    order = [message["msg_type"] for message in sent.messages if message["msg_type"] in ("display_data", "stream")]
    assert order == ["display_data", "display_data", "display_data", "stream"]
    table, place, style = sent.of("display_data")
    assert table["data"]
    assert not place["data"]
    assert not style["data"]
    buttons = [one for one in sent.of("update_display_data") if VIEW in one["data"]]
    assert [one["transient"]["display_id"] for one in buttons] == [place["transient"]["display_id"]]
    # Without steps there is nothing to keep of the table but how long it took.
    *_, last = (one for one in sent.of("update_display_data") if one["data"].get("text/plain"))
    assert re.fullmatch(r"2 processes .*: done.*0:0\d", last["data"]["text/plain"])


@pytest.mark.slow
def test_a_cell_that_captures_its_output_keeps_one_panel_and_not_each_drawing(notebook: Kernel) -> None:
    notebook.run("%%capture kept\nnotebook_launcher(train, (7.0,), 2, progress='widget')").ok()
    assert notebook.run("sum('text/html' in one.data for one in kept.outputs)").ok().value == "1"


def test_turned_off_there_is_no_panel_and_bars_are_printed(notebook: Kernel) -> None:
    sent = everything(notebook, "notebook_launcher(bar, (1.3,), 2, progress='off')")
    assert not sent.of("comm_open", "comm_msg", "update_display_data")
    assert sent.tables == []
    assert "rows: 100%" in sent.text


@pytest.mark.slow
def test_without_ipywidgets_a_panel_is_text(notebook: Kernel) -> None:
    code = (
        "kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split('.')[0] == 'ipywidgets'}\n"
        "sys.modules['ipywidgets'] = None\n"
        "try:\n    notebook_launcher(bar, (1.5,), 2, progress='widget')\n"
        "finally:\n    del sys.modules['ipywidgets']; sys.modules.update(kept)"
    )
    sent = everything(notebook, code)
    assert not sent.of("comm_open")
    assert len(sent.tables) == 1


def test_a_cell_with_a_bar_leaves_a_table_and_a_short_one_without_leaves_nothing(notebook: Kernel) -> None:
    short = everything(notebook, "%%distributed\nx = rank")
    assert short.of("display_data", "update_display_data", "comm_open", "stream") == []
    long = everything(notebook, "%%distributed\nfor _ in trange(10, desc='cell'):\n    time.sleep(0.02)")
    (table,) = long.tables
    assert re.search(r"^cell +10/10 \[00:0\d, +[\d.]+it/s\]$", table, re.MULTILINE)
    assert everything(notebook, "%%distributed\nx = rank").tables == []


@pytest.mark.slow
def test_a_cell_of_ranks_that_stay_has_a_widget(notebook: Kernel) -> None:
    code = "%%distributed\nfor _ in trange(100, desc='cell'):\n    time.sleep(0.025)"
    sent = everything(notebook, code, in_lab=True)
    opened = {content["comm_id"] for content in sent.of("comm_open")}
    assert opened
    assert opened == {content["comm_id"] for content in sent.of("comm_close")}
    assert sent.tables[-1].startswith("✓ cell")
    assert notebook.run(LEFT).ok().stdout == "[] 0 0\n"


@pytest.mark.slow
def test_the_panel_of_the_first_cell_takes_the_place_of_the_line_that_ranks_start(kernel: Kernel) -> None:
    kernel.run("%load_ext nb_accelerate").ok()
    code = "%%distributed -n 2\nimport time\nfrom tqdm import trange\nfor _ in trange(60):\n    time.sleep(0.025)"
    sent = everything(kernel, code, in_lab=True)
    displays = sent.of("display_data", "update_display_data")
    stays = {content["transient"]["display_id"]: content["data"].get("text/plain", "") for content in displays}
    assert [text for text in stays.values() if text] == [sent.tables[-1]]
    kernel.run("%distributed stop").ok()


def test_a_launch_in_the_background_has_a_panel_in_its_own_cell(notebook: Kernel) -> None:
    cell = "handle = notebook_launcher(bar, (0.6,), 2, progress='text', block=False)"
    sent = everything(notebook, cell, until="rows")
    parents = {message["parent_header"]["msg_id"] for message in sent.messages if message["msg_type"] == "display_data"}
    assert len(parents) == 1
    assert notebook.run("handle.wait(20)").ok().value == "True"


def test_a_redirected_output_breaks_nothing(notebook: Kernel) -> None:
    code = (
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):\n"
        "    values = notebook_launcher(bar, (0.1,), 2, progress='text')\n"
        "print(values)"
    )
    assert "[None, None]\n" in everything(notebook, code).text


def test_what_a_rank_does_is_said_with_the_line_of_the_users_code(notebook: Kernel) -> None:
    code = """\
def uneven_gather():
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index:
        time.sleep(2.5)
    return len(accelerator.gather_for_metrics(torch.ones(2)))
results = notebook_launcher(uneven_gather, (), 2, progress='widget')"""
    tables = everything(notebook, code).tables
    assert any(re.search(r"^\s*1\b.*running,.* line 4$", one, re.MULTILINE) for one in tables), tables[-2]
    waits = r"^ *0 .*waits in gather_for_metrics, cell \d+ line 5$"
    assert any(re.search(waits, one, re.MULTILINE) for one in tables), tables[-2]

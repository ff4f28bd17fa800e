"""Pictures of the panel for somebody who looks at them: `make screenshots` writes them to build/screenshots.

Each state is pictured in JupyterLab, in windows of several widths, light and dark. ``ARGS="nan killed"`` pictures these
states only, ``ARGS=nb7`` does it in Notebook 7.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.chromium import Chromium
from browser.conftest import notebook_of
from browser.notebook import IDLE, Notebook
from browser.server import JupyterServer, Theme, Where

WIDTHS = (1280, 620, 420)
THEMES: tuple[Theme, ...] = ("dark", "light")
_GONE = "() => [...document.querySelectorAll('.nba-gone')].some(one => getComputedStyle(one).visibility === 'visible')"
"""Whether a frame that is not drawn again says so: after 6 seconds, and once more after a change of the theme."""

SETUP = """
import os, time
import torch, torch._dynamo  # which forked ranks have from here
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from nb_accelerate import Accelerator, attach, notebook_launcher


def train(state, steps=100, epochs=30, pause=0.05, lr=0.02):
    accelerator = Accelerator()
    rank = accelerator.process_index
    if state == "stuck-before" and rank == 1:
        time.sleep(600)
    accelerator.wait_for_everyone()
    torch.manual_seed(0)
    x = torch.randn(steps * 8 * accelerator.num_processes, 10)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in accelerator.epochs(epochs):
        for step, (x, y) in enumerate(loader):
            if rank == 1 and step == 40:
                if state == "deadlocked":
                    return
                if state == "stuck":
                    time.sleep(600)
                if state == "failed":
                    raise ValueError("loss is not finite")
                if state == "killed":
                    os.kill(os.getpid(), 9)
            if rank == 1 and state == "slow":
                time.sleep(3 * pause)
            loss = nn.functional.mse_loss(model(x), y)
            if state == "first-step":
                time.sleep(600)
            if state.startswith("nan") and step > 40:
                loss = loss * float("nan")
            if state == "out-of-memory" and rank == 1 and step == 40:
                torch.empty(10**15)
            accelerator.backward(loss)
            if not state.startswith("nan"):
                optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause)
        if state == "evaluation":
            with torch.no_grad():
                for x, y in loader:
                    model(x)
                    time.sleep(4 * pause)
        accelerator.print(f"epoch {epoch + 1} is over")
"""


class State(NamedTuple):
    """What is pictured.

    Attributes:
        ranks: how many.
        arguments: of the function, but for the first.
        said: what the cell says when its state is reached.
        ends: the run ends by itself; others are interrupted.
        opened: a button that is pressed before, or the class of what is unfolded by a click.
        launch: more arguments of the launch.
    """

    ranks: int
    arguments: str
    said: str
    ends: bool
    opened: str = ""
    launch: str = ""


STATES = {
    "first-step": State(2, "", "forward", False),
    "running": State(2, "", "2 of 30", False),
    "epoch-2-of-3": State(2, "steps=200, epochs=3, pause=0.1", "2 of 3", False),
    "evaluation": State(2, "steps=60", "evaluation", False),
    "ranks-8": State(8, "", "2 of 30", False),
    "ranks-16": State(16, "pause=0.2", "1 of 30", False, launch=", start_method='fork'"),
    "ranks-64": State(64, "pause=0.5", "1 of 30", False, launch=", start_method='fork'"),
    "chart": State(2, "", "2 of 30", False, opened="nba-chart"),
    "each-of-8": State(8, "", "2 of 30", False, opened="nba-each"),
    "each-of-64": State(64, "pause=0.5", "1 of 30", False, opened="nba-each", launch=", start_method='fork'"),
    "stacks": State(2, "", "2 of 30", False, opened="Stacks"),
    "log": State(2, "steps=5, pause=0.1, epochs=60", "12 of 60", False, opened="Log"),
    "done": State(2, "steps=40, epochs=2", "✓", True),
    "slow": State(8, "pause=0.1", "slower than the", False),
    "stuck": State(8, "", "for it in", False),
    "stuck-before": State(2, "", "for it in", False),
    "nan": State(2, "", "The loss is nan", False),
    "nan-done": State(2, "steps=60, epochs=1", "!", True),
    "failed": State(2, "", "✗", True),
    "deadlocked": State(2, "", "✗", True),
    "killed": State(2, "", "✗", True),
    "out-of-memory": State(2, "", "✗", True),
}


def picture(notebook: Notebook, cell: int, state: str, *, ready: str = "() => true") -> None:
    """Picture the output of a cell in windows of all widths, in both themes, when it is ready there."""
    for theme in THEMES:
        notebook.change_theme(theme)
        notebook.wait_until(ready, timeout=60)
        for width in WIDTHS:
            notebook.resize(width)
            notebook.scroll_to(cell)
            print(notebook.screenshot(f"{state}-{width}-{theme}", cell=cell), flush=True)
    notebook.resize(WIDTHS[0])  # a narrow panel has fewer columns


def end(notebook: Notebook) -> None:
    """Interrupt the cell that runs."""
    notebook.interrupt()
    notebook.wait_until_done(60)


def picture_states(notebook: Notebook, where: Where, wanted: list[str]) -> None:
    """Picture the states that a cell runs into, and those of `wanted` alone if there are any."""
    for cell, (name, state) in enumerate(STATES.items(), start=1):
        if wanted and name not in wanted:
            continue
        notebook.run(cell)
        if name == "running":
            notebook.wait_until("() => document.querySelector('.nba') !== null", timeout=90)
            print(notebook.screenshot(f"{where}-starting", cell=cell), flush=True)
        notebook.wait_for_output(cell, state.said, timeout=120)
        if state.opened.startswith("nba-"):
            notebook.click(f".jp-Notebook .jp-Cell:nth-child({cell + 1}) .{state.opened} summary")
        elif state.opened:
            notebook.press_button(cell, "More")
            notebook.press_button(cell, state.opened)
            notebook.wait_until("() => document.querySelector('.nba-aside') !== null")
        if state.ends:
            notebook.wait_until_done(120)
        picture(notebook, cell, f"{where}-{name}")
        if not state.ends:
            end(notebook)
        if name in ("running", "nan", "ranks-64"):
            picture(notebook, cell, f"{where}-{name}-interrupted")
        notebook.clear(cell)


def picture_reload(notebook: Notebook, where: Where, cell: int) -> None:
    """Picture a page that was loaded anew while a cell runs and when it is over, and the end of the kernel."""
    notebook.run(cell)
    notebook.wait_until("() => document.querySelector('.nba [role=progressbar]') !== null", timeout=120)
    notebook.wait_until("() => document.querySelector('.jp-OutputArea button') !== null")
    notebook.save()
    notebook.reload()
    notebook.wait_until("() => document.querySelector('.nba-again .nba') !== null", timeout=60)
    picture(notebook, cell, f"{where}-reloaded")
    notebook.interrupt()
    notebook.wait_for_output(cell, "■", timeout=60)
    notebook.wait_until(IDLE)
    notebook.run(cell + 1)
    notebook.wait_for_output(cell + 1, "■", timeout=60)
    picture(notebook, cell + 1, f"{where}-attached")
    notebook.save()
    notebook.reload()
    picture(notebook, cell, f"{where}-saved")
    notebook.run(cell)
    notebook.wait_until(f"() => document.querySelectorAll('.jp-Cell')[{cell}].innerText.includes('Interrupt')")
    notebook.kernel.kill()
    notebook.click(".jp-Dialog button.jp-mod-accept", timeout=60)
    picture(notebook, cell, f"{where}-kernel-gone", ready=_GONE)


def picture_all(server: JupyterServer, chromium: Chromium, where: Where, wanted: list[str]) -> None:
    """Picture all states, or those of `wanted`."""
    name = f"states-{where}.ipynb"
    cells = [
        f"notebook_launcher(train, ({name!r},), {state.ranks}, kwargs=dict({state.arguments}){state.launch})"
        for name, state in STATES.items()
    ]
    cells = [SETUP, *cells, "notebook_launcher(train, ('',), 2)", "attach()"]
    (server.notebooks / name).write_text(notebook_of(cells), encoding="utf-8")
    notebook = Notebook(server, chromium, name, where, THEMES[0])
    notebook.hide_sidebar()
    notebook.run(0)
    notebook.wait_until_done(90)
    if wanted != ["reloaded"]:
        picture_states(notebook, where, wanted)
    if not wanted or "reloaded" in wanted:
        picture_reload(notebook, where, len(STATES) + 1)
    notebook.close()


def main() -> None:
    """Picture the states that the command line names, by default all; in Notebook 7 if it names that."""
    words = sys.argv[1:]
    where: Where = "nb7" if "nb7" in words else "lab"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("jupyter", "chromium"):
            Path(folder, name).mkdir()
        server = JupyterServer(Path(folder, "jupyter"))
        try:
            chromium = Chromium(Path(folder, "chromium"))
            try:
                picture_all(server, chromium, where, [word for word in words if word != "nb7"])
            finally:
                chromium.close()
        finally:
            server.end_kernels()
            server.close()


if __name__ == "__main__":
    main()

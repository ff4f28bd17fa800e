"""The panel of a run, as one sees it: every state it can be in, with few ranks and many, light and dark.

Pictures of all of them are in build/screenshots.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import psutil

    from browser.conftest import OpenNotebook
    from browser.notebook import Notebook
    from browser.server import Theme, Where

pytestmark = [pytest.mark.browser, pytest.mark.limit(240)]

SETUP = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from nb_accelerate import Accelerator, notebook_launcher


def train(steps=100, epochs=1, pause=0.04, slow=None, stuck=None, wrong=None):
    accelerator = Accelerator()
    rank = accelerator.process_index
    torch.manual_seed(0)
    x = torch.randn(steps * 8 * accelerator.num_processes, 10)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for step, (x, y) in enumerate(loader):
            if rank == slow:
                time.sleep(3 * pause)
            if rank == stuck and step == 20:
                time.sleep(10)
            if rank == wrong and step == 30:
                raise ValueError("loss is not finite")
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause)
    return rank
"""


def launch(ranks: int, **arguments: object) -> str:
    return f"notebook_launcher(train, num_processes={ranks}, kwargs={arguments})"


def start(notebook: Notebook, cell: int) -> None:
    """Run a cell, and wait until it has a panel with steps in it."""
    notebook.run(cell)
    notebook.wait_for_output(cell, "it/s", timeout=60)


def ranks_of(notebook: Notebook) -> list[psutil.Process]:
    """Its ranks' processes, in the order in which they were started."""
    family = notebook.kernel.children(recursive=True)
    return sorted((one for one in family if one.name().startswith("nb-rank")), key=lambda one: one.name())


@pytest.mark.parametrize(
    ("ranks", "where", "theme"),
    [(2, "lab", "light"), (8, "lab", "dark"), (2, "nb7", "dark"), (8, "nb7", "light")],
)
def test_a_run_has_a_row_for_each_rank_and_what_it_came_to_stays_in_the_saved_notebook(
    open_notebook: OpenNotebook, ranks: int, where: Where, theme: Theme
) -> None:
    name = f"panel-{ranks}-{where}-{theme}"
    notebook = open_notebook([SETUP, launch(ranks, steps=100 if ranks == 2 else 40)], where, theme)
    notebook.run(0)
    notebook.wait_until_done()
    notebook.run(1)
    notebook.wait_until("() => document.querySelector('.nba') !== null", timeout=60)
    notebook.screenshot(f"{name}-starting", cell=1)
    notebook.wait_for_output(1, "it/s", timeout=60)
    assert notebook.count(1, "tbody tr") == ranks
    notebook.wait_until(
        "ranks => [...document.querySelectorAll('.nba [role=progressbar]')]"
        ".filter(bar => bar.getAttribute('aria-valuenow') > 25).length === ranks",
        ranks,
    )
    notebook.screenshot(f"{name}-running", cell=1)
    assert notebook.count(1, "button") >= 2
    notebook.wait_until_done(90)
    shown = notebook.wait_for_output(1, "✓")
    assert f"{ranks} ranks" in shown
    assert "loss" in shown
    assert str(list(range(ranks))) in shown
    assert notebook.count(1, "button") == 0, "nothing is left to press"
    notebook.screenshot(f"{name}-done", cell=1)
    notebook.evaluate("() => document.querySelector('.nba details').open = true")
    notebook.screenshot(f"{name}-done-open", cell=1)

    saved = notebook.save()
    assert "widgets" not in saved.metadata or not saved.metadata["widgets"]
    notebook.reopen()
    assert "✓" in notebook.output(1)
    assert notebook.count(1, "tbody tr") == ranks
    assert notebook.count(1, ".jupyter-widgets") == 0
    notebook.screenshot(f"{name}-reopened", cell=1)


@pytest.mark.parametrize(("ranks", "theme"), [(2, "dark"), (8, "light")])
def test_a_slow_rank_a_stuck_rank_and_a_failed_rank_are_named(
    open_notebook: OpenNotebook, ranks: int, theme: Theme
) -> None:
    name = f"panel-{ranks}-{theme}"
    cells = [
        SETUP,
        launch(ranks, steps=1000, slow=1),
        launch(ranks, steps=40, stuck=1),
        launch(ranks, steps=60, wrong=1),
        "print('the next cell')",
    ]
    notebook = open_notebook(cells, "lab", theme)
    notebook.run(0)
    notebook.wait_until_done()

    start(notebook, 1)
    notebook.wait_for_output(1, "slower than the median", timeout=40)
    assert "Rank 1 is" in notebook.output(1)
    notebook.scroll_to(1)
    notebook.screenshot(f"{name}-straggling", cell=1)
    notebook.press_button(1, "Interrupt")
    notebook.wait_for_output(1, "KeyboardInterrupt")
    notebook.wait_until_done()
    assert "failed" not in notebook.wait_for_output(1, "■")
    notebook.screenshot(f"{name}-interrupted", cell=1)

    start(notebook, 2)
    notebook.wait_for_output(2, "Rank 1 has not moved", timeout=40)
    notebook.wait_for_output(2, "for it", timeout=10)
    shown = notebook.wait_for_output(2, "Cell In[1] line", timeout=10)
    assert "slower" not in shown, "one thing is said of a rank"
    notebook.screenshot(f"{name}-stalled", cell=2)
    notebook.wait_until_done(90)
    assert "has not moved" not in notebook.wait_for_output(2, "✓")

    start(notebook, 3)
    notebook.wait_until_done(90)
    shown = notebook.wait_for_output(3, "✗")
    assert "rank 1" in shown.lower()
    assert "ValueError: loss is not finite" in shown
    notebook.evaluate("() => document.querySelectorAll('.nba details').forEach(one => { one.open = true; })")
    notebook.screenshot(f"{name}-failed", cell=3)
    notebook.run(4)
    notebook.wait_for_output(4, "the next cell")


def test_a_stopped_rank_is_named_and_its_row_recovers_when_it_goes_on(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SETUP, launch(2, steps=1000)])
    notebook.run(0)
    notebook.wait_until_done()
    start(notebook, 1)
    rank = ranks_of(notebook)[1]
    os.kill(rank.pid, signal.SIGSTOP)
    try:
        notebook.wait_for_output(1, f"Rank 1 is stopped (SIGSTOP). To let it go on: kill -CONT {rank.pid}", timeout=10)
        notebook.wait_for_output(1, "Rank 0 waits for it", timeout=20)
        notebook.screenshot("panel-stopped", cell=1)
    finally:
        os.kill(rank.pid, signal.SIGCONT)
    notebook.wait_until("() => !document.querySelector('.nba').innerText.includes('stopped')", timeout=10)
    notebook.screenshot("panel-recovered", cell=1)
    notebook.interrupt()
    notebook.wait_until_done()


def test_stacks_and_logs_are_shown_while_the_cell_runs(open_notebook: OpenNotebook) -> None:
    talking = "def talk():\n    print('a line of rank', Accelerator().process_index)\n    return train(steps=1000)"
    notebook = open_notebook([SETUP, talking, launch(2).replace("train", "talk").replace("{}", "None")])
    notebook.run(0)
    notebook.run(1)
    notebook.wait_until_done()
    start(notebook, 2)
    notebook.evaluate("() => document.querySelector('.jp-OutputArea button').focus()")
    for _ in range(2):
        notebook.press("Tab")
    notebook.press("Enter")
    assert "train, Cell In[1] line" in notebook.wait_for_output(2, "talk, Cell In[2] line")
    notebook.screenshot("panel-stacks", cell=2)
    chosen = "document.querySelector('.jp-OutputArea select').selectedOptions"
    assert notebook.evaluate(f"() => [...{chosen}].map(option => option.value)") == ["log of ..."]
    notebook.choose(2, "log of rank 0")
    notebook.wait_until(
        "() => [...document.querySelectorAll('.nba pre')].some(one => one.innerText.includes('a line of rank 0'))"
    )
    notebook.interrupt()
    notebook.wait_until_done()

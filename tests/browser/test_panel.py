"""The panel of a run, as one sees it: every state it can be in, with few ranks and many, light and dark.

Pictures of all of them are in build/screenshots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fixtures.kernels import WAIT_FOR_SERVER
from fixtures.leaks import name_of

from browser.notebook import IDLE

if TYPE_CHECKING:
    import psutil

    from browser.conftest import OpenNotebook
    from browser.notebook import Notebook
    from browser.server import Theme, Where

pytestmark = [pytest.mark.browser, pytest.mark.limit(240)]

TRAIN = """
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
SETUP = TRAIN + WAIT_FOR_SERVER


def launch(ranks: int, **arguments: object) -> str:
    return f"notebook_launcher(train, num_processes={ranks}, kwargs={arguments})"


def start(notebook: Notebook, cell: int) -> None:
    """Run a cell, and wait until it has a panel with steps in it."""
    notebook.run(cell)
    notebook.wait_until(r"() => /[1-9][0-9]* \/ \d+/.test(document.querySelector('.nba')?.innerText || '')", timeout=60)


def wait_for_percent(notebook: Notebook, percent: int, rows: int) -> None:
    """Wait until there are so many rows of ranks, and all have come further than that."""
    notebook.wait_until(
        "([percent, rows]) => [...(document.querySelector('.nba-again:has(.nba)') ?? document)"
        ".querySelectorAll('.nba [role=progressbar]')]"
        ".filter(bar => bar.getAttribute('aria-valuenow') > percent).length === rows",
        [percent, rows],
    )


def ranks_of(notebook: Notebook) -> list[psutil.Process]:
    """Its ranks' processes, in the order in which they were started."""
    named = [(name_of(one) or "", one) for one in notebook.kernel.children(recursive=True)]
    return [one for name, one in sorted(named, key=lambda pair: pair[0]) if name.startswith("nb-rank")]


@pytest.mark.parametrize(
    ("ranks", "where", "theme"),
    [(2, "nb7", "dark"), (8, "lab", "dark")],
)
def test_a_run_has_rows_for_its_ranks_and_what_it_came_to_stays_in_the_saved_notebook(
    open_notebook: OpenNotebook, ranks: int, where: Where, theme: Theme
) -> None:
    rows = ranks if ranks <= 2 else 1
    name = f"panel-{ranks}-{where}-{theme}"
    notebook = open_notebook([SETUP, launch(ranks, steps=300)], where, theme)
    notebook.run(0)
    notebook.wait_until_done()
    notebook.run(1)
    notebook.wait_until("() => document.querySelector('.nba') !== null", timeout=60)
    notebook.screenshot(f"{name}-starting", cell=1)
    notebook.wait_for_output(1, "it/s", timeout=60)
    assert notebook.count(1, "tbody tr") == rows
    wait_for_percent(notebook, 10, rows)
    notebook.wait_until("() => document.querySelectorAll('.jp-OutputArea button').length >= 2")
    notebook.screenshot(f"{name}-running", cell=1)
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
    notebook.wait_for_output(1, "✓")
    assert notebook.count(1, "tbody tr") == rows
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
    notebook.wait_for_output(1, "slower than the", timeout=40)
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
    shown = notebook.wait_for_output(2, "cell 1 line", timeout=10)
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


# Blocks that are wider than their place, but for those that say so by an ellipsis or a scroll bar.
# Labels of a chart may stand in its margins.
TOO_WIDE = """() => [...document.querySelectorAll('.nba, .nba *:not(.nba-plot)')]
    .filter(one => one.clientWidth && one.scrollWidth > one.clientWidth)
    .filter(one => getComputedStyle(one).overflowX === 'visible')
    .map(one => `${one.tagName}.${one.className}: ${one.innerText}`)"""


# In one look: the panel changes from one to the next.
ONE_OF_64_IS_SLOW = """() => {
    const rows = [...document.querySelectorAll('.nba tbody tr')].map(row => row.innerText.trim().split(/\\s+/));
    return rows.length === 2
        && rows[0][0] === 'rest' && rows[0].join(' ').includes('waits in backward')
        && rows[1][0] === '20';
}"""


def test_of_64_ranks_one_sees_how_all_are_and_who_is_slow(open_notebook: OpenNotebook) -> None:
    # What DistributedDataParallel imports takes a second: forked ranks have it from here.
    setup = TRAIN + "\nimport torch._dynamo\n"
    cell = launch(64, steps=20, pause=0.25, slow=20).replace(")", ", start_method='fork');")
    notebook = open_notebook([setup, cell])
    notebook.run(0)
    notebook.wait_until_done()
    start(notebook, 1)
    notebook.wait_for_output(1, "x slower", timeout=60)
    assert len(ranks_of(notebook)) == 64
    notebook.screenshot("panel-64-light-running", cell=1)
    notebook.wait_until(ONE_OF_64_IS_SLOW)
    assert notebook.evaluate(TOO_WIDE) == []
    notebook.change_theme("dark")
    notebook.screenshot("panel-64-dark-running", cell=1)
    notebook.wait_until_done(90)
    notebook.wait_for_output(1, "✓")
    assert notebook.evaluate(TOO_WIDE) == []
    notebook.evaluate("() => { document.querySelector('.nba details').open = true; }")
    notebook.screenshot("panel-64-dark-done", cell=1)
    notebook.change_theme("light")
    notebook.screenshot("panel-64-light-done", cell=1)


_LINES = "document.querySelector('.nba details.nba-each[open] pre')"


def test_a_line_for_each_rank_unfolds_by_a_click_and_stays_open_also_when_the_run_is_over(
    open_notebook: OpenNotebook,
) -> None:
    notebook = open_notebook([SETUP, launch(3, steps=200)])
    notebook.run(0)
    notebook.wait_until_done()
    start(notebook, 1)
    notebook.wait_for_output(1, "each rank")
    summary = "document.querySelector('.nba-each > summary')"
    notebook.evaluate(f"() => {{ window.first = {summary}; window.first.click(); }}")
    notebook.wait_until(f"() => !window.first.isConnected && {_LINES} !== null")
    lines = notebook.evaluate(f"() => {_LINES}.innerText").splitlines()
    assert lines[0].split() == ["rank", "loss", "memory"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "2"]
    notebook.screenshot("panel-each-rank-running", cell=1)
    notebook.wait_until_done(90)
    notebook.wait_for_output(1, "✓")
    notebook.wait_until(f"() => {_LINES} !== null")
    notebook.screenshot("panel-each-rank-done", cell=1)


def wait_for_log(notebook: Notebook, rank: int) -> None:
    text = f"a line of rank {rank}\n"
    notebook.wait_until("text => document.querySelector('pre.nba-aside[tabindex]')?.textContent === text", text)


@pytest.mark.parametrize("where", ["lab", "nb7"])
def test_stacks_and_logs_are_shown_while_the_cell_runs_and_need_no_mouse(
    open_notebook: OpenNotebook, where: Where
) -> None:
    talking = "def talk():\n    print('a line of rank', Accelerator().process_index)\n    return train(steps=1000)"
    notebook = open_notebook([SETUP, talking, launch(3).replace("train", "talk").replace("{}", "None")], where)
    notebook.run(0)
    notebook.run(1)
    notebook.wait_until_done()
    start(notebook, 2)
    notebook.wait_until("() => document.querySelector('.jp-OutputArea button') !== null")  # after the table
    notebook.evaluate("() => document.querySelector('.jp-OutputArea button').focus()")
    notebook.press("Tab")
    focused = "() => document.activeElement.innerText"
    for then in ("Less", "More", "Less"):
        notebook.press("Enter")
        notebook.wait_until(f"then => ({focused})() === then", then)
    notebook.press("Tab")
    assert notebook.evaluate(focused) == "Stacks"
    notebook.press("Enter")
    assert "train, cell 1 line" in notebook.wait_for_output(2, "talk, cell 2 line")
    notebook.screenshot(f"panel-stacks-{where}", cell=2)
    notebook.press("Tab")
    notebook.press("Enter")
    wait_for_log(notebook, 0)
    notebook.press("Tab")
    for key, rank in (("ArrowUp", 1), ("ArrowUp", 2), ("ArrowUp", 2), ("ArrowDown", 1)):
        notebook.press(key)
        wait_for_log(notebook, rank)
        assert notebook.evaluate("() => window.jupyterapp.shell.currentWidget.content.activeCellIndex") == 2
    notebook.screenshot(f"panel-log-{where}", cell=2)
    notebook.press("Shift+Tab")
    notebook.press("Enter")
    notebook.wait_until("() => document.querySelector('pre.nba-aside[tabindex]') === null")
    notebook.interrupt()
    notebook.wait_until_done()


@pytest.mark.parametrize("where", ["lab", "nb7"])
def test_after_a_reload_of_the_page_the_panel_of_the_cell_that_runs_moves_and_can_be_stopped(
    open_notebook: OpenNotebook, where: Where
) -> None:
    notebook = open_notebook([SETUP, launch(2, steps=3000), "import nb_accelerate; nb_accelerate.attach()"], where)
    notebook.run(0)
    notebook.wait_until_done()
    start(notebook, 1)
    notebook.wait_until("() => document.querySelector('.jp-OutputArea button') !== null")
    notebook.save()
    notebook.reload()
    notebook.wait_until("() => document.querySelector('.nba-again .nba') !== null", timeout=60)
    wait_for_percent(notebook, 0, rows=2)
    steps = "() => document.querySelector('.nba-again td.nba-step').innerText"
    seen = notebook.evaluate(steps)
    notebook.wait_until(f"seen => ({steps})() !== seen", seen)
    assert notebook.evaluate("() => document.querySelectorAll('.nba header').length") == 2
    hidden = "() => document.querySelector('.jp-OutputArea-child:has(.nba-gone)').offsetHeight"
    assert notebook.evaluate(hidden) == 0, "of two panels one sees the one that moves"
    notebook.scroll_to(1)
    notebook.screenshot(f"panel-reloaded-{where}", cell=1)
    notebook.press_button(1, "Interrupt")
    notebook.wait_for_output(1, "■")
    assert "attach()" in notebook.output(1)
    notebook.wait_until(IDLE)
    notebook.run(2)
    notebook.wait_for_output(2, "■")


# Whether a button is there.
BUTTON = "title => [...document.querySelectorAll('.jp-OutputArea button')].some(one => one.innerText === title)"


def test_a_button_that_training_could_not_obey_is_not_there(open_notebook: OpenNotebook) -> None:
    steered = SETUP.replace("Accelerator()", "Accelerator(project_dir='runs')")
    steered = steered.replace("range(epochs)", "accelerator.epochs(epochs)")
    notebook = open_notebook([SETUP, launch(2, steps=3000), steered, launch(2, steps=50, epochs=1000)])
    notebook.run(0)
    notebook.wait_until_done()
    start(notebook, 1)
    notebook.press_button(1, "More")
    notebook.wait_until(BUTTON, "Log")
    assert not notebook.evaluate(BUTTON, "Save now")
    assert not notebook.evaluate(BUTTON, "Stop after this epoch")
    notebook.screenshot("panel-buttons", cell=1)
    notebook.press_button(1, "Interrupt")
    notebook.wait_until_done()

    notebook.run(2)
    notebook.wait_until_done()
    notebook.run(3)
    notebook.wait_for_output(3, "2 of 1000", timeout=60)  # epochs
    notebook.press_button(3, "More")
    for title in ("Save now", "Stop after this epoch"):
        notebook.wait_until(BUTTON, title)
    notebook.press_button(3, "Stop after this epoch")
    notebook.wait_until_done()
    assert "✓" in notebook.output(3)
    assert "asked after epoch" in notebook.output(3)
    notebook.screenshot("panel-ended-after-epoch", cell=3)

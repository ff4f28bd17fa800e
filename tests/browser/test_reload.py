"""A page that is loaded anew while a cell runs: what ranks print, without a saved panel, and without a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from browser.notebook import IDLE
from browser.test_panel import SETUP, launch, start, wait_for_percent

if TYPE_CHECKING:
    from browser.conftest import OpenNotebook
    from browser.notebook import Notebook
    from browser.server import Where

pytestmark = [pytest.mark.browser, pytest.mark.limit(240)]

TALK = """
def talk():
    print("said by rank", Accelerator().process_index)
    return train(steps=3000)
"""
CELLS = [SETUP + TALK, launch(2).replace("train", "talk").replace("{}", "None")]
HAS_BUTTONS = "() => document.querySelector('.jp-OutputArea button') !== null"
SAYS = """text => [...document.querySelectorAll('.nba-gone')].some(one =>
    one.checkVisibility({visibilityProperty: true}) && one.offsetHeight > 0 && one.innerText.includes(text))"""
HAS_LOST_ITS_KERNEL = "() => document.querySelector('.jupyter-widgets-disconnected') !== null"
# Those of widgets that have lost their kernel.
ICONS = """() => [...document.querySelectorAll('.jupyter-widgets-disconnected')].filter(one => one.offsetHeight)
    .map(one => getComputedStyle(one, '::before').content).filter(content => content !== 'none')"""
# Outputs in which one sees a widget, or an error in its place.
SEEN_OF_WIDGETS = """() => [...document.querySelectorAll('.jp-OutputArea-output')]
    .filter(one => one.checkVisibility() && one.offsetHeight > 0)
    .filter(one => one.querySelector('.nba-asides') || one.innerText.includes('widget'))
    .map(one => one.innerText)"""
MOVES = "() => document.querySelector('.nba-again .nba') !== null"


def run_and_reload(notebook: Notebook) -> None:
    notebook.run(0)
    notebook.wait_until_done()
    start(notebook, 1)
    notebook.wait_until(HAS_BUTTONS)
    notebook.save()
    notebook.reload()


@pytest.mark.parametrize("where", ["lab", "nb7"])
def test_what_ranks_print_is_in_their_logs_below_the_panel_while_it_moves_and_at_its_end(
    open_notebook: OpenNotebook, where: Where
) -> None:
    notebook = open_notebook(CELLS, where)
    run_and_reload(notebook)
    notebook.wait_until(MOVES, timeout=60)
    notebook.wait_for_output(1, "but in their logs (More, Log)")
    notebook.press_button(1, "More")
    notebook.press_button(1, "Log")
    notebook.wait_until("() => document.querySelector('.nba-asides pre')?.textContent === 'said by rank 0\\n'")
    notebook.screenshot(f"reload-log-{where}", cell=1)
    notebook.press_button(1, "Interrupt")
    notebook.wait_for_output(1, "■")
    logs = notebook.evaluate("() => [...document.querySelectorAll('.nba-again pre.nba-aside')].map(o => o.textContent)")
    assert logs == ["said by rank 0\n", "said by rank 1\n"]
    notebook.wait_until(IDLE)
    notebook.restart()
    notebook.wait_until(HAS_LOST_ITS_KERNEL)
    assert notebook.evaluate(ICONS) == []
    notebook.screenshot(f"reload-end-{where}", cell=1)
    notebook.save()
    notebook.reload()
    notebook.wait_until(SAYS, "No news since")
    assert notebook.evaluate(SEEN_OF_WIDGETS) == []


SILENT = """
import ipywidgets
ipywidgets.Widget._handle_control_comm_msg = classmethod(lambda cls, message: None)
"""


def test_a_page_that_gets_no_answer_about_all_widgets_asks_for_each_and_finds_the_panel(
    open_notebook: OpenNotebook,
) -> None:
    notebook = open_notebook([SILENT + CELLS[0], *CELLS[1:]])
    run_and_reload(notebook)
    notebook.wait_until(MOVES, timeout=60)
    wait_for_percent(notebook, 0, rows=2)
    notebook.press_button(1, "Interrupt")
    notebook.wait_for_output(1, "■")


SAYS_IT_ENDED = """selector => [...document.querySelectorAll(selector)].some(one =>
    one.checkVisibility({visibilityProperty: true}) && one.offsetHeight > 0
    && getComputedStyle(one, '::after').content.includes('The kernel has ended'))"""


@pytest.mark.parametrize("is_reloaded", [True, False])
def test_when_the_kernel_is_restarted_the_panel_says_that_it_has_ended(
    open_notebook: OpenNotebook, is_reloaded: bool
) -> None:
    notebook = open_notebook(CELLS)
    if is_reloaded:
        run_and_reload(notebook)
        notebook.wait_until(MOVES, timeout=60)
    else:
        notebook.run(0)
        notebook.wait_until_done()
        start(notebook, 1)
        notebook.wait_until(HAS_BUTTONS)
    shown = ".nba-again .nba-gone" if is_reloaded else ".jp-RenderedHTML .nba-gone"
    assert not notebook.evaluate(SAYS_IT_ENDED, shown)
    notebook.restart()
    notebook.wait_until(SAYS_IT_ENDED, shown)
    assert "attach()" not in notebook.output(1)
    notebook.wait_until("() => [...document.querySelectorAll('.jp-OutputArea button')].every(one => !one.offsetHeight)")
    assert notebook.evaluate(ICONS) == []
    notebook.screenshot(f"reload-restarted-{is_reloaded}", cell=1)
    notebook.save()
    notebook.reload()
    notebook.wait_until(SAYS, "No news since")
    assert notebook.evaluate(SEEN_OF_WIDGETS) == []

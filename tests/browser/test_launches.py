"""`notebook_launcher` as one sees it in JupyterLab and Notebook 7."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from fixtures.leaks import name_of

if TYPE_CHECKING:
    from browser.conftest import OpenNotebook
    from browser.server import Where

pytestmark = [pytest.mark.browser, pytest.mark.limit(180)]

SETUP = """
import os, time
from nb_accelerate import notebook_launcher
"""
GREET = """
def greet():
    print("hello from rank", os.environ["RANK"])
    return int(os.environ["RANK"]) * 10

notebook_launcher(greet, num_processes=2)
"""
SLEEP = """
def sleep():
    print("asleep")
    time.sleep(600)

notebook_launcher(sleep, num_processes=2, progress="off")
"""
FLOOD = """
def count():
    for number in range(100_000):
        print("line", number)

notebook_launcher(count, num_processes=2, progress="off")
"""


def slack() -> float:
    """Seconds that a machine with other work to do may take longer."""
    return max(0.0, os.getloadavg()[0] - (os.cpu_count() or 1))


@pytest.mark.parametrize("where", ["lab", "nb7"])
def test_a_launch_shows_its_output_and_its_values_and_the_stop_button_ends_it(
    open_notebook: OpenNotebook, where: Where
) -> None:
    notebook = open_notebook([SETUP, GREET, SLEEP, "print('the next cell')"], where)
    notebook.run(0)
    notebook.run(1)
    notebook.wait_until_done()
    shown = notebook.output(1)
    assert "hello from rank 0" in shown
    assert "hello from rank 1" in shown
    assert "[0, 10]" in shown

    notebook.run(2)
    notebook.wait_for_output(2, "asleep")
    family = notebook.kernel.children(recursive=True)
    ranks = [process for process in family if (name_of(process) or "").startswith("nb-rank")]
    began = time.monotonic()
    notebook.interrupt()
    notebook.wait_for_output(2, "KeyboardInterrupt")
    took = time.monotonic() - began
    assert took < 2.0 + slack()
    notebook.wait_until_done()
    assert ranks
    assert not any(process.is_running() for process in ranks)

    notebook.run(3)
    notebook.wait_for_output(3, "the next cell")
    notebook.screenshot(f"launch-{where}", height=900)


def test_a_flood_of_lines_does_not_freeze_the_page(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SETUP, FLOOD])
    notebook.run(0)
    notebook.wait_until_done()
    notebook.run(1)
    answers = []
    while not notebook.is_done():
        began = time.monotonic()
        assert notebook.evaluate("() => document.title")
        answers.append(time.monotonic() - began)
    assert len(answers) > 1, "the flood was over before the page was asked"
    assert max(answers) < 2.0 + slack()
    shown = notebook.output(1)
    assert "line 99999" in shown
    assert shown.count("line ") == 5_000 + 20, "as many as a cell shows, and the last twenty"
    assert len(notebook.evaluate("() => document.querySelectorAll('.jp-Notebook *')")) < 5_000

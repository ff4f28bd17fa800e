"""`attach`: the panel of a run in one more cell, while it is on and when it is over."""

from __future__ import annotations

import re
import signal

import pytest
from fixtures.kernels import Kernel

from nb_accelerate import attach, notebook_launcher
from nb_accelerate.notebook.launch import Launch

SETUP = """
import os, threading
from nb_accelerate import attach, notebook_launcher

def talk():
    print("a line of rank", os.environ["RANK"])
    raise ValueError("as it should") if os.environ["RANK"] == "1" else SystemExit

def greet():
    print("a line of rank", os.environ["RANK"])
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.run(SETUP).ok()
    return shared_kernel


def test_without_a_run_there_is_a_sentence(notebook: Kernel) -> None:
    notebook.run("from nb_accelerate.notebook.ranks.request_panel import recent; recent.clear()").ok()
    assert "There was none yet" in notebook.run("attach()").message


def test_a_run_that_is_over_is_shown_with_its_log(notebook: Kernel) -> None:
    notebook.run("notebook_launcher(greet, num_processes=2, progress='text')").ok()
    (shown,) = notebook.run("attach('greet')").ok().displays
    assert "✓" in shown["text/plain"]
    assert "rank 1:\na line " in shown["text/plain"]
    assert "log of rank 0" in shown["text/html"]
    assert "Did you mean 'greet'" in notebook.run("attach('gret')").message


def test_a_run_that_has_shown_no_progress_is_named_where_no_panel_is_drawn(
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch = notebook_launcher(wait_for_the_end, num_processes=2, block=False, devices="cpu")
    assert isinstance(launch, Launch)
    attach("wait_for_the_end")
    assert re.search(r"attached to wait_for_the_end.* 0-1\n", capsys.readouterr().err)
    launch.stop()


def wait_for_the_end() -> None:
    while True:
        signal.pause()


def test_nothing_of_what_ranks_returned_is_kept(notebook: Kernel) -> None:
    notebook.run("notebook_launcher(greet, num_processes=2, progress='text')").ok()
    kept = "import gc\nfrom nb_accelerate.notebook.ranks.request import Request\ngc.collect()\n"
    kept += "print(sum(isinstance(one, Request) for one in gc.get_objects()))"
    assert notebook.run(kept).ok().stdout == "0\n"

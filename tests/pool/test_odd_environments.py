"""Ranks that stay, in odd environments: a process forked in a cell, closed event loops, a folder that is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.kernels import Kernel


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.run("%load_ext nb_accelerate").ok()
    shared_kernel.run("%%distributed\nimport os").ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


def test_a_process_that_a_cell_forks_takes_no_cells(notebook: Kernel):
    notebook.run("%%distributed\npid = os.fork()").ok()
    for _ in range(5):
        assert notebook.run("%%distributed\nprint(pid > 0)").ok().stdout == "True\n"
    ended = notebook.run("%%distributed\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))").ok()
    assert ended.stdout == "0\n"


def test_closed_event_loops_in_the_kernel_and_in_ranks_are_no_hindrance(notebook: Kernel):
    notebook.run("import asyncio\nloop = asyncio.new_event_loop()\nloop.close()\nasyncio.set_event_loop(loop)").ok()
    notebook.run("%%distributed\nimport asyncio\nloop = asyncio.get_running_loop()\nawait asyncio.sleep(0)").ok()
    notebook.run("%%distributed\nloop.close()").ok()
    assert notebook.run("%%distributed\nimport asyncio\nawait asyncio.sleep(0)\nprint(1)").ok().stdout == "1\n"


def test_a_working_directory_that_was_deleted_is_named_and_another_one_works(notebook: Kernel):
    notebook.run("import os, tempfile\nfolder = tempfile.mkdtemp()\nos.chdir(folder)\nos.rmdir(folder)").ok()
    failed = notebook.run("%distributed restart")
    assert failed.error == "StartError"
    assert "it has been deleted" in failed.message
    notebook.run("os.chdir('/')").ok()
    assert notebook.run("%%distributed\nimport os\nprint(os.getcwd())").ok().stdout.endswith("/\n")
    notebook.run("%distributed stop").ok()

"""``breakpoint()`` in a launched function, in a real kernel with somebody at the keyboard."""

from __future__ import annotations

import pytest
from fixtures.kernels import Kernel

SETUP = """
import functools, os
from nb_accelerate import notebook_launcher
launch = functools.partial(notebook_launcher, num_processes=2, progress="off", fold_output=False)

def stops():
    x = int(os.environ["RANK"]) + 40
    breakpoint()
    y = 2 * x
    return y
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.warm_up()
    shared_kernel.run(SETUP).ok()
    return shared_kernel


@pytest.mark.contract("a launch: breakpoints")
@pytest.mark.parametrize("method", ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_each_rank_is_asked_and_the_function_goes_on(notebook: Kernel, method: str) -> None:
    cell, prompts = notebook.talk(f"print(launch(stops, start_method={method!r}))", ["p x", "n", "p y + 1000", "c"])
    assert sorted(prompts) == ["rank 0 ipdb> "] * 4 + ["rank 1 ipdb> "] * 4
    assert prompts[:4] == prompts[:1] * 4, "one rank after the other"
    lines = cell.stdout.splitlines()
    assert {"40", "41", "1080", "1082"} <= set(lines)
    assert lines[-1] == "[80, 82]"


def test_an_interrupt_at_the_prompt_ends_the_launch_and_the_next_one_runs(notebook: Kernel) -> None:
    cell = notebook.start("launch(stops)", allow_stdin=True)
    notebook.client.get_stdin_msg(timeout=20)
    notebook.interrupt()
    assert notebook.finish(cell, 20).error == "KeyboardInterrupt"
    before = notebook.counts()
    assert notebook.talk("print(launch(stops))", ["c"])[0].stdout.endswith("[80, 82]\n")
    assert notebook.settles_at(before)


def test_where_nobody_can_be_asked_it_says_so(notebook: Kernel) -> None:
    assert "front end allows none" in notebook.run("launch(stops)").stderr
    cell = notebook.start("training = launch(stops, block=False)\ntraining.wait(30)", allow_stdin=True)
    assert "asks for input" in notebook.finish(cell).stderr

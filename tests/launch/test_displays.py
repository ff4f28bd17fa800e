"""What launched functions display arrives in the cell as it would without ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fixtures.kernels import Cell, Kernel

SETUP = """
from nb_accelerate import notebook_launcher

def shows():
    from IPython.display import HTML, display
    print("before")
    handle = display(HTML("<b>first</b>"), display_id=True)
    handle.update(HTML("<b>second</b>"))
    print("after")

def plots():
    import matplotlib.pyplot as plt
    plt.plot([1, 2])
    plt.show()
    plt.plot([2, 1])  # shown when the function returns

def asks():
    from IPython.core.interactiveshell import InteractiveShell
    return InteractiveShell._instance is not None
"""


def html(cell: Cell) -> list[str]:
    return [one["text/html"] for one in cell.displays if "text/html" in one]


def test_html_of_a_launched_function_is_shown_and_updated(kernel: Kernel) -> None:
    kernel.run(SETUP).ok()
    cell = kernel.run("notebook_launcher(shows, num_processes=1, start_method='forkserver')").ok()
    assert html(cell) == ["<b>first</b>", "<b>second</b>"]
    assert "object>" not in cell.stdout
    assert cell.stdout.endswith("before\nafter\n")
    cell = kernel.run("notebook_launcher(asks, num_processes=1, start_method='forkserver')").ok()
    assert cell.displays == [{"text/plain": "[False]"}], "a function that shows nothing needs no shell"


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_figures_of_launched_functions_are_shown_once_for_each_rank(kernel: Kernel, start_method: str) -> None:
    kernel.run(SETUP).ok()
    if start_method == "fork":  # a figure of the kernel's own is not a rank's
        kernel.run("import matplotlib.pyplot as plt").ok()
    launch = "plt.plot([3])\n" if start_method == "fork" else ""
    launch += f"notebook_launcher(plots, num_processes=2, start_method={start_method!r}, fold_output=False)"
    cell = kernel.run(launch).ok()
    figures = [one for one in cell.displays if "image/png" in one]
    assert len(figures) == 4 + (start_method == "fork")
    assert "Figure(" not in cell.stdout
    cell = kernel.run("notebook_launcher(shows, num_processes=2, fold_output=False)").ok()
    assert sorted(html(cell)) == ["<b>first</b>"] * 2 + ["<b>second</b>"] * 2


FORKED = """
import asyncio, multiprocessing, time
import torch.distributed, tqdm
from tqdm.notebook import tqdm as in_notebook
from nb_accelerate import notebook_launcher

child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()

async def one():
    return 1

def runs():
    bars = in_notebook.display.__qualname__
    return asyncio.run(one()), multiprocessing.active_children(), bars == tqdm.tqdm.display.__qualname__
"""


@pytest.mark.slow
def test_a_fork_of_a_kernel_has_a_loop_of_its_own_no_child_of_the_kernel_and_bars_of_ranks(kernel: Kernel) -> None:
    kernel.run(FORKED).ok()
    try:
        cell = kernel.run("notebook_launcher(runs, num_processes=2, start_method='fork')").ok()
        assert eval(cell.displays[-1]["text/plain"]) == [(1, [], True)] * 2
    finally:
        kernel.run("child.kill(); child.join()").ok()

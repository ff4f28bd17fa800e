"""A plain notebook, written for one process, that runs on all ranks because its first cell says so."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import nbformat
import pytest
import torch
from nbformat import NotebookNode

from nb_accelerate.cli import notebook

CELLS = {
    # A rank that was off the CPU for a while says the same as the other nevertheless.
    "timeouts": "import dataclasses\nfrom nb_accelerate.notebook.pool import Pool\n"
    "Pool.timeouts = dataclasses.replace(Pool.timeouts, fold=30.0)",
    "auto": "%load_ext nb_accelerate\n%distributed config --progress off\n%distributed auto on",
    "imports": (
        "import matplotlib.pyplot as plt\nimport torch\nfrom torch.utils.data import DataLoader, TensorDataset\n\n"
        "from nb_accelerate import Accelerator"
    ),
    "function": (
        "def make_model():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))"
    ),
    "data": (
        "# A line, so that the slope is known.\nx = torch.linspace(-1, 1, 64).unsqueeze(1)\n"
        "data = TensorDataset(x, 3 * x + 2)\nlen(data)"
    ),
    "loop": (
        "accelerator = Accelerator()\nmodel = make_model()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nloader = DataLoader(data, batch_size=8)\n"
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
        "losses = []\nfor epoch in range(3):\n    for inputs, targets in loader:\n"
        "        loss = torch.nn.functional.mse_loss(model(inputs), targets)\n        optimizer.zero_grad()\n"
        "        accelerator.backward(loss)\n        optimizer.step()\n"
        "        losses.append(accelerator.gather(loss).mean().item())\n"
        "    print(f'epoch {epoch}: {losses[-1]:.6f}')\nmodel"
    ),
    "plot": "%matplotlib inline\nplt.plot(losses);",
    "differs": "f'rank {accelerator.process_index}'",
    "last": "last = losses[-1]",  # in a cell of its own: the first error ends the next one on all ranks
    "error": "# There is no such loss.\nlosses['last']",
    "goes on": "print(len(losses), last == losses[-1])",
    "here": "%%local\n'losses' in globals()",
    "back": "%distributed pull losses\n%distributed auto off",
    "after": "len(losses), losses[0] > losses[-1]",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NotebookNode]:
    path = tmp_path_factory.mktemp("auto") / "plain.ipynb"
    cells = [nbformat.v4.new_code_cell(code) for code in CELLS.values()]
    cells[list(CELLS).index("error")].metadata["tags"] = ["raises-exception"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    # With this variable ipykernel believes to run in its own tests, and does not capture what C code prints.
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    # On a new machine this takes long, and after five seconds matplotlib says so on stderr.
    subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], env=env, check=True, capture_output=True)
    run = notebook.execute(path, progress=io.StringIO(), env=env)
    assert run.failure is None, run.failure.render(color=False)
    return dict(zip(CELLS, run.notebook.cells, strict=True))


pytestmark = [
    pytest.mark.limit(120),
    pytest.mark.may_leave("files"),  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
]


def streamed(cell: NotebookNode, name: str = "stdout") -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == name)


def shown(cell: NotebookNode) -> list[dict[str, str]]:
    return [output.data for output in cell.outputs if output.output_type in ("display_data", "execute_result")]


def test_the_first_plain_cell_starts_the_ranks_and_says_so(ran: dict[str, NotebookNode]):
    # No panel: where the machine is busy, a cell that takes five seconds would have one.
    first, said = streamed(ran["auto"]).splitlines()
    assert (first, "%%local" in said) == ("--progress off", True)
    assert streamed(ran["imports"]) == "2 processes on CPU\n"


def test_what_all_ranks_say_looks_as_in_an_ordinary_notebook(ran: dict[str, NotebookNode]):
    assert ran["function"].outputs == []
    assert [data["text/plain"] for data in shown(ran["data"])] == ["64"]
    assert shown(ran["loop"])[-1]["text/plain"].startswith("DistributedDataParallel(")
    assert streamed(ran["differs"]).splitlines() == ["[rank 0] 'rank 0'", "[rank 1] 'rank 1'"]


def test_the_loop_is_that_of_plain_pytorch_over_the_same_batches(ran: dict[str, NotebookNode]):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    expected = []
    for _ in range(3):
        for rows in x.split(16):  # two ranks of 8
            loss = torch.nn.functional.mse_loss(model(rows), 3 * rows + 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        expected.append(loss.item())
    printed = [line.split(": ") for line in streamed(ran["loop"]).splitlines()]
    assert [name for name, _ in printed] == ["epoch 0", "epoch 1", "epoch 2"]
    assert [float(number) for _, number in printed] == pytest.approx(expected, abs=2e-6)


def test_a_figure_of_all_ranks_is_shown_once(ran: dict[str, NotebookNode]):
    assert ["image/png" in data for data in shown(ran["plot"])] == [True]


def test_an_error_has_its_line_and_the_notebook_goes_on(ran: dict[str, NotebookNode]):
    (error,) = [output for output in ran["error"].outputs if output.output_type == "error"]
    assert error.ename == "TypeError"
    assert "line 2" in "".join(error.traceback)
    assert "nb_accelerate" not in "".join(error.traceback)
    assert streamed(ran["goes on"]) == "12 True\n"


def test_cells_that_say_so_run_in_the_notebook(ran: dict[str, NotebookNode]):
    assert [data["text/plain"] for data in shown(ran["here"])] == ["False"]
    assert [data["text/plain"] for data in shown(ran["after"])] == ["(12, True)"]


def test_the_notebook_is_left_as_it_was_written(ran: dict[str, NotebookNode]):
    assert [cell.source for cell in ran.values()] == list(CELLS.values())


def test_nothing_is_said_that_an_ordinary_notebook_would_not_say(ran: dict[str, NotebookNode]):
    assert {name: streamed(cell, "stderr") for name, cell in ran.items() if streamed(cell, "stderr")} == {}

"""A plain loop in a cell trains a model on each rank: that is said, and that the notebook has another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.kernels import Kernel

pytestmark = pytest.mark.slow

TRAIN = (
    "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    "for _ in range(3):\n    model(torch.ones(2, 1)).sum().backward(); opt.step()\n"
)
SAID = "each of the 2 processes trains a model of its own with all of its rows. To train one model together: "


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.wait_for_server()
    shared_kernel.run("%load_ext nb_accelerate\nimport torch").ok()
    shared_kernel.run("%%distributed\nimport torch\nimport torch.distributed as dist").ok()
    shared_kernel.run("%distributed auto on").ok()
    shared_kernel.run(f"model = torch.nn.Linear(1, 1)\n{TRAIN}").ok()  # what is imported for the first optimizer stays
    shared_kernel.run("%distributed auto off").ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


@pytest.mark.parametrize("auto", ["off", "on"])
def test_a_plain_loop_is_told_once_for_a_model(notebook: Kernel, auto: str):
    notebook.run(f"%distributed auto {auto}").ok()
    head = "%%distributed\n" if auto == "off" else ""
    try:
        assert notebook.run(f"{head}model = torch.nn.Linear(1, 1)\n{TRAIN}").ok().stderr.count(SAID) == 1
        assert notebook.run(f"{head}{TRAIN}").ok().stderr == ""
    finally:
        notebook.run("%distributed auto off").ok()


@pytest.mark.parametrize("cell", ["%%rank 0", "%%distributed --ranks 0"])
def test_a_loop_on_one_rank_is_not(notebook: Kernel, cell: str):
    assert notebook.run(f"{cell}\nmodel = torch.nn.Linear(1, 1)\n{TRAIN}").ok().stderr == ""


def test_a_loop_that_averages_by_hand_is_not(notebook: Kernel):
    average = "[dist.all_reduce(p.grad) for p in model.parameters()]; opt.step()"
    train = TRAIN.replace("opt.step()", average)
    assert notebook.run(f"%%distributed\nmodel = torch.nn.Linear(1, 1)\n{train}").ok().stderr == ""


def noted(notebook: Kernel, cell: str) -> list[str]:
    """Run a cell, and return the lines that it shows about models that were trained on the ranks."""
    shown = notebook.run(cell).ok()
    texts = [shown.stdout, shown.stderr, *(data.get("text/plain", "") for data in shown.displays)]
    return [line for text in texts for line in text.splitlines() if "trained on the ranks" in line]


@pytest.mark.parametrize("option", ["", " --convert"])
def test_below_the_cell_that_trains_a_model_of_the_notebook_one_line_says_once_how_to_have_it(
    notebook: Kernel, option: str
):
    notebook.run("sent = same = torch.nn.Linear(1, 1)\nother = torch.nn.Linear(1, 1)").ok()
    train = f"%%distributed{option}\n{TRAIN.replace('model', 'sent')}"
    said = "sent was trained on the ranks: %distributed pull sent"
    assert noted(notebook, "%%distributed\nprint(sent.weight.shape, other.weight.shape)") == []
    assert noted(notebook, f"{train}assert same is sent") == [said]
    assert noted(notebook, train) == noted(notebook, "print(sent.weight.shape)") == []
    assert noted(notebook, "%%distributed\nown = torch.nn.Linear(1, 1)\n" + TRAIN.replace("model", "own")) == []
    notebook.run("sent = torch.nn.Linear(1, 1)").ok()
    assert noted(notebook, train) == [said]

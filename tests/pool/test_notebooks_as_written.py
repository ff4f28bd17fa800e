"""Notebooks as people write them, on two ranks: in auto mode, with ``--convert``, and launched, after one process.

Their cells define what later cells use, so what this package does with names, identity, seeds and rows comes together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from fixtures.kernels import Cell, Kernel
from fixtures.plain_cells import SHAPES

pytestmark = pytest.mark.slow

OWN_MODEL = "each of the 2 processes trains a model of its own"
WHOLE = "each of the 2 ranks computes all of"

COMPUTED_BY_EACH = {"char-RNN without a loader", "GCN", "GCN of an adjacency matrix"}
"""Their rows cannot be told from one another."""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.set_timeouts("nb_accelerate.pool.Pool", fold=30.0)
    shared_kernel.run("import torch\ntorch.set_num_threads(1)\n%load_ext nb_accelerate").ok()
    shared_kernel.run("%distributed start -n 2").ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


def numbers(cell: Cell) -> list[float]:
    return [float(one) for one in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", cell.stdout)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_notebook_prints_the_numbers_of_one_process_and_says_who_shared_the_work(notebook: Kernel, shape: str):
    *defining, last = SHAPES[shape]
    for code in defining:
        notebook.run(code).ok()
    alone = numbers(notebook.run(last).ok())
    assert len(alone) > 3

    for code in defining:
        notebook.run(code).ok()
    converted = notebook.run(f"%%distributed --convert\n{last}").ok()
    assert numbers(converted) == pytest.approx(alone, rel=2e-3, abs=1e-5), converted.stdout
    assert (WHOLE in converted.stderr) == (shape in COMPUTED_BY_EACH), converted.stderr
    assert OWN_MODEL not in converted.stderr

    notebook.run("%distributed auto on").ok()
    try:
        by_cell = [notebook.run(code).ok() for code in SHAPES[shape]]
    finally:
        notebook.run("%distributed auto off").ok()
    assert numbers(by_cell[-1]) == pytest.approx(alone, rel=2e-3, abs=1e-5)
    assert sum(OWN_MODEL in cell.stderr for cell in by_cell) == 1, [cell.stderr for cell in by_cell]
    notebook.run("%distributed reset").ok()


IMPORT = ("import copy, random, math", "from nb_accelerate import Accelerator; import copy, random, math")
BACKWARD = ("loss.backward()", "accelerator.backward(loss)")


def prepared(after: str, names: str) -> tuple[str, str]:
    """Two more lines after one: an `Accelerator`, and what it prepares."""
    made = "accelerator = Accelerator(split_batches=True)"
    return after, f"{after}\n{made}\n{names} = accelerator.prepare({names})"


LAUNCHED: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "early stopping": (
        "model",
        [
            prepared(
                "optimizer = optim.Adam(params=model.parameters(), lr=0.05)", "model, optimizer, train_dl, val_dl"
            ),
            (
                "    print(epoch, total / n, val)",
                "    val = accelerator.reduce(torch.tensor(val)).item(); print(epoch, val)",
            ),
        ],
    ),
    "transfer learning": (
        "model_ft",
        [
            (
                'device = torch.device("cpu")',
                'device = torch.device("cpu"); accelerator = Accelerator(split_batches=True)',
            ),
            (
                "    for epoch in range(num_epochs):\n        for phase",
                "    model, optimizer, scheduler, loaders['train'], loaders['val'] = accelerator.prepare("
                "model, optimizer, scheduler, loaders['train'], loaders['val'])\n"
                "    for epoch in range(num_epochs):\n        for phase",
            ),
            ("    return model\ndevice", "    return accelerator.unwrap_model(model)\ndevice"),
        ],
    ),
    "LSTM with its own state": (
        "model",
        [
            prepared("criterion = nn.MSELoss()", "model, optimizer, dl"),
            ("h = model.init_hidden(20)", "h = accelerator.unwrap_model(model).init_hidden(10)"),
        ],
    ),
    "VAE": (
        "model",
        [
            prepared(
                "model = VAE(); optimizer = optim.Adam(model.parameters(), lr=1e-2)", "model, optimizer, train_loader"
            ),
            ("print(model.decode(", "print(accelerator.unwrap_model(model).decode("),
        ],
    ),
    "loaders from a function": (
        "trainer.model",
        [
            (
                "        self.history = []",
                "        self.accelerator = Accelerator(split_batches=True)\n"
                '        self.model, self.opt, loaders["train"] = self.accelerator.prepare(self.model, self.opt, '
                'loaders["train"])\n        self.history = []',
            ),
            ("; accelerator.backward(loss)", "; self.accelerator.backward(loss)"),
        ],
    ),
    "quickstart": (
        "model",
        [prepared("lr=1e-1)", "model, optimizer, train_dataloader")],
    ),
    "tqdm": ("net", [prepared("net = nn.Linear(6, 2); opt = optim.SGD(net.parameters(), lr=0.1)", "net, opt, dl")]),
}
"""Per notebook, the model that is trained in the end, and what is changed by hand besides its import and backward."""


@pytest.mark.parametrize("shape", LAUNCHED)
def test_a_launched_notebook_with_five_lines_changed_trains_the_model_of_one_process(notebook: Kernel, shape: str):
    model, changes = LAUNCHED[shape]
    plain = "\n".join(SHAPES[shape])
    code = plain
    for old, new in [IMPORT, BACKWARD, *changes]:
        assert old in code or (old, new) == BACKWARD, old
        code = code.replace(old, new)
    changed = set(code.splitlines()) - set(plain.splitlines())
    assert len(changed) <= 5, changed
    for name, text in (("alone", plain), ("launched", code)):
        body = "\n".join(f"    {line}" for line in text.splitlines())
        notebook.run(f"def {name}():\n{body}\n    return [p.detach() for p in {model}.parameters()]").ok()
    notebook.run("from nb_accelerate import notebook_launcher").ok()
    notebook.run("one = notebook_launcher(alone, num_processes=1, progress='off')[0]").ok()
    cell = notebook.run("two = notebook_launcher(launched, num_processes=2, progress='off')").ok()
    assert OWN_MODEL not in cell.stderr
    same = "max((a - b).abs().max().item() for a, b in zip(two[0], two[1]))"
    assert notebook.run(same).ok().value == "0.0"
    # The last batch of a pass, which is not full, has the first rows once more on two ranks.
    flat = "torch.nn.utils.parameters_to_vector"
    near = f"(({flat}(one) - {flat}(two[0])).norm() / {flat}(one).norm()).item()"
    assert float(notebook.run(near).ok().value or "nan") < 0.15

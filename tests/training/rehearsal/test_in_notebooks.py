"""Functions and cells of a real notebook, and scripts, are rehearsed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
from fixtures.page_code import code_of

if TYPE_CHECKING:
    from fixtures.kernels import Kernel

FUNCTION = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from nb_accelerate import Accelerator, rehearse

epochs = 2
data = TensorDataset(torch.ones(64, 4))

def train():
    accelerator = Accelerator()
    model = nn.Linear(4, 1)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for epoch in range(epochs):
        for (x,) in loader:
            accelerator.backward(model(x).sum())
            optimizer.step()
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()
"""

CELL = """%%distributed --rehearse -n 2 --out of_cell
model, loader = nn.Linear(4, 1), DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
for epoch in range(epochs):
    for (x,) in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
epochs = 3
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
    accelerator.wait_for_everyone()
"""


@pytest.mark.slow
def test_a_function_and_a_cell_are_rehearsed_with_the_names_of_the_notebook_which_stay(kernel: Kernel):
    kernel.run(FUNCTION).ok()
    kernel.run("found = rehearse(train, num_processes=2)").ok()
    shown = kernel.run("print(found.findings[0].kind, '|', found.findings[0].text)").ok()
    assert "hang | " in shown.stdout
    assert "cell 1 line 19" in shown.stdout
    kernel.run("%load_ext nb_accelerate").ok()
    shown = kernel.run(CELL).ok()
    assert "cell 5 line 11" in str(shown.value)
    shown = kernel.run("epochs, 'model' in globals(), of_cell.ok, [len(one.rates[0]) for one in of_cell.traces]").ok()
    assert eval(str(shown.value)) == (2, False, False, [16, 16])
    assert not Path("model.pt").exists()


NOTEBOOKS = Path(__file__).parents[3] / "notebooks"

REHEARSED = """
import nb_accelerate
alarms, number = [], 0

def launched(function, args=(), num_processes=2, *_, kwargs=None, **__):
    global number
    found = nb_accelerate.rehearse(function, args, kwargs, num_processes=num_processes)
    number += 1
    alarms.extend(finding.text for finding in found.findings if finding.kind not in ("invented", "note"))
    return [None] * num_processes

nb_accelerate.notebook_launcher = launched
"""
"""A cell after which functions are rehearsed in place of being launched. Cells that use what they return fail."""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    # sklearn sets KMP variables, after which a launch would start another server.
    shared_kernel.run("import sklearn").ok()
    shared_kernel.wait_for_server()
    return shared_kernel


@pytest.mark.slow
@pytest.mark.limit(180)
@pytest.mark.may_leave("files")
@pytest.mark.parametrize(
    ("page", "launches"),
    [
        ("00_quickstart.ipynb", 1),
        ("04_language_model.ipynb", 2),
        ("06_data.ipynb", 8),
        ("07_trackers.ipynb", 3),
        ("how_to/binder.md", 1),
        ("how_to/colab.md", 1),
        ("how_to/compare_runs.md", 4),
        ("how_to/inference.md", 4),
        ("how_to/jupyterlab.md", 2),
        ("how_to/kaggle.md", 1),
        ("how_to/tensorboard_wandb.md", 2),
        ("how_to/tqdm_and_logging.md", 3),
        ("how_to/vs_code.md", 2),
    ],
)
def test_functions_of_pages_raise_no_alarm(notebook: Kernel, page: str, launches: int, tmp_path: Path):
    text = (NOTEBOOKS / page).read_text(encoding="utf-8")
    if page.endswith(".ipynb"):
        cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    else:
        cells = code_of(text).cells
    notebook.run(f"import os; os.chdir({str(tmp_path)!r})\n%reset -f").ok()
    notebook.run(REHEARSED).ok()
    for cell in cells:
        if not cell.startswith("%"):
            notebook.run(cell.replace("epochs=10", "epochs=2").replace("steps=60", "steps=12"))
    assert notebook.run("alarms, number").value == f"([], {launches})"


SCRIPT = """
import argparse
from torch import nn, optim, ones
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--bad", action="store_true")
arguments = parser.parse_args()
accelerator = Accelerator()
model = nn.Linear(4, 1)
loader = DataLoader(TensorDataset(ones(64, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optim.SGD(model.parameters(), 0.1), loader)
for (x,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(x).sum())
        optimizer.step()
if accelerator.is_main_process and arguments.bad:
    accelerator.wait_for_everyone()
"""


@pytest.mark.slow
@pytest.mark.limit(180)
def test_a_script_is_rehearsed_with_the_flags_of_its_launch(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(dedent(SCRIPT).replace("from accelerate", "from nb_accelerate"))
    flags = ["--rehearse", "--num_processes", "4", "--gradient_accumulation_steps", "2", "--rehearse_device", "T4"]
    command = [sys.executable, "-m", "nb_accelerate", "launch", *flags, str(script)]
    ended = {
        words: subprocess.run([*command, *words], check=False, capture_output=True, text=True, cwd=tmp_path)
        for words in ((), ("--bad",), ("--wrong",))
    }
    assert [one.returncode for one in ended.values()] == [0, 1, 1]
    assert " 32 " in ended[()].stdout  # rows a step
    assert re.search(r"15\.8 GB \(T4\): .*fits", ended[()].stdout)
    assert "train.py line 19" in ended[("--bad",)].stdout
    assert "unrecognized arguments: --wrong" in ended[("--wrong",)].stdout

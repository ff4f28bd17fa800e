"""A notebook from its first cell to its last, in each environment of `make test-places`: what its users do."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ipykernel
import pytest
from fixtures.kernels import Kernel, start_in_lab

pytestmark = pytest.mark.slow

SETUP = """
import os, sys, time, torch, matplotlib
import matplotlib.pyplot as plt
%matplotlib inline
from torch.utils.data import DataLoader, TensorDataset
from nb_accelerate import Accelerator, notebook_launcher
"""

TRAIN = """
def train(epochs, seconds=0.0):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 3 * x + 2), batch_size=8)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            time.sleep(seconds)
    return accelerator.process_index, round(accelerator.unwrap_model(model).bias.item(), 2)
"""

_CLASSES = [None, "fixtures.colab_kernel.ColabKernel"] if ipykernel.version_info < (7,) else [None]


@pytest.fixture(scope="module", params=_CLASSES, ids=lambda name: "plain" if name is None else "as on Colab")
def notebook(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    kernel = Kernel(kernel_class=request.param)
    # Seconds. A rank that was off the CPU for a while says the same as the other nevertheless.
    kernel.run("%load_ext nb_accelerate").ok()
    kernel.set_timeouts("nb_accelerate.notebook.pool.Pool", fold=30.0)
    kernel.put("nb_accelerate.notebook.magics.names._ANSWER_WITHIN", 20.0)
    kernel.run(SETUP).ok()
    kernel.run(TRAIN).ok()
    kernel.run("%%distributed -n 2\nvalue = 0").ok()  # ranks that a test starts are held against it
    yield kernel
    kernel.close()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def answer(notebook: Kernel, request: str, timeout: float = 30.0) -> dict[str, Any]:
    """The content of the reply to a request on the shell channel."""
    while True:
        reply = notebook.client.get_shell_msg(timeout=timeout)
        if reply["parent_header"].get("msg_id") == request:
            content: dict[str, Any] = reply["content"]
            return content


def test_a_launch_returns_the_value_of_each_rank(notebook: Kernel) -> None:
    cell = notebook.run("notebook_launcher(train, (10,), num_processes=2)").ok()
    assert "[(0, 2.0), (1, 2.0)]" in [cell.value, *(one["text/plain"] for one in cell.displays)]
    assert "[Gloo]" not in cell.stdout


def test_a_launch_shows_a_panel_and_what_ranks_print(notebook: Kernel) -> None:
    code = "def says():\n    from tqdm.auto import tqdm\n    for _ in tqdm(range(3), desc='rows'): time.sleep(0.5)\n"
    code += "    print('hello')\n    return train(4, 0.05)\nnotebook_launcher(says, num_processes=2)"
    cell = notebook.finish(start_in_lab(notebook, code)).ok()
    assert cell.stdout.count("hello\n") == 1
    tables = [one for one in cell.displays if "nba" in one.get("text/html", "")]
    assert "rows" in tables[-1]["text/plain"]
    assert "done" in tables[-1]["text/plain"]


def test_an_error_has_its_type_the_rank_and_the_line_of_the_cell(notebook: Kernel) -> None:
    cell = notebook.run("def fails():\n    return {}['absent']\nnotebook_launcher(fails, num_processes=2)")
    assert cell.error == "KeyError"
    assert re.search(r"Cell In\[\d+\], line 2, in fails", plain(cell.traceback))
    assert "---> 2" in plain(cell.traceback)
    assert "nb_accelerate/" not in plain(cell.traceback)


def test_a_module_that_is_missing_on_a_rank_is_told(notebook: Kernel) -> None:
    cell = notebook.run("%%distributed\nimport absent_module")
    assert cell.error == "ModuleNotFoundError"
    assert "absent_module" in cell.traceback


def test_a_cell_runs_on_ranks_that_keep_their_variables(notebook: Kernel) -> None:
    notebook.run("here = torch.arange(3)").ok()
    cell = notebook.run(
        "%%distributed\nimport torch.distributed as dist\nkept = here + rank\nt = kept.sum()\ndist.all_reduce(t)\n"
        "print(t.item())\nt * 10"
    ).ok()
    assert cell.stdout == "9\n"
    assert [one["text/plain"] for one in cell.displays] == ["tensor(90)"]
    assert notebook.run("%%rank 1\nprint(kept.tolist())").ok().stdout == "[1, 2, 3]\n"
    assert notebook.run("%%distributed\nkept;").ok().displays == []


def test_a_cell_awaits(notebook: Kernel) -> None:
    code = "%%distributed\nimport asyncio\nawait asyncio.sleep(0)\nprint('awaited')"
    assert notebook.run(code).ok().stdout == "awaited\n"


def test_displays_and_figures_of_ranks_are_shown(notebook: Kernel) -> None:
    cell = notebook.run("%%rank 0\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()").ok()
    assert any("image/png" in one for one in cell.displays)
    cell = notebook.run("%%rank 0\nimport pandas\npandas.DataFrame({'column': [1]})").ok()
    assert any("<table" in one.get("text/html", "") for one in cell.displays)
    drawn = "def draws():\n    plt.plot([1, 2])\n    return 1\nnotebook_launcher(draws, num_processes=1)"
    assert any("image/png" in one for one in notebook.run(drawn).ok().displays)


def test_an_error_in_a_cell_has_its_line_and_leaves_variables(notebook: Kernel) -> None:
    cell = notebook.run("%%distributed\nvalue = 5\nif rank:\n    raise ValueError(value)")
    assert cell.error == "ValueError"
    assert re.search(r"Cell In\[\d+\], line 4", plain(cell.traceback))
    assert "<cell line" not in plain(cell.traceback)
    assert notebook.run("%%distributed\nprint(value)").ok().stdout == "5\n"


def test_the_debugger_opens_where_a_rank_failed(notebook: Kernel) -> None:
    assert notebook.run("%%rank 1\ndef fails(secret):\n    raise ValueError(secret)\nfails(42)").error == "ValueError"
    cell = notebook.run("%distributed debug", answers=["p secret", "q"]).ok()
    assert cell.questions == ["rank 1 ipdb> "] * 2
    assert "42\n" in cell.stdout
    cell = notebook.run("%%rank 0\nbreakpoint()\nx = 1", answers=["p 6 * 7", "c"]).ok()
    assert "42\n" in cell.stdout


def test_names_and_magics_are_completed_and_ranks_are_asked_what_a_name_is(notebook: Kernel) -> None:
    notebook.run("%%distributed\ndef only_there():\n    'Says hello.'").ok()
    for code, wanted in (("%%distributed\nonly_th", "only_there"), ("%distributed sta", "status")):
        found = answer(notebook, notebook.client.complete(code, len(code)))
        assert wanted in found["matches"]
        assert found["cursor_start"] == len(code) - len(code.split()[-1])
    found = answer(notebook, notebook.client.inspect("only_there", 5))
    assert found["found"]
    assert "Says hello." in str(found["data"])
    assert not answer(notebook, notebook.client.inspect("never_defined", 5))["found"]


def test_an_interrupt_ends_a_launch_and_a_cell_and_variables_stay(notebook: Kernel) -> None:
    for code in (
        "def waits():\n    print('waits', flush=True); time.sleep(600)\nnotebook_launcher(waits, num_processes=2)",
        "%%distributed\nimport time\nprint('waits', flush=True)\ntime.sleep(600)",
    ):
        cell = notebook.start(code)
        notebook.wait_for_output(cell, "waits")
        notebook.interrupt()
        assert notebook.finish(cell, timeout=20.0).error == "KeyboardInterrupt"
    assert notebook.run("%%distributed\nprint(value)").ok().stdout == "5\n"


@pytest.mark.may_leave("processes", "files")
def test_a_rank_that_is_killed_is_named_and_started_again(notebook: Kernel) -> None:
    cell = notebook.run("%%rank 1\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert cell.error == "RankDiedError"
    notebook.run("%distributed restart 1").ok()
    cell = notebook.run(
        "%%distributed\nimport torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nprint(t.item())"
    ).ok()
    assert cell.stdout == "2.0\n"
    assert notebook.run("%%rank 0\nprint(value)").ok().stdout == "5\n"


def test_status_says_what_runs(notebook: Kernel) -> None:
    shown = notebook.run("%distributed status").ok().stdout
    assert re.search(r"rank\s*0|^\s*0\b", shown, re.MULTILINE), shown


def test_a_failure_in_one_rank_while_the_other_waits_for_it_ends_the_cell(notebook: Kernel) -> None:
    began = time.monotonic()
    cell = notebook.run("%%distributed\nif rank:\n    raise LookupError('rank 1')\ndist.barrier()")
    assert cell.error == "LookupError"
    assert time.monotonic() - began < 15.0


def test_training_is_saved_and_goes_on(notebook: Kernel, tmp_path: Path) -> None:
    notebook.run(
        f"""
def saves(folder):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.save_state(folder)
    before = accelerator.unwrap_model(model).weight.detach().clone()
    with torch.no_grad():
        accelerator.unwrap_model(model).weight.zero_()
    accelerator.load_state(folder)
    return torch.equal(before, accelerator.unwrap_model(model).weight)
print(notebook_launcher(saves, ({str(tmp_path / "state")!r},), num_processes=2))"""
    ).ok()
    assert (tmp_path / "state" / "model.safetensors").exists()


def test_a_plain_loop_becomes_a_distributed_one(notebook: Kernel) -> None:
    shown = notebook.run(
        "%%distributed --convert\nmodel = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)\n"
        "for (x,) in loader:\n    loss = model(x).square().mean()\n    loss.backward()\n    optimizer.step()\n"
        "    optimizer.zero_grad()\nprint('trained on', len(loader), 'batches')\n"
    ).ok()
    assert "trained on 4 batches" in shown.stdout
    assert shown.stderr == ""


@pytest.mark.may_leave("processes", "files")
def test_unloading_ends_the_ranks_and_the_notebook_goes_on(notebook: Kernel) -> None:
    notebook.run("%unload_ext nb_accelerate").ok()
    assert notebook.processes() == []
    assert notebook.run("1 + 1").ok().value == "2"

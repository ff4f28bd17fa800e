"""Information for the user is a grey line of the panel, or plain text without one, and never an error in red."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fixtures.kernels import Kernel, message_until, start_in_lab

SETUP = """
import time, torch
from torch.utils.data import DataLoader
from nb_accelerate import Accelerator, ProjectConfiguration, notebook_launcher

def train(where, waits=0.0, factor=1.0):
    project = ProjectConfiguration(where, save_every="1 epoch")
    accelerator = Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.ones(32, 1), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch, batches in accelerator.resumable(loader, 2):
        for rows in batches:
            accelerator.backward(model(rows).mean() * factor)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(waits)

def trains_nothing():
    return None
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.wait_for_server()
    shared_kernel.run(SETUP).ok()
    return shared_kernel


def left_in_lab(kernel: Kernel, code: str) -> tuple[list[dict[str, str]], str]:
    """Run a cell as JupyterLab does; return the displays that are left, and what was written to stderr."""
    cell, shown, stderr = start_in_lab(kernel, code), dict[str, dict[str, str]](), ""

    def is_of_cell(message: dict[str, Any]) -> bool:
        return message["parent_header"].get("msg_id") == cell

    while True:
        message = message_until(kernel, is_of_cell)
        content = message["content"]
        if message["msg_type"] in ("display_data", "update_display_data"):
            shown[content["transient"].get("display_id", message["header"]["msg_id"])] = content["data"]
        elif message["msg_type"] == "stream" and content["name"] == "stderr":
            stderr += content["text"]
        elif message["msg_type"] == "error":
            raise AssertionError("\n".join(content["traceback"]))
        elif content.get("execution_state") == "idle":
            return [data for data in shown.values() if data.get("text/plain")], stderr


def test_information_is_a_grey_line_of_the_panel(notebook: Kernel, tmp_path: Path) -> None:
    notebook.run(f"notebook_launcher(train, ({str(tmp_path)!r},), 2, progress='off')").ok()
    shown, stderr = left_in_lab(
        notebook, f"notebook_launcher(train, ({str(tmp_path)!r}, 0.2), 2)  # begins anew, for longer than a second"
    )
    line = f"{tmp_path}/checkpoints has checkpoints of an earlier run, the newest is checkpoint_1."
    assert stderr == ""
    (panel,) = shown
    assert re.search(r'<p class="nba-dim">[^<]*' + re.escape(line), panel["text/html"])
    assert panel["text/plain"].count(line) == 1


SCHEDULE = """
def train_epochs():
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD((model := torch.nn.Linear(1, 1)).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    loader = DataLoader(torch.ones(32, 1), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for rows in loader:
        accelerator.backward(model(rows).mean())
        optimizer.step()
    schedule.step()

notebook_launcher(train_epochs, num_processes=2)
"""


def test_what_a_schedule_does_is_information_in_the_display_of_the_run(notebook: Kernel) -> None:
    (panel,), stderr = left_in_lab(notebook, SCHEDULE)
    assert stderr == ""
    for said in ("LambdaLR advances 2 times at each optimizer step", "so it counts epochs"):
        assert panel["text/plain"].count(said) == 1


def test_information_of_a_run_without_a_panel_is_text_below_its_first_line(notebook: Kernel, tmp_path: Path) -> None:
    code = f"""
    def saves():
        same, file = torch.ones(2), {str(tmp_path / "file")!r}
        Accelerator(cpu=True).save({{"a": same, "b": same}}, file, safe_serialization=True)
    notebook_launcher(saves, (), 2)"""
    shown, stderr = left_in_lab(notebook, code)
    said = f"{tmp_path / 'file'} has no b: other names of tensors that are in it."
    assert (shown, stderr) == ([{"text/plain": f"2 processes on CPU\n{said}"}], "")


def test_a_log_has_information_where_it_comes_and_not_in_red(notebook: Kernel, tmp_path: Path) -> None:
    cell = notebook.run(f"notebook_launcher(train, ({str(tmp_path)!r},), 2, resume=True)").ok()
    said = [data.get("text/plain", "") for data in cell.displays]
    assert any(f"no checkpoint in {tmp_path}/checkpoints " in one for one in said)
    assert cell.stderr == ""


def test_a_loss_of_nan_is_told_of_a_run_that_no_panel_was_drawn_for(notebook: Kernel, tmp_path: Path) -> None:
    shown, stderr = left_in_lab(notebook, f"notebook_launcher(train, ({str(tmp_path)!r}, 0.0, float('nan')), 2)")
    (panel,) = shown
    assert 'nba-warn">The loss is nan' in panel["text/html"]
    assert stderr == ""


def test_resume_that_resumes_nothing_says_so(notebook: Kernel) -> None:
    cell = notebook.run("notebook_launcher(trains_nothing, (), 2, resume=True)").ok()
    assert cell.stderr.count("resume=True: nothing was resumed.") == 1


def test_a_prepared_model_that_every_rank_saves_is_told_with_what_to_write(notebook: Kernel, tmp_path: Path) -> None:
    code = f"""
    def saves():
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        file = {str(tmp_path)!r} + "/{{}}.pt"
        torch.save({{"model": model.state_dict(), "epoch": 3}}, file.format("epoch_10"))
        torch.save(model.state_dict(), file.format(accelerator.process_index))
        torch.save(accelerator.unwrap_model(model).state_dict(), file.format("plain"))
        accelerator.save(model.state_dict(), file.format("once"))
        if accelerator.is_main_process:
            torch.save(model.state_dict(), file.format("by the main process"))
    notebook_launcher(saves, (), 2)"""
    ((shown,), stderr) = left_in_lab(notebook, code)
    _, *said = shown["text/plain"].splitlines()
    assert stderr == ""
    assert [line.partition(",")[0] for line in said] == [f"Rank 1 saved {tmp_path / 'epoch_10.pt'}"]
    assert said[0].endswith(f"accelerator.save(accelerator.get_state_dict(model), {str(tmp_path / 'epoch_10.pt')!r})")


def test_information_where_no_ranks_were_started_is_not_red_in_a_notebook(notebook: Kernel, tmp_path: Path) -> None:
    cell = notebook.run(f"notebook_launcher(train, ({str(tmp_path)!r},), 1, start_method='inline', resume=True)").ok()
    assert "no checkpoint" in cell.stdout
    assert cell.stderr == ""

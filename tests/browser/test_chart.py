"""The small curve of a panel opens a chart when it is clicked on, which stays open while the panel is drawn again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fixtures.kernels import WAIT_FOR_SERVER

if TYPE_CHECKING:
    from browser.conftest import OpenNotebook

pytestmark = [pytest.mark.browser, pytest.mark.limit(240)]

SETUP = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from nb_accelerate import Accelerator, notebook_launcher, runs


def train(lr, steps=60):
    accelerator = Accelerator()
    torch.manual_seed(0)
    x = torch.randn(steps * 8 * accelerator.num_processes, 10)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"lr": lr * (1 - step / steps)})
        if step % 10 == 9:
            accelerator.log({"val_loss": 1.2 * loss.item() + 0.3})
        time.sleep(0.15)
"""
RUNS = ("notebook_launcher(train, (0.02,), num_processes=2)", "notebook_launcher(train, (0.05, 120), num_processes=2)")

_SVG = "document.querySelectorAll('.jp-Notebook .jp-Cell')[2]?.querySelector('details.nba-chart[open] .nba-plot>svg')"


def test_a_chart_opens_and_stays_open(open_notebook: OpenNotebook) -> None:
    notebook = open_notebook([SETUP + WAIT_FOR_SERVER, *RUNS, "runs()", "runs().plot()"])
    notebook.run(0)
    notebook.wait_until_done(90)
    notebook.run(1)
    notebook.wait_until_done(90)
    notebook.run(2)
    small = "document.querySelectorAll('.jp-Notebook .jp-Cell')[2]?.querySelector('.nba-chart>summary')"
    notebook.wait_until(f"() => {small} != null", timeout=90)
    notebook.evaluate(f"() => {{ window.first = {small}; window.first.click() }}")
    notebook.wait_until(f"() => {_SVG} != null && !window.first.isConnected", timeout=30)  # of a later drawing
    notebook.wait_until(f"() => {_SVG}?.querySelectorAll('.nba-c-validation').length > 3", timeout=60)
    notebook.scroll_to(2)
    notebook.screenshot("chart-running", cell=2)
    notebook.wait_until_done(90)
    notebook.wait_until(f"() => {_SVG} != null", timeout=30)
    legend = notebook.evaluate(f"() => {_SVG}.closest('.nba-big').querySelector('p').innerText")
    assert "val_loss" in legend
    assert "lr=0.02, steps=60" in legend  # the run before
    notebook.scroll_to(2)
    notebook.screenshot("chart-done", cell=2)
    for cell in (3, 4):
        notebook.run(cell)
        notebook.wait_until_done(60)
        notebook.scroll_to(cell)
        notebook.screenshot(f"runs-{cell}", cell=cell)
    shown = "[...document.querySelectorAll('.jp-Notebook .jp-Cell')].at(-2).querySelectorAll('td')"
    cells = notebook.evaluate(f"() => [...{shown}].map(one => one.innerText)")
    assert (cells[1], cells[3:5]) == ("train", ["0.02", "60"])
    chart = "[...document.querySelectorAll('.jp-Notebook .jp-Cell')].at(-1)"
    assert notebook.evaluate(f"() => {chart}.querySelectorAll('.jp-OutputArea img').length") == 1  # of matplotlib

"""What a panel in a cell sends to the front end: its style sheet once, few widgets, small updates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fixtures.kernels import Kernel, start_in_lab

TRAIN = """
import os, time, torch
from torch.utils.data import DataLoader, TensorDataset
from nb_accelerate import Accelerator, notebook_launcher

def train(path):
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.rand(100000, 1)), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
    for step, (x,) in enumerate(loader):
        accelerator.backward((model(x) ** 2).sum())
        optimizer.step()
        time.sleep(0.01)
        if os.path.exists(path):
            return
"""
VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.mark.slow
def test_the_style_sheet_is_sent_once_and_widgets_are_made_when_they_are_used(kernel: Kernel, tmp_path: Any) -> None:
    kernel.wait_for_server()
    kernel.run(TRAIN).ok()
    end = tmp_path / "end"
    cell = start_in_lab(kernel, f"notebook_launcher(train, ({str(end)!r},), 2, progress='widget')")
    messages: list[dict[str, Any]] = []

    def read() -> dict[str, Any]:
        messages.append(kernel.client.get_iopub_msg(timeout=30))
        return messages[-1]

    def of_kind(*kinds: str) -> list[dict[str, Any]]:
        return [one["content"] for one in messages if one["msg_type"] in kinds]

    def has_chart(content: dict[str, Any]) -> bool:
        return 'class="nba-big"' in content.get("data", {}).get("text/html", "")

    while sum(map(has_chart, of_kind("update_display_data"))) < 12:
        read()
    drawn = [one for one in of_kind("update_display_data") if has_chart(one)]
    sent = [one["header"]["date"] for one in messages if has_chart(one["content"])]
    assert (len(sent) - 1) / (sent[-1] - sent[0]).total_seconds() < 2.1
    # Most of it is the chart.
    assert max(len(json.dumps(one, ensure_ascii=False)) for one in drawn) < 7_000
    (sheet,) = [one for one in of_kind("display_data", "update_display_data") if "<style" in str(one)]
    assert sheet["data"]["text/plain"] == ""
    (buttons,) = [one for one in of_kind("display_data", "update_display_data") if VIEW in one["data"]]
    assert buttons["data"]["text/plain"]
    made = len(of_kind("comm_open"))
    assert made <= 10

    end.touch()
    while messages[-1]["content"].get("execution_state") != "idle" or messages[-1]["parent_header"]["msg_id"] != cell:
        read()
    assert len(of_kind("comm_close")) == made
    kept: dict[str, dict[str, Any]] = {}
    for one in of_kind("display_data", "update_display_data"):
        kept[one["transient"]["display_id"]] = one["data"]
    (table,) = [data for data in kept.values() if data]
    assert table["text/html"].startswith("<style"), "what is saved needs nothing else"

"""The examples in the docstrings of `Accelerator` run as they stand."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate import Accelerator, ProfileKwargs
from nb_accelerate.local_sgd import LocalSGD
from nb_accelerate.utils import ProjectConfiguration

MOST_USED = (
    "accumulate",
    "autocast",
    "backward",
    "clip_grad_norm_",
    "free_memory",
    "gather",
    "gather_for_metrics",
    "init_trackers",
    "join_uneven_inputs",
    "load_state",
    "main_process_first",
    "no_sync",
    "on_main_process",
    "pad_across_processes",
    "prepare",
    "print",
    "profile",
    "reduce",
    "register_for_checkpointing",
    "save",
    "save_model",
    "save_state",
    "set_trigger",
    "skip_first_batches",
    "split_between_processes",
    "unwrap_model",
    "wait_for_everyone",
)


def example_of(subject: Any) -> str | None:
    """The code below "Examples:" in a docstring; None if there is none."""
    found = re.search(
        r"^Examples:\n    ```python\n(.*?)^    ```$", inspect.getdoc(subject) or "", re.MULTILINE | re.DOTALL
    )
    return None if found is None else textwrap.dedent(found[1])


MEMBERS = {name: getattr(Accelerator, name) for name in dir(Accelerator) if not name.startswith("_")}
EXAMPLES = {
    name: code
    for name, member in {"Accelerator": Accelerator, "LocalSGD": LocalSGD, **MEMBERS}.items()
    if (code := example_of(member)) is not None
}


def test_the_methods_that_are_used_most_have_an_example():
    assert [name for name in MOST_USED if name not in EXAMPLES] == []


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_an_example_runs_as_it_stands(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(20, 4), torch.arange(20) % 3), batch_size=8)
    accelerator = Accelerator(cpu=True, project_dir="runs")
    names: dict[str, Any] = {
        "Accelerator": Accelerator,
        "LocalSGD": LocalSGD,
        "Path": Path,
        "ProfileKwargs": ProfileKwargs,
        "ProjectConfiguration": ProjectConfiguration,
        "accelerator": accelerator,
        "epoch": 0,
        "evaluate": lambda _model: None,
        "first_epoch": 0,
        "loader": loader,
        "loss_function": nn.functional.cross_entropy,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer),
        "step": 1,
        "torch": torch,
        "train": lambda: model(torch.zeros(1, 4)),
    }
    exec(compile(EXAMPLES[name], f"the example of {name}", "exec"), names)

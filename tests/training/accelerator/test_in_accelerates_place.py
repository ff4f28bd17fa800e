"""Code that was written for accelerate meets this package in its place. Published trainers do in `with_trainers`."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context
from nb_accelerate.training.state import AcceleratorState, GradientState, PartialState

REPLACE = """
import importlib, pkgutil, sys
import nb_accelerate, nb_accelerate.utils

sys.modules["accelerate"] = nb_accelerate
for name in "data_loader launchers local_sgd logging optimizer scheduler state tracking utils".split():
    sys.modules[f"accelerate.{name}"] = importlib.import_module(f"nb_accelerate.{name}")
for part in pkgutil.iter_modules(nb_accelerate.utils.__path__):
    sys.modules[f"accelerate.utils.{part.name}"] = importlib.import_module(f"nb_accelerate.utils.{part.name}")
"""


def test_shared_states_are_empty_until_there_is_something_to_show():
    assert PartialState._shared_state == {}
    assert AcceleratorState._shared_state == {}
    assert GradientState._shared_state == {}
    state = PartialState(cpu=True)
    assert PartialState._shared_state["num_processes"] == 1
    assert state._shared_state == PartialState._shared_state != {}
    assert AcceleratorState._shared_state == {}
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    assert AcceleratorState._shared_state["mixed_precision"] == "bf16"
    assert AcceleratorState._shared_state["distributed_type"] is DistributedType.NO
    assert GradientState._shared_state["plugin_kwargs"] == {"num_steps": 3}
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == AcceleratorState._shared_state == GradientState._shared_state == {}
    assert accelerator.parallelism_config is accelerator.state.parallelism_config is None


@pytest.mark.parametrize("name", ["distributed_type", "num_processes", "mixed_precision"])
def test_what_a_state_shows_cannot_be_set(name):
    state = Accelerator(cpu=True).state
    with pytest.raises(AttributeError):
        setattr(state, name, None)
    state.mine = 3  # what is no attribute of a state can be kept there
    assert state.mine == 3


def test_copies_of_states_are_views_too(run_ranks):
    def train():
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        views = (PartialState(), accelerator.state, accelerator.gradient_state)
        again = [*map(copy.copy, views), *copy.deepcopy(views), *pickle.loads(pickle.dumps(views))]
        seen = [view.sync_gradients if isinstance(view, GradientState) else view.process_index for view in again]
        return seen, pickle.loads(pickle.dumps(accelerator.state)).mixed_precision

    for rank, (seen, precision) in enumerate(run_ranks(train)):
        assert (seen, precision) == ([rank, rank, True] * 3, "bf16")


def test_a_state_that_was_pickled_shows_the_process_in_which_it_is_loaded():
    parcel = pickle.dumps(Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_state)
    context.reset()
    assert not pickle.loads(parcel).initialized
    Accelerator(cpu=True, gradient_accumulation_steps=5)
    assert pickle.loads(parcel).num_steps == 5


def test_an_accelerator_is_neither_pickled_nor_copied_and_what_it_prepared_is():
    accelerator = Accelerator(cpu=True)
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="and what it prepares"):
            send(accelerator)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(range(5), batch_size=2)
    prepared = accelerator.prepare(model, optimizer, scheduler, loader)
    for again in (pickle.loads(pickle.dumps(prepared)), copy.deepcopy(prepared)):
        model, optimizer, scheduler, loader = again
        model(torch.ones(1, 1)).sum().backward()
        before = model.weight.item()
        optimizer.step()
        scheduler.step()
        assert model.weight.item() == before - 0.5
        assert scheduler.get_last_lr() == [0.05]
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


@pytest.mark.slow
def test_a_script_runs_with_this_package_in_accelerates_place():
    code = f"""{REPLACE}
import torch
from accelerate import Accelerator, DistributedType
from accelerate.logging import get_logger
from accelerate.state import PartialState
from accelerate.utils import DataLoaderConfiguration, set_seed
from accelerate.utils.dataclasses import GradientAccumulationPlugin
from accelerate.utils.operations import gather
import accelerate.utils.random

assert PartialState._shared_state == {{}}
config = DataLoaderConfiguration(split_batches=False)
config.non_blocking = True
accelerator = Accelerator(cpu=True, dataloader_config=config)
assert accelerator.parallelism_config is None and getattr(accelerator.state, "deepspeed_plugin", None) is None
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1, 1)).sum())
optimizer.step()
print(PartialState._shared_state["distributed_type"] == DistributedType.NO, type(optimizer).__module__)
"""
    run = subprocess.run([sys.executable, "-c", code], timeout=60, check=False, capture_output=True, text=True)
    assert run.stdout.split() == ["True", "nb_accelerate.training.optim.optimizer"], run.stderr

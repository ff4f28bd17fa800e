"""`PartialState`, `AcceleratorState` and `GradientState` show what is there, and hold nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context
from nb_accelerate.training.state import AcceleratorState, GradientState, PartialState, is_initialized


def test_a_partial_state_knows_a_process_that_is_alone():
    state = PartialState(cpu=True)
    assert (state.process_index, state.local_process_index, state.num_processes) == (0, 0, 1)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert state.distributed_type is DistributedType.NO
    assert state.distributed_type not in {DistributedType.MULTI_NPU, DistributedType.MEGATRON_LM, DistributedType.TPU}
    assert state.device == torch.device("cpu")
    assert state.backend is None
    assert state.initialized
    state.set_device()


def test_an_argument_that_is_not_one_is_named():
    with pytest.raises(TypeError, match="argument 'timeot'"):
        PartialState(timeot=3)


def test_states_and_accelerator_agree_on_every_rank(run_ranks):
    def run():
        from nb_accelerate.training.state import AcceleratorState, PartialState

        before = PartialState(cpu=True)
        accelerator = Accelerator()
        names = ("process_index", "local_process_index", "num_processes", "device", "distributed_type", "backend")
        views = (before, AcceleratorState(), accelerator.state)
        shown = {tuple(str(getattr(view, name)) for name in names) for view in views}
        with before.split_between_processes(["a", "b", "c"]) as mine:
            part = list(mine)
        order = []
        with before.main_process_first():
            order.append(before.process_index)
        before.wait_for_everyone()
        return sorted(shown), accelerator.process_index, part, before.on_last_process(lambda: "last")()

    first, second = run_ranks(run)
    assert first[0] == [("0", "0", "2", "cpu", "MULTI_CPU", "gloo")]
    assert second[0] == [("1", "1", "2", "cpu", "MULTI_CPU", "gloo")]
    assert (first[2], second[2]) == (["a", "b"], ["c"])
    assert (first[3], second[3]) == (None, "last")


def test_a_state_made_before_the_accelerator_shows_it_afterwards():
    early = GradientState()
    assert (early.num_steps, early.sync_gradients, early.initialized) == (1, True, False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    assert (early.num_steps, early.initialized) == (4, True)
    accelerator.gradient_accumulation_steps = 2
    assert early.num_steps == GradientState().num_steps == accelerator.gradient_state.num_steps == 2
    assert early.plugin_kwargs == {"num_steps": 2}
    accelerator.sync_gradients = False
    assert not early.sync_gradients


def test_gradient_state_follows_the_loop():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(5.0)), batch_size=1))
    state = GradientState()
    assert (state.in_dataloader, state.remainder, state.dataloader_references) == (False, -1, [None])
    seen = []
    for _ in loader:
        assert state.active_dataloader is loader
        assert state.dataloader_references == [None, loader]
        with accelerator.accumulate():
            seen.append((state.sync_gradients, state.end_of_dataloader))
    assert seen == [(False, False), (True, False), (False, False), (True, False), (True, True)]
    assert not state.in_dataloader


def test_each_accelerator_shows_its_own_state_and_the_bare_states_the_newest():
    first = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    second = Accelerator(cpu=True, mixed_precision="no")
    assert (first.state.mixed_precision, first.gradient_state.num_steps) == ("bf16", 3)
    assert (second.state.mixed_precision, second.gradient_state.num_steps) == ("no", 1)
    assert (AcceleratorState().mixed_precision, GradientState().num_steps) == ("no", 1)


def test_a_second_accelerator_takes_over_what_it_is_not_told():
    Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3, dynamo_backend="eager")
    second = Accelerator()
    assert second.mixed_precision == AcceleratorState().mixed_precision == "bf16"
    assert second.state.dynamo_plugin.backend == AcceleratorState().dynamo_plugin.backend == "EAGER"
    assert second.gradient_accumulation_steps == 1  # each loop has windows of its own, as in accelerate
    assert Accelerator(mixed_precision="no").mixed_precision == Accelerator().mixed_precision == "no"


def test_an_environment_that_was_changed_counts_more_than_an_accelerator_before(monkeypatch):
    Accelerator(cpu=True, mixed_precision="fp16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as a launcher does for what it runs
    assert Accelerator().mixed_precision == "bf16"
    Accelerator(mixed_precision="fp16")
    assert Accelerator().mixed_precision == "fp16"
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    assert Accelerator().mixed_precision == "no"


def test_an_accelerator_takes_over_the_precision_of_a_state():
    AcceleratorState(mixed_precision="bf16", cpu=True)
    assert Accelerator().mixed_precision == "bf16"


def test_a_state_refuses_a_precision_that_the_accelerator_did_not_choose():
    Accelerator(cpu=True, mixed_precision="bf16")
    assert AcceleratorState(mixed_precision="bf16").mixed_precision == "bf16"
    with pytest.raises(ConfigError, match="computes in 'bf16'"):
        AcceleratorState(mixed_precision="fp16")


def test_a_state_can_be_made_without_an_accelerator():
    assert not is_initialized()
    state = AcceleratorState(mixed_precision="bf16", cpu=True)
    assert (state.mixed_precision, state.initialized, is_initialized()) == ("bf16", True, True)
    GradientState._reset_state()
    GradientState(GradientAccumulationPlugin(num_steps=7, sync_with_dataloader=False))
    assert (GradientState().num_steps, GradientState().sync_with_dataloader) == (7, False)


def test_reset_state_forgets_what_it_says():
    Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state()
    assert PartialState(cpu=True).initialized
    assert not is_initialized()
    assert AcceleratorState(cpu=True).mixed_precision == "no"
    AcceleratorState._reset_state(reset_partial_state=True)
    assert context.current() is None
    Accelerator(cpu=True, mixed_precision="bf16")
    PartialState._reset_state()
    assert context.current() is None
    assert not is_initialized()


def test_a_reset_leaves_the_process_group_and_destroying_it_is_asked_for(run_ranks):
    def run():
        state = PartialState(cpu=True)
        PartialState._reset_state()
        kept = dist.is_initialized()
        found_again = PartialState(cpu=True).num_processes
        state.wait_for_everyone()
        state.destroy_process_group()
        return kept, found_again, dist.is_initialized()

    assert run_ranks(run) == [(True, 2, False)] * 2


def test_states_keep_no_model_alive():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    gone = weakref.ref(model)
    del accelerator, model
    gc.collect()
    assert gone() is None
    assert GradientState().num_steps == 1


def test_a_plugin_belongs_into_the_accelerator():
    AcceleratorState(cpu=True, fsdp_plugin=None)
    with pytest.raises(ConfigError, match=r"Accelerator\(fsdp_plugin"):
        AcceleratorState(fsdp_plugin=object())

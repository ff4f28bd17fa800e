"""The steps of accelerate's FSDP2, taken by hand: beside accelerate, and beside plain PyTorch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate import utils as theirs
from accelerate.utils import dataclasses as their_dataclasses
from accelerate.utils.fsdp_utils import get_parameters_from_modules as their_parameters
from fixtures.block_models import Model, Tied
from torch import nn

from nb_accelerate import Accelerator, FullyShardedDataParallelPlugin, utils as ours
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.strategies.sharding import CheckpointedForward, gather_whole
from nb_accelerate.utils import dataclasses
from nb_accelerate.utils.fsdp_utils import get_parameters_from_modules

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks


def test_modules_are_listed_after_their_parts():
    model = Model()
    assert ours.get_module_children_bottom_up(model) == theirs.get_module_children_bottom_up(model)
    named = ours.get_module_children_bottom_up(model, return_fqns=True)
    assert named == theirs.get_module_children_bottom_up(model, return_fqns=True)
    assert named[-1] == ("", model)


def test_names_lose_what_compiling_and_checkpointing_add():
    names = [
        "_orig_mod.a.b",
        "_orig_mod._orig_mod.a",
        "a._checkpoint_wrapped_module.b",
        "a._orig_mod.b",
        "plain.weight",
    ]
    named = {name: number for number, name in enumerate(names)}
    assert ours.fsdp2_canonicalize_names(named) == theirs.fsdp2_canonicalize_names(named)


@pytest.mark.parametrize("chosen", ["blocks\\..*", "blocks", None, "last"])
def test_parameters_are_those_of_modules_whose_whole_name_matches(chosen: str | None):
    model = Model()
    found = get_parameters_from_modules(chosen, model, "cpu")
    assert found == their_parameters(chosen, model, "cpu")
    assert bool(found) == (chosen is not None)
    if chosen is not None:
        assert get_parameters_from_modules([model.first], model, "cpu") == set(model.first.parameters())


@pytest.mark.parametrize("name", ["Block", "Model", "Linear", "Nothing"])
def test_a_class_is_found_by_its_name(name: str):
    model = Model()
    assert dataclasses.get_module_class_from_name(model, name) is their_dataclasses.get_module_class_from_name(
        model, name
    )


def test_tied_weights_are_one_again_after_a_module_was_initialized_anew():
    def renew(module: nn.Module) -> nn.Module:
        for name, old in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(old, device="meta")))
        return module

    for package in (ours, theirs):
        model = Tied()
        model._tied_weights_keys = ["words.weight", "head.weight"]  # which accelerate reads
        init = package.ensure_weights_retied(renew, model, torch.device("meta"))
        for module in model.modules():
            assert init(module) is module
        assert model.head.weight is model.words.weight
        assert model.block.up.weight is not model.block.down.weight
        assert all(parameter.is_meta for parameter in model.parameters())
    assert ours.ensure_weights_retied(renew, Model()) is renew


def test_a_model_that_was_prepared_by_steps_computes_as_plain_pytorch(run_ranks: RunRanks):
    whole, inputs = Model(seed=5), torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    loss = whole(inputs).square().mean()
    loss.backward()
    weights = {name: value.detach() for name, value in whole.state_dict().items()}

    def steps() -> Any:
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        model: Any = Model()
        assert ours.fsdp2_apply_ac(accelerator, model) is model
        assert ours.fsdp2_prepare_model(accelerator, model) is model
        assert all(isinstance(block.forward, CheckpointedForward) for block in model.blocks)
        assert not isinstance(model.first.forward, CheckpointedForward)
        whole_here = weights if accelerator.is_main_process else {}
        assert ours.fsdp2_load_full_state_dict(accelerator, model, whole_here) is model
        loss = model(inputs).square().mean()
        loss.backward()
        return loss.item(), [
            gather_whole(weight.grad, keep=True) for weight in model.parameters() if weight.grad is not None
        ]

    expected = [weight.grad for weight in whole.parameters() if weight.grad is not None]
    for mine, gradients in run_ranks(steps):
        assert mine == loss.item()
        torch.testing.assert_close(gradients, expected)


def test_on_one_process_the_steps_say_what_to_write():
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    for step in (
        ours.fsdp2_prepare_model,
        ours.fsdp2_apply_ac,
        partial(ours.fsdp2_load_full_state_dict, full_sd={}),
    ):
        with pytest.raises(ConfigError, match="train with FSDP"):
            step(accelerator, Model())


def test_the_scaler_is_one_of_this_processs_device():
    Accelerator(cpu=True)
    scaler = ours.get_fsdp2_grad_scaler(init_scale=8.0)
    assert scaler.state_dict()["scale"] == 8.0
    assert scaler._device == "cpu"
    assert ours.get_fsdp2_grad_scaler(device="cuda", enabled=False)._device == "cuda"


def test_the_plugin_takes_classes_from_the_model_and_makes_torchs_policy():
    from torch.distributed.fsdp import CPUOffloadPolicy

    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap", cpu_offload=True)
    plugin.set_auto_wrap_policy(Model())
    assert plugin.transformer_cls_names_to_wrap == ["Block"]
    plugin.set_cpu_offload()
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    plugin.validate_cpu_offload()
    plugin.validate_mixed_precision_policy()

    named = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap="Linear", cpu_offload=False)
    named.set_auto_wrap_policy(Model())
    named.set_cpu_offload()
    assert (named.transformer_cls_names_to_wrap, named.cpu_offload) == (["Linear"], False)

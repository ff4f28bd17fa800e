"""What the parts of a model weigh, which weights are one and the same, and models compiled block by block."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nb_accelerate import Accelerator, utils
from nb_accelerate.errors import ConfigError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_sizes_are_those_of_the_weights_and_tied_ones_count_once():
    sizes = utils.compute_module_sizes(Model())
    assert sizes["embedding"] == 10 * 4 * 4
    assert sizes["blocks.0"] == (4 * 4 + 4) * 4 + 3 * 8
    assert sizes["blocks.0.inner.bias"] == 16
    assert sizes["blocks"] == 2 * sizes["blocks.0"]
    assert sizes[""] == sizes["embedding"] + sizes["blocks"]
    assert utils.compute_module_sizes(Model(), buffers_only=True)[""] == 2 * 3 * 8


def test_sizes_can_be_those_of_another_number_format():
    sizes = utils.compute_module_sizes(Model(), dtype="float16", special_dtypes={"embedding.weight": torch.float64})
    assert sizes["embedding"] == 10 * 4 * 8
    assert sizes["blocks.0"] == (4 * 4 + 4) * 2 + 3 * 8  # whole numbers stay as they are
    assert utils.compute_module_sizes(Model().half(), dtype=torch.float32)["embedding"] == 10 * 4 * 2
    assert utils.compute_module_sizes(Model(), utils.CustomDtype.INT4)["embedding"] == 20
    with pytest.raises(ConfigError, match=r"dtype='float61'.*Write 'float16'"):
        utils.compute_module_sizes(Model(), "float61")


def test_the_largest_layer_is_a_leaf_or_a_block_that_stays_whole():
    model = Model()
    sizes = utils.compute_module_sizes(model)
    assert utils.calculate_maximum_sizes(model) == (sizes[""], (160, ["embedding"]))
    model._no_split_modules = ["ModuleList"]
    assert utils.calculate_maximum_sizes(model) == (sizes[""], (sizes["blocks"], ["blocks"]))
    layers = utils.get_max_layer_size([("blocks", model.blocks)], sizes, ["Block"])
    assert layers == (sizes["blocks.0"], ["blocks.0", "blocks.1"])
    assert utils.get_max_layer_size([], sizes, []) == (0, [])


def test_sizes_are_those_of_accelerate():
    theirs = pytest.importorskip("accelerate.utils")
    model = Model()
    for options in ({}, {"dtype": torch.float16}, {"buffers_only": True}):
        assert utils.compute_module_sizes(model, **options) == theirs.compute_module_sizes(model, **options)
    assert utils.calculate_maximum_sizes(model) == theirs.calculate_maximum_sizes(model)
    assert utils.find_tied_parameters(model) == theirs.find_tied_parameters(model)


def test_tied_weights_are_found_and_tied_again():
    model = Model()
    tied = utils.find_tied_parameters(model)
    assert tied == [["embedding.weight", "head.weight"]]
    weight = nn.Parameter(torch.ones(10, 4))
    model.embedding.weight = nn.Parameter(torch.empty(10, 4, device="meta"))
    model.head.weight = weight
    assert utils.find_tied_parameters(model) == []
    utils.retie_parameters(model, tied)
    assert model.embedding.weight is model.head.weight is weight
    utils.retie_parameters(model.to("meta"), tied)  # nothing to take the numbers from
    assert utils.find_tied_parameters(nn.Linear(1, 1)) == []


def test_ties_across_devices_are_warned_of(caplog):
    tied = [["embedding.weight", "head.weight"]]
    with caplog.at_level(logging.WARNING):
        utils.check_tied_parameters_on_same_device(tied, {"": 0})
        assert not caplog.records
        utils.check_tied_parameters_on_same_device(tied, {"embedding": 0, "head": "cpu"})
    assert "on different devices" in caplog.text
    with pytest.raises(ValueError, match=r"no device for head\.weight"):
        utils.check_tied_parameters_on_same_device(tied, {"embedding": 0})


def test_a_model_of_transformers_says_whether_it_ties():
    transformers = pytest.importorskip("transformers")
    config = {"vocab_size": 8, "n_embd": 4, "n_layer": 1, "n_head": 1}
    for ties in (True, False):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(tie_word_embeddings=ties, **config))
        assert utils.check_tied_parameters_in_config(model) is ties
    assert not utils.check_tied_parameters_in_config(Model())


def test_the_entries_of_some_modules_are_taken_out():
    found = utils.extract_submodules_state_dict(dict.fromkeys(["h.1.w", "h.10.w", "h.1", "out.w"]), ["h.1", "out.w"])
    assert list(found) == ["h.1.w", "h.1", "out.w"]


@pytest.mark.slow
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when it compiles for the first time
def test_blocks_are_compiled_and_the_model_stays_as_it_is():
    model = Model()
    compiled = utils.compile_regions(model, backend="eager")
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(compiled(tokens), model(tokens))
    assert type(compiled) is Model
    assert all(utils.is_compiled_module(block) for block in compiled.blocks)
    assert utils.is_compiled_module(compiled.embedding)
    assert utils.has_compiled_regions(compiled)
    assert not utils.is_compiled_module(compiled)
    assert not utils.has_compiled_regions(model)
    compiled(tokens).sum().backward()
    assert model.blocks[0].inner.weight.grad is not None  # the same weights
    assert utils.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    assert utils.extract_model_from_parallel(compiled) is compiled
    assert Accelerator(cpu=True).unwrap_model(compiled, keep_torch_compile=False) is model
    assert utils.extract_model_from_parallel(utils.compile_regions(nn.DataParallel(model), backend="eager")) is model

    whole = utils.compile_regions(nn.Linear(2, 2), backend="eager")
    assert utils.is_compiled_module(whole)
    assert not utils.has_compiled_regions(whole)
    assert [name for name, _ in whole.named_parameters()] == ["_orig_mod.weight", "_orig_mod.bias"]


@pytest.mark.slow
@pytest.mark.may_leave("files")  # as above
def test_blocks_compiled_in_place_run_hooks_that_were_put_on_them_afterwards():
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    model, tokens = Model(), torch.tensor([[1, 2, 3]])
    expected = model(tokens)
    assert utils.compile_regions_fsdp2(model, backend=backend) is model
    called = []
    for block in model.blocks:
        block.register_forward_hook(lambda part, *_: called.append(part))
    torch.testing.assert_close(model(tokens), expected)
    assert called == list(model.blocks)
    assert len(compiled) == 1  # equal blocks share the code of the first; torch leaves its own layers as they are
    is_compiled = {name for name, part in model.named_modules() if part._compiled_call_impl is not None}
    assert is_compiled == {"embedding", "blocks.0", "blocks.1", "head"}

    whole = utils.compile_regions_deepspeed(Block(), backend=backend)
    assert whole._compiled_call_impl is not None


def test_the_size_of_tensor_parallelism_is_what_transformers_has_noted():
    model = torch.nn.Linear(1, 1)
    assert utils.get_model_tp_size(model) is None
    for config in ({"tp_size": 2}, SimpleNamespace(tp_size=2)):
        model.config = SimpleNamespace(distributed_config=config)
        assert utils.get_model_tp_size(model) == 2
    model.tp_size = 4
    assert utils.get_model_tp_size(model) == 4

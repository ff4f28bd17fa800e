"""Options of quantised models beside accelerate's, and what is said where bitsandbytes is missing.

What needs the library is in tests/with_deepspeed/test_quantised.py.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate.utils as theirs
import pytest
import torch
from accelerate.utils.bnb import get_keys_to_not_convert
from torch import nn

import nb_accelerate.utils as ours
from nb_accelerate.errors import ConfigError, MissingDependencyError
from nb_accelerate.training.bigmodel.quantised import is_within, modules_not_to_quantise
from nb_accelerate.training.checkpoint import quantised

EIGHT, FOUR = {"load_in_8bit": True}, {"load_in_4bit": True}

GIVEN: list[dict[str, Any]] = [
    EIGHT,
    FOUR,
    {**EIGHT, "torch_dtype": "bf16", "llm_int8_threshold": 3},
    {**EIGHT, "torch_dtype": torch.float32, "skip_modules": ["head"]},
    {**FOUR, "bnb_4bit_compute_dtype": "bf16", "bnb_4bit_quant_type": "nf4"},
    {**FOUR, "bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_use_double_quant": True},
    {**FOUR, "torch_dtype": "fp32", "keep_in_fp32_modules": ["wo"]},
]


@pytest.mark.parametrize("given", GIVEN)
def test_options_have_accelerates_values(given: dict[str, Any]) -> None:
    made, reference = ours.BnbQuantizationConfig(**given), theirs.BnbQuantizationConfig(**given)
    assert dataclasses.asdict(made) == dataclasses.asdict(reference)
    assert [field.name for field in dataclasses.fields(made)] == [field.name for field in dataclasses.fields(reference)]
    assert getattr(made.target_dtype, "value", made.target_dtype) == getattr(
        reference.target_dtype, "value", reference.target_dtype
    )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {**EIGHT, **FOUR},
        {"load_in_8bit": 1},
        {"load_in_4bit": "yes"},
        {**EIGHT, "llm_int8_threshold": "6"},
        {**FOUR, "bnb_4bit_quant_type": "int4"},
        {**FOUR, "bnb_4bit_quant_type": 4},
        {**FOUR, "bnb_4bit_use_double_quant": None},
        {**FOUR, "bnb_4bit_compute_dtype": "fp8"},
        {**FOUR, "bnb_4bit_compute_dtype": 16},
        {**FOUR, "torch_dtype": "float16"},
        {**EIGHT, "torch_dtype": 16},
        {**EIGHT, "skip_modules": "head"},
        {**EIGHT, "keep_in_fp32_modules": ("head",)},
    ],
)
def test_what_accelerate_refuses_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ours.BnbQuantizationConfig(**given)
    with pytest.raises(ValueError, match=r"must|can't"):
        theirs.BnbQuantizationConfig(**given)


def test_a_threshold_for_4_bits_is_warned_of() -> None:
    for library in (ours, theirs):
        with pytest.warns(UserWarning, match="llm_int8_threshold"):
            library.BnbQuantizationConfig(load_in_4bit=True, llm_int8_threshold=5.0)
    with warnings.catch_warnings(action="error"):
        ours.BnbQuantizationConfig(load_in_8bit=True, llm_int8_threshold=5.0)


def llama(kind: str, *, tied: bool) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 20}
    config = transformers.LlamaConfig(num_hidden_layers=1, tie_word_embeddings=tied, **sizes)
    return getattr(transformers, kind).from_config(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=20)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    "make",  # not above, where each worker of pytest-xdist would import transformers
    [
        lambda: llama("AutoModelForCausalLM", tied=False),
        lambda: llama("AutoModelForCausalLM", tied=True),
        lambda: llama("AutoModel", tied=False),
        gpt2,
        lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
    ],
    ids=["with a head", "tied", "without a head", "GPT-2", "plain"],
)
def test_the_same_modules_stay_as_they_are_by_default_as_in_accelerate(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert modules_not_to_quantise(model) == sorted(set(get_keys_to_not_convert(model)))


def test_modules_are_named_whole_or_by_parts() -> None:
    name = "model.layers.1.mlp.down_proj"
    assert all(is_within(name, [part]) for part in ("down_proj", "mlp", "layers.1", "model", name))
    assert not any(is_within(name, [part]) for part in ("down", "layers.10", "ayers.1", "proj", "model.mlp", ""))


def test_without_the_library_one_sentence_names_the_extra_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantised, "is_installed", lambda _module: False)
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(MissingDependencyError, match=r"nb-accelerate\[bitsandbytes\].*pip install bitsandbytes$"):
        ours.load_and_quantize_model(model, ours.BnbQuantizationConfig(load_in_8bit=True), Path("nowhere"))
    assert type(model) is nn.Linear


def test_layers_in_4_bits_are_known_by_their_class() -> None:
    foreign = type("Linear4bit", (nn.Linear,), {"__module__": "somewhere.nn"})
    library = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    adapted = type("Adapted", (library,), {})
    assert not ours.has_4bit_bnb_layers(nn.Sequential(nn.Linear(2, 2), foreign(2, 2)))
    assert ours.has_4bit_bnb_layers(nn.Sequential(nn.Sequential(library(2, 2))))
    assert ours.has_4bit_bnb_layers(nn.Sequential(adapted(2, 2)))

"""Models with weights in 8 and 4 bits, computed on the CPU, beside layers of bitsandbytes that are put in by hand."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import bitsandbytes.nn
import pytest
import torch
from accelerate.utils import bnb as theirs
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from nb_accelerate import init_empty_weights
from nb_accelerate.errors import CheckpointError, ConfigError, MissingDependencyError
from nb_accelerate.training.checkpoint import quantised
from nb_accelerate.utils import BnbQuantizationConfig, has_4bit_bnb_layers, load_and_quantize_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

TOKENS = torch.arange(12).reshape(2, 6)

BITS: dict[str, dict[str, Any]] = {
    "8 bits": {"load_in_8bit": True, "torch_dtype": "fp32"},
    "8 bits, a low threshold": {"load_in_8bit": True, "llm_int8_threshold": 0.5, "torch_dtype": "bf16"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"},
    "nf4 twice": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bf16",
    },
}
ALL = pytest.mark.parametrize("bits", BITS.values(), ids=list(BITS))


@pytest.fixture(autouse=True)
def _as_on_any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU with AVX-512 BF16, a 4-bit layer packs its weight at the first forward, and its state_dict rounds scales.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 96}
    config = LlamaConfig(num_hidden_layers=2, tie_word_embeddings=tied, attention_bias=True, **sizes)
    return LlamaForCausalLM(config).eval()  # type: ignore[no-any-return]


def empty(*, tied: bool = False) -> LlamaForCausalLM:
    with init_empty_weights():
        return llama(tied=tied)


def saved(folder: Path, model: LlamaForCausalLM | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_torch_state_dict((model or llama()).state_dict(), folder, max_shard_size="100KB")
    return folder


def by_hand(config: BnbQuantizationConfig) -> LlamaForCausalLM:
    """The same model, made with nothing but bitsandbytes and torch."""
    model = llama()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(config.torch_dtype)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            given = module.in_features, module.out_features, module.bias is not None
            if config.load_in_8bit:
                layer = bitsandbytes.nn.Linear8bitLt(
                    *given, has_fp16_weights=False, threshold=config.llm_int8_threshold
                )
            else:
                layer = bitsandbytes.nn.Linear4bit(
                    *given,
                    compute_dtype=config.bnb_4bit_compute_dtype,
                    compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                )
            layer.weight.data = module.weight.data
            if module.bias is not None:
                layer.bias.data = module.bias.data
            model.model.set_submodule(name, layer.to("cpu").eval())
    return model


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(TOKENS).logits  # type: ignore[no-any-return]


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


@ALL
def test_outputs_are_those_of_layers_put_in_by_hand(bits: Mapping[str, Any], tmp_path: Path) -> None:
    config = BnbQuantizationConfig(**bits)
    expected = by_hand(config)
    from_files = load_and_quantize_model(empty(), config, weights_location=saved(tmp_path))
    of_a_loaded_model = load_and_quantize_model(llama(), config)
    for model in (from_files, of_a_loaded_model):
        assert {name: (t.dtype, t.shape) for name, t in model.state_dict().items()} == {
            name: (t.dtype, t.shape) for name, t in expected.state_dict().items()
        }
        assert torch.equal(logits(model), logits(expected))
        assert not any(
            layer.requires_grad for layer in model.model.layers.parameters() if not layer.is_floating_point()
        )
        assert model.is_loaded_in_8bit is config.load_in_8bit
        assert has_4bit_bnb_layers(model) is model.is_loaded_in_4bit is config.load_in_4bit
        assert model.hf_device_map == {"": torch.device("cpu")}
    assert not torch.equal(logits(expected), logits(llama()))
    lost = (logits(expected).float() - logits(llama())).norm() / logits(llama()).norm()
    assert lost < (0.02 if config.load_in_8bit else 0.25)


@pytest.mark.parametrize("bits", [BITS["8 bits"], BITS["nf4 twice"]], ids=["8 bits", "nf4 twice"])
def test_quantised_weights_are_saved_and_loaded_as_they_are(bits: Mapping[str, Any], tmp_path: Path) -> None:
    config = BnbQuantizationConfig(**bits)
    model = load_and_quantize_model(llama(), config)
    save_file(tensors(model), tmp_path / "model.safetensors")
    torch.save(tensors(model), tmp_path / "model.bin")
    for file in ("model.safetensors", "model.bin"):
        loaded = load_and_quantize_model(empty(), config, weights_location=tmp_path / file)
        assert torch.equal(logits(loaded), logits(model))
        assert tensors(loaded).keys() == tensors(model).keys()
        assert all(torch.equal(tensors(loaded)[name], tensor) for name, tensor in tensors(model).items())
    copied = copy.deepcopy(loaded)
    assert torch.equal(logits(copied), logits(model))


@pytest.mark.parametrize(("first", "second"), [("8 bits", "fp4"), ("fp4", "8 bits")])
def test_weights_in_another_number_of_bits_are_refused(first: str, second: str, tmp_path: Path) -> None:
    save_file(
        tensors(load_and_quantize_model(llama(), BnbQuantizationConfig(**BITS[first]))), tmp_path / "w.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has numbers of torch\.u?int8, without scales"):
        load_and_quantize_model(empty(), BnbQuantizationConfig(**BITS[second]), tmp_path / "w.safetensors")


@pytest.mark.parametrize("skipped", [None, ["down_proj", "layers.1", "lm_head"], []])
def test_the_same_layers_are_quantised_as_by_accelerate(skipped: list[str] | None) -> None:
    ours, reference = llama(), llama()
    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=skipped, keep_in_fp32_modules=["k_proj"])
    load_and_quantize_model(ours, config)
    skipped = theirs.get_keys_to_not_convert(reference) if skipped is None else skipped
    theirs.replace_with_bnb_layers(reference, config, [*skipped, "k_proj"])
    assert [type(module) for module in ours.modules()] == [type(module) for module in reference.modules()]
    dtypes = {name: weight.dtype for name, weight in ours.named_parameters()}
    assert dtypes["model.layers.0.self_attn.k_proj.weight"] is torch.float32
    assert dtypes["model.layers.0.self_attn.q_proj.weight"] is torch.int8
    assert dtypes["model.layers.0.self_attn.q_proj.bias"] is torch.float16
    assert dtypes["model.norm.weight"] is torch.float16
    assert config.skip_modules == (None if skipped and "down_proj" not in skipped else skipped)


def test_tied_weights_stay_tied_and_one_name_in_the_file_is_enough(tmp_path: Path) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32")
    model = load_and_quantize_model(empty(tied=True), config, saved(tmp_path, llama(tied=True)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, llama(tied=True).lm_head.weight)
    untied = load_and_quantize_model(
        empty(tied=True),
        BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32", skip_modules=[]),
        tmp_path,
    )
    assert type(untied.lm_head).__name__ == "Linear4bit"
    assert torch.allclose(logits(untied), logits(model), atol=0.1)


def test_adapters_train_on_quantised_weights() -> None:
    for bits in BITS.values():
        model = load_and_quantize_model(llama(), BnbQuantizationConfig(**{**bits, "torch_dtype": "fp32"}))
        head = nn.Linear(96, 1)
        embedded = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
        head(model(inputs_embeds=embedded).logits).mean().backward()
        assert embedded.grad is not None
        assert embedded.grad.abs().sum() > 0
        assert model.model.layers[0].self_attn.q_proj.weight.grad is None


def test_modules_of_a_map_on_the_disk_are_not_quantised(tmp_path: Path) -> None:
    config = BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
    parts = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    devices = {**parts, "model.rotary_emb": "cpu", "lm_head": "cpu"}
    weights = saved(tmp_path / "weights")
    model = load_and_quantize_model(empty(), config, weights, devices, offload_folder=tmp_path / "offloaded")
    kinds = [type(layer.mlp.up_proj).__name__ for layer in model.model.layers]
    assert kinds == ["Linear8bitLt", "Linear"]
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, llama().model.layers[1].mlp.up_proj.weight)
    assert logits(model).shape == (2, 6, 96)


def test_maps_are_made_for_the_bits(tmp_path: Path) -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="fp32")
    model = load_and_quantize_model(empty(), config, saved(tmp_path), "auto", max_memory={"cpu": "1GB"})
    assert set(model.hf_device_map.values()) == {"cpu"}
    with pytest.raises(ConfigError, match="off the GPUs"):
        load_and_quantize_model(empty(), config, tmp_path, "auto", max_memory={"cpu": "60KB", "disk": "1GB"})
    with pytest.raises(ConfigError, match=r"device_map='best'.*Write one of"):
        load_and_quantize_model(empty(), config, tmp_path, "best")


def test_what_cannot_be_is_refused_before_anything_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BnbQuantizationConfig(load_in_8bit=True)
    model = empty()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(CheckpointError, match="Give weights_location"):
        load_and_quantize_model(model, config)
    with pytest.raises(CheckpointError, match="there is neither"):
        load_and_quantize_model(model, config, tmp_path)
    saved(tmp_path)
    with pytest.raises(ConfigError, match=r"device for lm_head\.weight"):
        load_and_quantize_model(model, config, tmp_path, {"model": "cpu"})
    for device in ("meta", "disk"):
        with pytest.raises(ConfigError, match=f"does not quantise weights on '{device}', but on cpu, cuda"):
            load_and_quantize_model(model, config, tmp_path, {"": device})
    monkeypatch.setattr(quantised, "installed_version", lambda _: "0.45.5")
    with pytest.raises(MissingDependencyError, match=r"bitsandbytes 0\.47\.0 or newer, but 0\.45\.5"):
        load_and_quantize_model(model, config, tmp_path)
    assert [type(module) for module in model.modules()] == kinds


def test_a_weight_that_no_file_has_is_named(tmp_path: Path) -> None:
    weights = tensors(llama())
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no weight model\.layers\.1\.mlp\.up_proj\.weight"):
        load_and_quantize_model(empty(), BnbQuantizationConfig(load_in_8bit=True), tmp_path)

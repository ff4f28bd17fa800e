"""`nb-accelerate estimate-memory`, against what training really takes."""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from fixtures.page_code import code_of
from torch._subclasses.fake_tensor import FakeTensorMode

from nb_accelerate.cli import main
from nb_accelerate.training.bigmodel.estimate import count_activations, estimate_memory, make_model
from nb_accelerate.training.bigmodel.inference import estimate_fit, kv_cache, quantise_shapes


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GPT2Config

    folder = tmp_path_factory.mktemp("gpt")
    small = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    GPT2Config(architectures=["GPT2LMHeadModel"], **small).save_pretrained(folder)
    return folder


def real_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize(("precision", "dtype"), [("no", torch.float32), ("bf16 weights", torch.bfloat16)])
def test_it_counts_what_a_real_step_has_in_memory(gpt: Path, precision: str, dtype: torch.dtype):
    with FakeTensorMode(allow_non_fake_inputs=True):
        estimate = estimate_memory(make_model(str(gpt), dtype), precision)
    model = make_model(str(gpt), dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(2, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters()]
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert estimate.weights == real_bytes([*model.parameters(), *model.buffers()])
    assert estimate.gradients == real_bytes(gradients)
    assert estimate.adam == real_bytes(moments)
    assert estimate.training == estimate.weights + estimate.gradients + estimate.adam
    assert estimate.distributed == estimate.training + estimate.gradients


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_activations_are_those_that_a_real_forward_pass_keeps(gpt: Path, dtype: torch.dtype | None):
    def count(model: torch.nn.Module) -> int:
        ids = torch.zeros(2, 8, dtype=torch.long)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return count_activations(model, {"input_ids": ids, "labels": ids})

    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = count(make_model(str(gpt)))
    real = count(make_model(str(gpt)))
    assert fake == pytest.approx(real, rel=0.02)
    one_layer = 2 * 8 * 32 * 4  # rows, tokens, features, bytes: a transformer keeps many of these
    assert fake > 10 * one_layer


def test_the_table_has_a_row_for_each_precision(gpt: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["estimate-memory", str(gpt), "--batch-size", "2", "--sequence_length", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    largest = "49.6 KiB" if int(version("transformers").split(".")[0]) >= 5 else "50.1 KiB"  # before, with a mask
    assert lines[0].startswith(f"GPT2LMHeadModel: 30,720 parameters; the largest layer is transformer.h.0, {largest}")
    assert lines[1] == "activations of 2 x 16 tokens"
    assert [line.split("  ")[0] for line in lines[3:]] == ["no", "fp16", "bf16", "bf16 weights"]
    assert len({len(line) for line in lines[2:]}) == 1


def test_a_class_of_ones_own_needs_no_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    text = "import torch\ndef make():\n    return torch.nn.Linear(1 << 20, 1 << 20)\n"
    (tmp_path / "my_model_of_four_terabytes.py").write_text(text)
    assert main(["estimate-memory", "my_model_of_four_terabytes:make", "--precisions", "no"]) == 0
    assert "4,096.00 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torch.nn:Nothing"], "cannot be imported"),
        (["torch.nn:Linear"], "cannot be called without arguments"),
        (["torch.nn:Identity", "--batch_size", "1"], "takes no input_ids"),
        (["torch.nn:Identity", "--batch_size", "1", "--inference"], "--batch-size counts without --inference"),
        (["torch.nn:Identity", "--cpu-memory", "1GB"], "--cpu-memory counts with --inference"),
        (["torch.nn:Identity", "--inference", "--gpu-memory", "a lot"], "'a lot' is not a size"),
    ],
)
def test_what_cannot_be_estimated_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["estimate-memory", *arguments]) == 2
    assert words in capsys.readouterr().err


MACHINE = ["--gpu-memory", "180KiB,180KiB", "--cpu-memory", "200KiB", "--disk", "1MB"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with 8 layers of 64 KiB in float16, embeddings and a head of 16 KiB each."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama")
    small = {"hidden_size": 64, "intermediate_size": 106, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = LlamaConfig(architectures=["LlamaForCausalLM"], vocab_size=128, num_key_value_heads=2, **small)
    config.save_pretrained(folder)
    return folder


LINEAR = [(64, 64), (64, 64), (32, 64), (32, 64), (106, 64), (106, 64), (64, 106)]
"""Outputs and inputs of the linear layers in one of the layers of `llama`."""

A_LAYER = 2 * (sum(rows * columns for rows, columns in LINEAR) + 2 * 64)
BESIDE = 2 * (2 * 128 * 64 + 64) + 2 * 8 * 4
"""Bytes of embeddings, head, norm; and of the frequencies of positions, twice, in float32."""


def test_what_fits_where_is_told_for_another_machine(llama: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["estimate-memory", str(llama), "--inference", *MACHINE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "LlamaForCausalLM: 278,592 parameters",
        f"KV cache: {2 * 8 * 2 * 16 * 2 * 1000 / 1024:.1f} KiB for 1,000 tokens of a sequence, in float16",
        "files: 544.1 KiB in 16 bits, within the 976.6 KiB of disk that are free",
    ]
    table = [re.split(r" {2,}", line) for line in lines[3:8]]
    assert table[0] == ["precision", "weights", "GPU 0", "GPU 1", "cpu memory", "disk", "largest visitor"]
    assert table[1] == ["", "of 180.0 KiB", "of 180.0 KiB", "of 200.0 KiB", "of 976.6 KiB"]
    bits8 = 8 * (sum(rows * columns + 4 * rows for rows, columns in LINEAR) + 2 * 2 * 64) + BESIDE
    bits4 = 8 * (sum(rows * columns * (1 / 2 + 4 / 64) for rows, columns in LINEAR) + 2 * 2 * 64) + BESIDE
    weights = {"float16": 8 * A_LAYER + BESIDE, "8 bits": bits8, "4 bits": bits4}
    assert {row[0]: row[1] for row in table[2:]} == {name: f"{taken / 1024:.1f} KiB" for name, taken in weights.items()}
    cells = table[2]
    assert sum(int(cell.split()[0]) for cell in cells if "layers" in cell) == 8
    assert cells[-1] == f"{A_LAYER / 1024:.1f} KiB"
    assert lines[8].startswith("float16: For each token GPU 0 is sent ")
    assert lines[8].endswith(f"{cells[4].split(', ')[1]} from memory and {cells[5].split(', ')[1]} from disk.")
    left = f"{(360 * 1024 - bits8) / 1024:.1f} KiB left for activations and the KV cache."
    assert lines[9] == f"8 bits: All of it is on GPU 0 and GPU 1, with {left}"
    left = f"{(180 * 1024 - bits4) / 1024:.1f} KiB left for activations and the KV cache."
    assert lines[10:] == [f"4 bits: GPU 0 is enough for all of it, with {left}"]


def test_layers_are_where_an_inferred_map_has_them(llama: Path):
    from nb_accelerate import infer_auto_device_map
    from nb_accelerate.training.bigmodel.device_memory import get_balanced_memory

    limits: dict[int | str, int] = {0: 180 << 10, 1: 180 << 10, "cpu": 200 << 10}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = make_model(str(llama), torch.float16)
        fit = estimate_fit(model, "float16", limits)
        whole = ["LlamaDecoderLayer"]
        device_map = infer_auto_device_map(model, get_balanced_memory(model, dict(limits), whole), whole)
    names = {0: "GPU 0", 1: "GPU 1", "cpu": "cpu memory", "disk": "disk"}
    layers = [names[device] for name, device in device_map.items() if ".layers." in name]
    assert fit.layers == {place: layers.count(place) for place in dict.fromkeys(layers)}
    assert fit.visitor == A_LAYER


def test_what_does_not_fit_the_gpus_in_eight_bits_stays_in_float16(llama: Path):
    with FakeTensorMode(allow_non_fake_inputs=True):
        fit = estimate_fit(make_model(str(llama), torch.float16), "8 bits", {0: 200 << 10, "cpu": 1 << 20})
    assert fit.layers["cpu memory"] > 0
    beside = fit.unquantised - fit.layers["cpu memory"] * A_LAYER
    assert 2 * 128 * 64 <= beside <= 2 * 128 * 64 + 200  # the head and the last norm
    assert f"would stay in float16, {fit.unquantised / 1024:.1f} KiB" in fit.sentence


@pytest.mark.parametrize(("bits", "of_weights", "of_scales"), [(8, 96 * 128, 4 * 96), (4, 96 * 64, 4 * 96 * 128 / 64)])
def test_linear_layers_have_the_bytes_that_bitsandbytes_gives_them(bits: int, of_weights: int, of_scales: int):
    # bitsandbytes 0.50.2 on a CPU: Linear8bitLt with its SCB has 12,672 bytes, Linear4bit with its absmax 6,912.
    model = torch.nn.Sequential(torch.nn.Linear(128, 96, bias=False), torch.nn.LayerNorm(96))
    quantise_shapes(model, bits)
    assert real_bytes([*model[0].parameters(), *model[0].buffers()]) == of_weights + of_scales
    assert of_weights + of_scales == {8: 12_672, 4: 6_912}[bits]
    assert model[1].weight.dtype == torch.float32


def test_the_cache_is_that_which_a_model_fills(llama: Path):
    model = make_model(str(llama), torch.float16)
    cache = model(input_ids=torch.zeros(1, 7, dtype=torch.long), use_cache=True).past_key_values
    filled = real_bytes([tensor for layer in cache.layers for tensor in (layer.keys, layer.values)])
    assert kv_cache(model.config) == filled / 7
    assert kv_cache(torch.nn.Linear(1, 1)) is None


def test_without_options_it_is_this_machine(llama: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["estimate-memory", str(llama), "--inference"]) == 0
    out = capsys.readouterr().out
    assert "8 layers, 544.2 KiB" in out
    assert "float16: The CPU computes all of it." in out
    assert main(["estimate-memory", str(llama), "--inference", "--cpu-memory", "300KiB"]) == 0
    assert re.search(r"float16: The CPU computes all of it, of which it reads 3\d\d\.\d KiB", capsys.readouterr().out)


@pytest.mark.slow
def test_the_tables_of_the_page_for_kaggle_are_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = (Path(__file__).parents[2] / "notebooks" / "how_to" / "kaggle_large_models.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    for name, text in code_of(page).files.items():
        Path(name).write_text(text, encoding="utf-8")
    shown = re.findall(r"^```console\n\$ nb-accelerate (.*)\n```\n\n```text\n([^`]*)```$", page, re.MULTILINE)
    assert len(shown) == 3
    for command, printed in shown:
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == printed

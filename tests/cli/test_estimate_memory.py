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


def test_temporaries_of_backward_count():
    with FakeTensorMode(allow_non_fake_inputs=True):
        layers = [torch.nn.Linear(64, 1024, bias=False), torch.nn.ReLU(), torch.nn.Linear(1024, 64, bias=False)]
        hidden = 128 * 1024 * 4
        peak = count_activations(torch.nn.Sequential(*layers), {"input": torch.zeros(128, 64)})
    # At the backward of ReLU: its output, which was kept, and the gradients of its output and of its input.
    assert 3 * hidden <= peak < 3.2 * hidden


def test_dropout_of_attention_keeps_no_scores_as_on_gpus(gpt: Path):
    ids, found = torch.zeros(2, 8, dtype=torch.long), []
    for dropout in (0.1, 0.0):
        model = make_model(str(gpt))
        for block in model.transformer.h:  # type: ignore[union-attr]
            block.attn.attn_dropout.p = dropout  # type: ignore[union-attr]
        found.append(count_activations(model, {"input_ids": ids}))
    assert found[0] == found[1]


@pytest.mark.contract("commands: estimate-memory")
def test_the_table_has_a_row_for_each_precision(gpt: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["estimate-memory", str(gpt), "--batch-size", "2", "--sequence_length", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    largest = "50.8 kB" if int(version("transformers").split(".")[0]) >= 5 else "51.3 kB"  # before, with a mask
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
    assert "4.4 TB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["torch.nn:Nothing"], "cannot be imported"),
        (["torch.nn:Linear"], "called without arguments"),
        (["torch.nn:Identity", "--batch_size", "1"], "takes no input_ids"),
        (["torch.nn:Identity", "--batch_size", "1", "--inference"], "--batch-size counts without --inference"),
        (["torch.nn:Identity", "--cpu-memory", "1GB"], "--cpu-memory counts with --inference"),
        (["torch.nn:Identity", "--inference", "--gpu-memory", "a lot"], "'a lot' is not a size"),
    ],
)
def test_what_cannot_be_estimated_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["estimate-memory", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_weights_by_dtype_are_where_an_inferred_map_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from transformers import LlamaConfig

    # 8 layers of 65 kB in float16, embeddings and a head of 16 kB each
    small = {"hidden_size": 64, "intermediate_size": 106, "num_hidden_layers": 8, "num_attention_heads": 4}
    config = LlamaConfig(architectures=["LlamaForCausalLM"], vocab_size=128, num_key_value_heads=2, **small)
    config.save_pretrained(tmp_path)
    sizes = ["--gpu-memory", "250kB,250kB", "--cpu-memory", "200kB"]
    assert main(["estimate-memory", str(tmp_path), "--inference", *sizes]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "LlamaForCausalLM: 278,592 parameters"
    titles, *rows = (re.split(r" {2,}", line) for line in lines)
    assert titles == ["dtype", "weights", "GPU 0", "GPU 1", "cpu", "disk"]
    assert [row[:2] for row in rows] == [["float16", "557.2 kB"], ["int8", "278.6 kB"], ["int4", "139.3 kB"]]
    placed = [sum(float(cell.split()[0]) for cell in row[2:] if cell != "-") for row in rows]
    assert placed == pytest.approx([557.2, 278.6, 139.3], abs=0.3)
    assert [row[4:] for row in rows][1:] == [["-", "-"], ["-", "-"]]  # on the GPUs
    assert rows[0][4] != "-"
    assert main(["estimate-memory", str(tmp_path), "--inference"]) == 0
    of_this_machine = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["float16", "557.2", "kB", "557.2", "kB", "-"] in of_this_machine


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

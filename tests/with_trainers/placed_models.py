"""Models of transformers that a device map places, and adapters of peft: ``python placed_models.py FOLDER``.

For each case there is a folder then, with a file of the numbers that it computed, or of the traceback that ended it.
"""

# ruff: noqa: E402 - torchvision is hidden before transformers looks for it

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

sys.modules["torchvision"] = None  # type: ignore[assignment]  # PyPI's fails beside a torch without CUDA

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = torch.tensor([[1, 5, 3, 8], [2, 2, 7, 4]])
ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


def save_model(folder: Path) -> Path:
    """Save a small model, in several files."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, pad_token_id=0, eos_token_id=15))
    model.save_pretrained(folder / "model", max_shard_size="4KB")
    return folder / "model"


def load(path: Path, **options: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


@torch.no_grad()
def seen(model: Any) -> list[Any]:
    """The numbers of a model: logits, and the tokens that it generates."""
    model.eval()
    generated = model.generate(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=5)
    return [model(input_ids=TOKENS).logits.tolist(), generated.tolist()]


def weights_in(folder: Path) -> dict[str, Any]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.tolist() for file in files for name, tensor in load_file(file).items()}


def add_adapter(model: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    losses = []
    for _ in range(4):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_a_device(folder: Path) -> Any:
    """All of a model on one device, by two kinds of maps."""
    path = save_model(folder)
    plain = seen(load(path))
    for device_map in ("cpu", {"": "cpu"}):
        model = load(path, device_map=device_map)
        assert seen(model) == plain
        assert not any(parameter.is_meta for parameter in model.parameters())
        model.save_pretrained(folder / "again")
        assert weights_in(folder / "again") == weights_in(path)
    return plain


def adapter(folder: Path) -> Any:
    """An adapter that is trained, saved, loaded and merged; on a plain model and on one that a map has placed."""
    path = save_model(folder)
    found = []
    for options in ({}, {"device_map": "cpu"}):
        model = add_adapter(load(path, **options))
        losses = train(model)
        trained = seen(model)
        model.save_pretrained(folder / "adapter")
        again = PeftModel.from_pretrained(load(path, **options), folder / "adapter")
        assert seen(again) == trained
        merged = again.merge_and_unload()
        logits, tokens = seen(merged)
        torch.testing.assert_close(torch.tensor(logits), torch.tensor(trained[0]))
        merged.save_pretrained(folder / "merged")
        assert seen(load(folder / "merged", **options)) == [logits, tokens]
        found.append([losses, trained, logits])
    assert found[0] == found[1]
    return found[0]


def on_the_disk(folder: Path) -> Any:
    """A part of a model stays in files."""
    path = save_model(folder)
    plain = seen(load(path))
    model = load(path, device_map=ON_DISK, offload_folder=folder / "offloaded")
    assert seen(model) == plain
    assert model.hf_device_map == ON_DISK
    model.save_pretrained(folder / "again")
    assert weights_in(folder / "again") == weights_in(path)
    return plain


def chosen_by_memory(folder: Path) -> Any:
    """A map that transformers asks for, with little memory."""
    path = save_model(folder)
    plain = seen(load(path))
    model = load(path, device_map="auto", max_memory={"cpu": "6KB"}, offload_folder=folder / "offloaded")
    assert "disk" in model.hf_device_map.values()
    assert seen(model) == plain
    return plain


def adapter_on_the_disk(folder: Path) -> Any:
    """An adapter that is loaded into a model of which a part stays in files."""
    path = save_model(folder)
    model = add_adapter(load(path))
    train(model)
    trained = seen(model)
    model.save_pretrained(folder / "adapter")
    base = load(path, device_map=ON_DISK, offload_folder=folder / "offloaded")
    again = PeftModel.from_pretrained(base, folder / "adapter", offload_folder=folder / "offloaded_adapter")
    assert seen(again) == trained
    return trained


CASES = (on_a_device, adapter, on_the_disk, chosen_by_memory, adapter_on_the_disk)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        folder = Path(sys.argv[1], case.__name__)
        folder.mkdir(parents=True)
        try:
            found = case(folder)
        except Exception:
            found = traceback.format_exc()
        (folder / "found.json").write_text(json.dumps(found))

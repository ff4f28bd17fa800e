"""Models that are placed on two devices, in host memory and on the disk, beside the plain model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from fixtures.ranks import RunRanks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simgpu"), pytest.mark.limit(180)]

BESIDE = {"embedding": 0, "head": 0, "norm": 0, "scale": 0, "table": 0}

MAPS: list[dict[str, Any]] = [
    {**BESIDE, "layers": "cpu"},
    {**BESIDE, "layers": "disk"},
    {"embedding": 0, "head": 0, "layers.0": 0, "layers.1": "cpu", "layers.2": "disk", "layers.3": "simgpu:1", "norm": 1,
     "scale": 1, "table": 1},
    {"": "disk", "layers.0": 0},
    {"": 1, "layers.3": "cpu"},
    {"embedding": "cpu", "head": "cpu", "layers": 0, "norm": 1, "scale": "cpu", "table": "cpu"},
]  # fmt: skip


def _placed(device_map: dict[str, Any], folder: Path) -> Any:
    from fixtures.placed_models import Placed

    import nb_accelerate

    return nb_accelerate.dispatch_model(Placed(), device_map, offload_dir=folder)


def _checks(device_map: dict[str, Any], folder: Path) -> list[bool]:
    import copy
    import pickle
    import threading

    import torch
    from fixtures.placed_models import Placed, tokens

    from nb_accelerate.hooks import remove_hook_from_submodules

    model, plain = _placed(device_map, folder), Placed()
    want = plain(tokens())

    def is_right(each: Any) -> bool:
        with torch.inference_mode():
            out = each(tokens())
        return out.device.type == "cpu" and torch.equal(out, want)

    right = [is_right(model) for _ in range(3)]
    weights = model.state_dict()
    right += [torch.equal(weights[name].cpu(), tensor) for name, tensor in plain.state_dict().items()]
    right += [is_right(copy.deepcopy(model)), is_right(pickle.loads(pickle.dumps(model)))]
    threads = [threading.Thread(target=lambda: right.append(is_right(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    model.order = plain.order = [2, 0, 0]
    want = plain(tokens())
    right += [is_right(model), is_right(model)]
    try:
        model.layers[1](torch.ones(1, 3))
    except RuntimeError:
        right.append(is_right(model))
    remove_hook_from_submodules(model)
    return [*right, is_right(model.to("cpu"))]


@pytest.mark.parametrize("device_map", MAPS)
def test_outputs_are_those_of_the_plain_model_bit_for_bit(
    run_ranks: RunRanks, tmp_path: Path, device_map: dict[str, Any]
) -> None:
    (right,) = run_ranks(_checks, device_map, tmp_path, world_size=1, deadline=150)
    assert len(right) >= 18
    assert all(right), right


def _write_buffers(folder: Path) -> list[int]:
    import torch
    from fixtures.placed_models import Placed, tokens
    from torch import nn

    import nb_accelerate

    model = nb_accelerate.disk_offload(Placed().train(), folder, "simgpu", offload_buffers=True)
    with torch.no_grad():
        model(tokens())
        with nb_accelerate.utils.align_module_device(model.norm):
            model.norm.weight.add_(1)
    with torch.inference_mode():
        model(tokens())
    nb_accelerate.hooks.remove_hook_from_submodules(model)
    assert isinstance(model.norm, nn.BatchNorm1d)
    return [int(model.norm.num_batches_tracked), int(model.norm.weight[0])]


def test_what_a_visiting_block_writes_to_its_buffers_and_weights_is_kept(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(_write_buffers, tmp_path, world_size=1) == [[2, 2]]


def _quantised() -> str:
    import torch
    from torch import nn

    import nb_accelerate

    layer = nn.Linear(4, 4)
    layer.weight = type("Params4bit", (nn.Parameter,), {})(torch.ones(4, 4))
    try:
        nb_accelerate.cpu_offload(layer, "simgpu")
    except ValueError as error:
        return str(error)
    return ""


def test_weights_that_bitsandbytes_has_quantised_do_not_visit(run_ranks: RunRanks) -> None:
    (message,) = run_ranks(_quantised, world_size=1)
    assert message.startswith("weight of a Linear is quantised by bitsandbytes, and its scales cannot visit simgpu:0.")


def _where(device_map: dict[str, Any], folder: Path) -> dict[str, str]:
    from fixtures.placed_models import tokens

    model = _placed(device_map, folder)
    model(tokens())
    return {name: str(tensor.device) for name, tensor in model.state_dict().items()}


def test_what_visits_rests_in_host_memory_and_all_else_is_where_the_map_has_it(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    (where,) = run_ranks(_where, MAPS[2], tmp_path, world_size=1, deadline=150)
    assert {where[name] for name in where if name.startswith(("layers.1", "layers.2"))} == {"cpu"}
    assert {where[name] for name in where if name.startswith(("layers.3", "norm", "scale"))} == {"simgpu:1"}
    assert where["embedding.weight"] == where["head.weight"] == "simgpu:0"


def _train(folder: Path, first_resident: int) -> tuple[str, bool]:
    """Train an adapter of the last layer, the first layers of the model being staged."""
    import torch
    from fixtures.placed_models import LoRA, Placed, tokens

    places = {f"layers.{at}": 0 if at >= first_resident else "disk" for at in range(4)}
    model, plain = _placed({**BESIDE, **places}, folder), Placed()
    for each in (model, plain):
        each.requires_grad_(False)
        torch.manual_seed(1)
        each.layers[2].up = LoRA(each.layers[2].up)
    if first_resident < 3:
        model.layers[2].to("simgpu:0")
    grads = []
    for each in (model, plain):
        try:
            each(tokens()).square().mean().backward()
        except RuntimeError as error:
            return str(error), False
        grads.append([each.layers[2].up.a.weight.grad.cpu(), each.layers[2].up.b.weight.grad.cpu()])
    return "", all(torch.allclose(ours, theirs) and ours.abs().sum() > 0 for ours, theirs in zip(*grads, strict=True))


def test_adapters_of_layers_that_stay_train_and_those_of_layers_that_visit_are_refused(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks(_train, tmp_path / "a", 2, world_size=1, deadline=150) == [("", True)]
    ((message, _),) = run_ranks(_train, tmp_path / "b", 4, world_size=1, deadline=150)
    assert message.startswith("backward comes to a Layer, whose weights are on simgpu:0 only while it computes.")
    assert "cpu_offload=True" in message


def _in_turn() -> list[Any]:
    import torch
    from fixtures.placed_models import Layer

    import nb_accelerate

    def device(model: torch.nn.Module) -> str:
        return str(next(model.parameters()).device)

    first, first_hook = nb_accelerate.cpu_offload_with_hook(Layer(4), "simgpu:1")
    second, second_hook = nb_accelerate.cpu_offload_with_hook(Layer(4), "simgpu:1", prev_module_hook=first_hook)
    seen = [device(first)]
    hidden = first(torch.ones(1, 4))
    seen += [device(first), device(second)]
    out = second(second(hidden))
    seen += [device(first), device(second), str(out.device)]
    second_hook.offload()
    seen.append(device(second))
    second_hook.remove()
    return [*seen, second(torch.ones(1, 4)).device.type]


def test_models_that_compute_in_turn_go_back_when_the_next_begins(run_ranks: RunRanks) -> None:
    (seen,) = run_ranks(_in_turn, world_size=1, deadline=150)
    assert seen == ["cpu", "simgpu:1", "cpu", "cpu", "simgpu:1", "simgpu:1", "cpu", "cpu"]


def _offloaded(folder: Path) -> list[bool]:
    import torch
    from fixtures.placed_models import Placed, tokens

    import nb_accelerate

    want = Placed()(tokens())
    right = []
    for offload_buffers in (False, True):
        for model in (
            nb_accelerate.cpu_offload(Placed().to("simgpu"), offload_buffers=offload_buffers),
            nb_accelerate.disk_offload(Placed(), folder, "simgpu:1", offload_buffers=offload_buffers),
        ):
            right += [torch.equal(model(tokens()), want), model.layers[0].up.weight.device.type == "cpu"]
            resting = "cpu" if offload_buffers else "simgpu"
            right.append(model.norm.running_mean.device.type == resting and model.table.device.type == "simgpu")
    return right


def test_whole_models_rest_in_host_memory_and_on_the_disk(run_ranks: RunRanks, tmp_path: Path) -> None:
    (right,) = run_ranks(_offloaded, tmp_path, world_size=1, deadline=150)
    assert right == [True] * 12


PLACES: dict[str, list[dict[str, Any]]] = {
    "T5": [
        {"shared": 0, "encoder": "cpu", "decoder": 0, "lm_head": 0},
        {"shared": 0, "encoder": "disk", "decoder": 0, "lm_head": 0},
        {"shared": "cpu", "encoder": "cpu", "decoder": 1, "lm_head": "cpu"},
        {"shared": 0, "encoder": 1, "decoder": 0, "lm_head": 0},
    ],
    "Llava": [
        {"model.vision_tower": tower, "model.multi_modal_projector": 0, "model.language_model": language,
         "lm_head": language} for tower, language in ((1, 0), ("disk", 0), (0, "cpu"))
    ],
}  # fmt: skip


def _generate(folder: Path) -> list[tuple[str, bool]]:
    import torch
    import transformers

    import nb_accelerate

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **small)
    vision = transformers.CLIPVisionConfig(image_size=8, patch_size=4, **small)
    llava = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=63, vision_feature_layer=-1
    )
    t5 = transformers.T5Config(
        d_model=16, num_heads=2, vocab_size=32, d_ff=16, d_kv=8, num_layers=1, decoder_start_token_id=0
    )
    prompts: dict[str, dict[str, Any]] = {
        "T5": {"input_ids": torch.tensor([[3, 4, 5]])},
        "Llava": {
            "input_ids": torch.tensor([[1, 63, 63, 63, 63, 5]]),
            "attention_mask": torch.ones(1, 6, dtype=torch.long),
            "pixel_values": torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8),
        },
    }
    found = []
    for name, config in (("T5", t5), ("Llava", llava)):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        want = model.generate(**prompts[name], max_new_tokens=5, do_sample=False)
        for device_map in PLACES[name]:
            nb_accelerate.dispatch_model(model, device_map, offload_dir=folder)
            for device in ("cpu", "simgpu:0"):
                inputs = {key: value.to(device) for key, value in prompts[name].items()}
                got = model.generate(**inputs, max_new_tokens=5, do_sample=False)
                found.append((f"{name} {device_map} {device}", torch.equal(got.cpu(), want)))
    return found


def test_parts_that_generate_calls_get_their_inputs_where_they_are(run_ranks: RunRanks, tmp_path: Path) -> None:
    (found,) = run_ranks(_generate, tmp_path, world_size=1, deadline=150)
    assert [case for case, is_right in found if not is_right] == []
    assert len(found) == 14

"""Code that names devices: models on several of them, and what is asked of ``torch.cuda``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from training.rehearsal.rehearsing import rehearsed

from nb_accelerate import Accelerator, dispatch_model, infer_auto_device_map, rehearse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH, ROWS = 512, 8
LAYER = 4 * WIDTH * WIDTH  # bytes of its weights
ACTIVATION = 4 * WIDTH * ROWS


class Chain(nn.Module):
    """Layers without biases, of which a backward needs the inputs."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.devices = devices
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))
        for layer, device in zip(self.layers, devices, strict=False):
            layer.to(device)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            rows = layer(rows.to(self.devices[number]) if self.devices else rows).sigmoid()
        return rows.mean()


def train(model: nn.Module, accelerator: Accelerator) -> None:
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(3):
        loss = model(torch.randn(ROWS, WIDTH))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def by_map(first: int) -> None:
    """Put so many layers on device 0, and the others on device 1."""
    device_map = {f"layers.{number}": int(number >= first) for number in range(6)}
    train(dispatch_model(Chain(), device_map), Accelerator())


def by_limits(first: int) -> None:
    model = Chain()
    limits = {0: first * LAYER + 1000, 1: (6 - first) * LAYER + 1000}
    device_map = infer_auto_device_map(model, max_memory=limits, no_split_module_classes=["Linear"])
    train(dispatch_model(model, device_map), Accelerator())


def by_hand(first: int) -> None:
    train(Chain(*(f"cuda:{int(number >= first)}" for number in range(6))), Accelerator(device_placement=False))


@pytest.mark.parametrize(("first", "device", "layers"), [(4, 0, 4), (1, 1, 5)])
@pytest.mark.parametrize("place", [by_map, by_limits, by_hand])
def test_each_device_holds_what_is_placed_on_it(
    place: Callable[[int], None], first: int, device: int, layers: int, tmp_path: Path
):
    found = rehearsed(place, first, folder=tmp_path, world_size=1, ranks=(0,))
    assert found.ok, found
    (trace,) = found.traces
    assert re.fullmatch(rf" .* {device}, .*fullest of 2", trace.fullest)
    most = trace.memory[0]._make(map(max, zip(*trace.memory, strict=True)))
    assert (most.weights, most.gradients, most.optimizer) == (layers * LAYER,) * 3
    # Inputs and outputs of the layers there: an output of a sigmoid is the input of the next.
    assert most.activations == pytest.approx((layers + 1) * ACTIVATION, abs=4 * 512)  # and a few scalars


def on_its_own(map_of: Callable[[Accelerator], dict[str, Any]]) -> None:
    accelerator = Accelerator()
    train(dispatch_model(Chain(), map_of(accelerator)), accelerator)


def test_a_model_on_the_ranks_own_device_is_on_one(tmp_path: Path):
    found = rehearsed(
        on_its_own, lambda accelerator: {"": accelerator.local_process_index}, folder=tmp_path, world_size=2
    )
    assert found.ok, found
    assert [trace.fullest for trace in found.traces] == ["", ""]
    assert max(held.weights for held in found.traces[1].memory) == 6 * LAYER


def written_for_gpus(folder: Path) -> None:
    """What scripts for GPUs write, boilerplate and all."""
    accelerator = Accelerator(device_placement=False)
    torch.cuda.set_device(accelerator.local_process_index)
    device = torch.device("cuda", accelerator.local_process_index)
    torch.save(Chain().state_dict(), folder / "first.pt")
    model = Chain().to(accelerator.local_process_index)
    model.load_state_dict(torch.load(folder / "first.pt", map_location=device))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    free, total = torch.cuda.mem_get_info()
    for _ in range(4 if free <= total == 10**10 else 0):
        rows = torch.randn(ROWS, WIDTH).cuda(non_blocking=True) + torch.zeros(1, device="cuda")
        loss = model(rows.to(device, torch.float32, copy=True))
        assert loss.device == accelerator.device
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    assert torch.cuda.get_device_properties(device).total_memory == total
    raise SystemExit(0)


def test_code_that_names_cuda_is_rehearsed(tmp_path: Path):
    found = rehearse(written_for_gpus, (tmp_path,), num_processes=2, memory=10**10)
    assert found.ok, found
    assert [trace.rates[0] for trace in found.traces] == [[0.1] * 4] * 2
    assert [trace.fullest for trace in found.traces] == ["", ""]
    notes = [finding.text for finding in found.findings if finding.kind == "note"]
    assert [text.split()[0] for text in notes] == ["torch.cuda.mem_get_info", "torch.cuda.get_device_properties"]


def with_an_own_loss() -> None:
    plain = nn.functional.cross_entropy
    nn.functional.cross_entropy = lambda *args, **kwargs: 3 * plain(*args, label_smoothing=0.1, **kwargs)
    model = Accelerator().prepare(nn.Linear(2, 4))
    loss = nn.functional.cross_entropy(model(torch.ones(1, 2)) * 0, torch.tensor([1]))
    raise SystemExit(f"{loss.item():.3f}")


def test_a_function_of_torch_that_users_have_replaced_is_called_once(tmp_path: Path):
    found = rehearsed(with_an_own_loss, folder=tmp_path, world_size=2)
    expected = 3 * torch.log(torch.tensor(4.0)).item()
    assert [trace.failure for trace in found.traces] == [f"SystemExit: {expected:.3f}"] * 2

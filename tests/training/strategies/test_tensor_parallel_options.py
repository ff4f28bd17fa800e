"""Tensor parallelism together with mixed precision, compilation and each way to save: the numbers of one process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nb_accelerate.base.config.parallelism import ParallelismConfig, TorchTensorParallelConfig
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context

PLAN = {"0": "colwise", "2": "rowwise"}
ROWS = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def make(kind: Any = torch.optim.SGD) -> tuple[nn.Module, Any]:
    """A model of which some layers are cut and one, the last, is whole on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.LayerNorm(16))
    return model, kind(model.parameters(), lr=0.1)


def tensor_parallel(**options: Any) -> Accelerator:
    context.reset()
    handler = TorchTensorParallelConfig(plan=PLAN)
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler), **options)


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int = 4) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (model(ROWS) - 1).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_alone(dtype: torch.dtype | None = None, steps: int = 4) -> tuple[nn.Module, list[float]]:
    model, optimizer = make()
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            outputs = model(ROWS)
        loss = (outputs.float() - 1).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_as_one_process_does_in_it(run_ranks, precision):
    def run() -> Any:
        accelerator = tensor_parallel(mixed_precision=precision)
        model, optimizer = accelerator.prepare(*make())
        losses = train(accelerator, model, optimizer)
        if precision == "bf16":
            return losses, None, None
        accelerator.backward((model(ROWS) - 1).square().mean())
        if accelerator.process_index == 1:  # one part of a gradient is too large, on one rank
            model[0].weight.grad.to_local()[0, 0] = torch.inf
        own = [getattr(one, "to_local", lambda one=one: one)() for one in model.parameters()]
        before = [one.clone() for one in own]
        optimizer.step()
        return losses, optimizer.step_was_skipped, all(map(torch.equal, before, own))

    _, expected = train_alone({"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    for losses, is_skipped, stays in run_ranks(run):
        assert losses == pytest.approx(expected, abs={"bf16": 5e-3, "fp16": 1e-3}[precision])
        if precision == "fp16":
            assert is_skipped
            assert stays


@pytest.mark.slow
def test_save_model_and_a_save_in_the_background_write_whole_weights(run_ranks, tmp_path: Path):
    def run() -> Any:
        accelerator = tensor_parallel()
        model, optimizer = accelerator.prepare(*make(torch.optim.AdamW))
        train(accelerator, model, optimizer, 2)
        accelerator.load_state(accelerator.save_state(tmp_path / "at once"))
        saved = accelerator.save_state(tmp_path / "later", async_save=True)
        first = train(accelerator, model, optimizer, 2)  # while it is written
        saved.wait()
        accelerator.wait_for_everyone()
        accelerator.load_state(tmp_path / "later")
        again = train(accelerator, model, optimizer, 2)
        model, optimizer = accelerator.prepare(*make())
        losses = train(accelerator, model, optimizer)
        accelerator.save_model(model, tmp_path / "model")
        accelerator.wait_for_everyone()
        return first, again, losses

    reference, expected = train_alone()
    for first, again, losses in run_ranks(run):
        assert first == again
        assert losses == pytest.approx(expected, abs=1e-5)
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert written.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(written[name], value, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.may_leave("files")  # of torch.compile
@pytest.mark.parametrize("when", ["by prepare", "before"])
def test_a_compiled_model_learns_the_same(run_ranks, when):
    def run() -> Any:
        accelerator = tensor_parallel(**({"dynamo_backend": "aot_eager"} if when == "by prepare" else {}))
        model, optimizer = make()
        if when == "before":
            model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
        model, optimizer = accelerator.prepare(model, optimizer)
        return train(accelerator, model, optimizer), list(accelerator.get_state_dict(model))  # on rank 0

    reference, expected = train_alone()
    results = run_ranks(run, deadline=100)
    for losses, _ in results:
        assert losses == pytest.approx(expected, abs=1e-5)
    assert results[0][1] == list(reference.state_dict())

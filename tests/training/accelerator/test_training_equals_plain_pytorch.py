"""Numbers first: what comes out is what a loop written by hand in plain PyTorch would give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 50
ROWS = 8  # of all ranks together, in one step


def make_data(rows: int = STEPS * ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def train_by_hand(
    *, accumulate: int = 1, max_norm: float | None = None, dtype: torch.dtype | None = None
) -> tuple[list[float], list[torch.Tensor], list[float]]:
    """The same training without us: one process, whole batches, no wrapper."""
    model, data = make_model(), make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
    losses, norms = [], []
    optimizer.zero_grad()
    for step in range(STEPS):
        inputs, targets = data[step * ROWS : (step + 1) * ROWS]
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            outputs = model(inputs)
        loss = nn.functional.mse_loss(outputs.float(), targets)
        losses.append(loss.item())
        (loss / accumulate).backward()
        if (step + 1) % accumulate == 0 or step + 1 == STEPS:
            if max_norm is not None:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, [weight.detach().clone() for weight in model.parameters()], norms


def train_with_us(
    *,
    batch_size: int,
    accumulate: int = 1,
    max_norm: float | None = None,
    split_batches: bool = False,
    mixed_precision: str | None = None,
) -> tuple[list[float], list[torch.Tensor], list[float]]:
    from nb_accelerate.training.accelerator import Accelerator

    accelerator = Accelerator(
        gradient_accumulation_steps=accumulate,
        split_batches=split_batches,
        mixed_precision=mixed_precision,
        scheduler_steps_per_process=False,
        cpu=True,
    )
    model = make_model()
    if accelerator.process_index:  # ranks start from rank 0's weights, whatever they had
        for weight in model.parameters():
            nn.init.zeros_(weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
    loader = DataLoader(make_data(), batch_size=batch_size)
    scheduler, loader, model, optimizer = accelerator.prepare(scheduler, loader, model, optimizer)
    losses, norms = [], []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            if max_norm is not None and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, [weight.detach().cpu() for weight in accelerator.unwrap_model(model).parameters()], norms


def assert_equal_runs(ours: Any, by_hand: Any, tolerance: float) -> None:
    for mine, expected in zip(ours, by_hand, strict=True):
        assert len(mine) == len(expected)
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=tolerance)


CASES = [
    pytest.param({}, id="plain"),
    pytest.param({"accumulate": 4}, id="accumulation whose last window is short"),
    pytest.param({"max_norm": 0.5}, id="clipping"),
    pytest.param({"accumulate": 5, "max_norm": 0.1}, id="accumulation and clipping"),
]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_process_on_the_same_global_batches(run_ranks, case, world_size):
    by_hand = train_by_hand(**case)
    for ours in run_ranks(train_with_us, batch_size=ROWS // world_size, world_size=world_size, **case):
        assert_equal_runs(ours, by_hand, tolerance=1e-6)


def test_split_batches_train_as_one_process_on_the_same_global_batches(run_ranks):
    for ours in run_ranks(train_with_us, batch_size=ROWS, split_batches=True):
        assert_equal_runs(ours, train_by_hand(), tolerance=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_one_process_trains_bit_for_bit_as_plain_pytorch(case):
    assert_equal_runs(train_with_us(batch_size=ROWS, **case), train_by_hand(**case), tolerance=0)


def test_bf16_in_one_process_is_bit_for_bit_autocast_by_hand():
    ours = train_with_us(batch_size=ROWS, mixed_precision="bf16")
    assert_equal_runs(ours, train_by_hand(dtype=torch.bfloat16), tolerance=0)


@pytest.mark.contract("training: bf16")
def test_bf16_on_two_ranks_stays_within_five_thousandths_of_one_process(run_ranks):
    # bfloat16 rounds to 3 decimal digits, and half a batch rounds differently from a whole one.
    losses, weights, _ = train_by_hand(dtype=torch.bfloat16)
    for mine, my_weights, _ in run_ranks(train_with_us, batch_size=ROWS // 2, mixed_precision="bf16"):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(losses), rtol=0, atol=5e-3)
        for one, other in zip(my_weights, weights, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=5e-3)


def test_shuffled_training_on_ranks_sees_the_rows_that_one_process_would(run_ranks):
    def rows_seen() -> list[int]:
        from nb_accelerate.training.accelerator import Accelerator

        accelerator = Accelerator(cpu=True)
        torch.manual_seed(7 + accelerator.process_index)  # ranks have random numbers of their own
        loader = accelerator.prepare(DataLoader(range(40), batch_size=2, shuffle=True))
        return [row for _ in range(3) for batch in loader for row in accelerator.gather(batch).tolist()]

    torch.manual_seed(7)
    plain = DataLoader(range(40), batch_size=4, shuffle=True)
    expected = [row for _ in range(3) for batch in plain for row in batch.tolist()]
    assert run_ranks(rows_seen) == [expected, expected]


def test_a_model_copied_after_prepare_computes_with_its_own_weights():
    from nb_accelerate.training.accelerator import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare_model(make_model())
    twin = copy.deepcopy(model)
    for weight in twin.parameters():
        nn.init.zeros_(weight)
    inputs = torch.ones(2, 6, device=accelerator.device)
    assert twin(inputs).abs().sum() == 0
    assert model(inputs).abs().sum() > 0

"""Shards that are kept on the host while a device computes: nothing of them can be exchanged from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("simgpu")]


def _train(offload: bool, precision: str) -> tuple[list[float], list[bool], float]:
    """Train with gradients that become infinite in the second step, on one rank only."""
    import torch

    from nb_accelerate import Accelerator, FullyShardedDataParallelPlugin
    from nb_accelerate.utils import GradScalerKwargs

    accelerator = Accelerator(
        mixed_precision=precision,
        fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=offload),
        kwargs_handlers=[GradScalerKwargs(init_scale=256.0)],
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    losses, skipped = [], []
    for step in range(4):
        inputs = torch.full((2, 4), 1.0 + accelerator.process_index, device=accelerator.device)
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        if step == 1 and precision == "fp16" and accelerator.process_index:
            next(model.parameters()).grad.to_local().fill_(float("inf"))  # type: ignore[union-attr]
        norm = accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        skipped.append(optimizer.step_was_skipped)
    assert norm is not None
    return losses, skipped, float(norm)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_offloaded_shards_train_like_those_on_the_device(run_ranks: RunRanks, precision: str) -> None:
    offloaded, kept = (run_ranks(_train, offload, precision) for offload in (True, False))
    assert [skipped for _, skipped, _ in offloaded] == [[False, precision == "fp16", False, False]] * 2
    for (losses, skipped, norm), (losses_kept, skipped_kept, norm_kept) in zip(offloaded, kept, strict=True):
        assert losses == pytest.approx(losses_kept, rel=1e-3)
        assert skipped == skipped_kept
        assert norm == pytest.approx(norm_kept, rel=1e-3)

"""Prepared optimizers and schedulers can be made by hand, with accelerate's arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nb_accelerate import Accelerator
from nb_accelerate.errors import ConfigError, NotPreparedError
from nb_accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from nb_accelerate.scheduler import AcceleratedScheduler


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def test_an_optimizer_made_by_hand_follows_the_windows_of_the_accelerator():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, plain = pair()
    optimizer = AcceleratedOptimizer(plain)
    weights = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1)).sum())
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [1.0, 0.5, 0.5, 0.0]


def test_before_any_accelerator_wrappers_cannot_know_the_window():
    _, plain = pair()
    with pytest.raises(NotPreparedError, match=r"AcceleratedOptimizer.*Write accel"):
        AcceleratedOptimizer(plain)


def test_a_scaler_of_the_users_is_asked_to_step_and_updated():
    Accelerator(cpu=True)
    model, plain = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, backoff_factor=0.5)
    optimizer = AcceleratedOptimizer(plain, scaler=scaler)
    assert optimizer.scaler is scaler
    scaler.scale(model(torch.ones(1)).sum()).backward()
    optimizer.accelerated_step.unscale()  # as clipping does
    assert model.weight.grad == 1.0
    optimizer.step()
    assert model.weight.item() == 0.5
    assert not optimizer.step_was_skipped
    optimizer.zero_grad()

    scaler.scale(model(torch.full((1,), float("inf"))).sum()).backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert (model.weight.item(), scaler.get_scale()) == (0.5, 2.0)
    optimizer.zero_grad()

    scaler.scale(model(torch.ones(1)).sum()).backward()
    optimizer.accelerated_step.unscale()
    optimizer.zero_grad()  # gradients that were unscaled and dropped leave nothing behind
    scaler.scale(model(torch.ones(1)).sum()).backward()
    optimizer.step()
    assert model.weight.item() == 0.0
    with pytest.raises(ConfigError, match="was given a closure"):
        optimizer.step(lambda: 0.0)


def test_the_state_of_an_optimizer_is_placed_only_when_asked():
    Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    plain = torch.optim.Adam(model.parameters())
    model(torch.ones(1)).sum().backward()
    plain.step()
    first = plain.state[model.weight]["exp_avg"]
    AcceleratedOptimizer(plain, device_placement=False)
    assert plain.state[model.weight]["exp_avg"] is first
    AcceleratedOptimizer(plain, True)
    assert torch.equal(plain.state[model.weight]["exp_avg"], first)


def test_a_patched_step_notes_that_it_ran():
    accelerator = Accelerator(cpu=True)
    model, plain = pair()
    optimizer = accelerator.prepare_optimizer(plain)
    optimizer._accelerate_step_called = False
    plain.step = patch_optimizer_step(optimizer, plain.step)
    model(torch.ones(1)).sum().backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))  # what makes the scaler ready
    scaler.step(plain)
    assert optimizer._accelerate_step_called
    assert model.weight.item() == 0.5


def test_a_scheduler_made_by_hand_advances_once_per_process_unless_batches_are_split(run_ranks):
    def rates():
        accelerator = Accelerator(cpu=True)
        found = []
        for split in (False, True):
            model, plain = pair()
            optimizer = AcceleratedOptimizer(plain)
            scheduler = AcceleratedScheduler(
                torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5), optimizer, True, split
            )
            assert scheduler.split_batches is split
            with accelerator.accumulate():
                model(torch.ones(1)).sum().backward()
                optimizer.step()
                scheduler.step()
            found.append(scheduler.get_last_lr())
        return found

    assert run_ranks(rates) == [[[0.125], [0.25]]] * 2


def test_options_can_be_read_back():
    from nb_accelerate import AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs

    ddp = DistributedDataParallelKwargs(bucket_cap_mb=3)
    scaler = GradScalerKwargs(init_scale=8.0)
    accelerator = Accelerator(
        device_placement=False,
        split_batches=True,
        mixed_precision="fp16",
        cpu=True,
        rng_types=["torch"],
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[ddp, scaler],
    )
    assert not accelerator.device_placement
    assert not accelerator.step_scheduler_with_optimizer
    assert accelerator.split_batches is accelerator.dataloader_config.split_batches is True
    assert accelerator.rng_types == ["torch"]
    assert (accelerator.ddp_handler, accelerator.scaler_handler) == (ddp, scaler)
    assert (accelerator.autocast_handler, accelerator.init_handler) == (AutocastKwargs(), InitProcessGroupKwargs())
    assert accelerator.native_amp
    accelerator.native_amp = False  # under `if torch.backends.mps.is_available()`, in published scripts
    assert accelerator.native_amp
    assert accelerator.scaler.get_scale() == 8.0
    other = Accelerator(mixed_precision="no")
    assert not other.native_amp
    assert other.scaler is None

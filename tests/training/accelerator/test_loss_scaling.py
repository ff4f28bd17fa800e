"""fp16: the account of gradients equals that of a plain loop with torch's scaler."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from training.accelerator.loss_scaling import compare

from nb_accelerate.base.config.kwargs import GradScalerKwargs
from nb_accelerate.errors import NotPreparedError
from nb_accelerate.training.accelerator import Accelerator


@pytest.mark.slow
def test_random_programs_are_bit_equal_to_a_plain_scaler_loop():
    for seed in range(20):
        compare(seed)


@pytest.mark.slow
@pytest.mark.limit(300)
def test_hundreds_of_random_programs_are_bit_equal_to_a_plain_scaler_loop():
    for seed in range(20, 320):
        compare(seed)


def fp16(scale: float = 1024.0, **options):
    return Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=scale, **options)]
    )


def one(accelerator):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))


def spread(model, factor=1.0):
    return model(torch.tensor([[1.0, 2.0]], device=next(model.parameters()).device)).sum() * factor


@pytest.mark.parametrize("drop", ["optimizer.zero_grad()", "model.zero_grad()", "model.weight.grad = None"])
def test_gradients_that_are_clipped_and_then_dropped_leave_nothing_behind(drop):
    accelerator = fp16(256.0)
    model, optimizer = one(accelerator)
    accelerator.backward(spread(model))
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    exec(drop)
    accelerator.backward(spread(model))
    assert accelerator.clip_grad_norm_(model.parameters(), 100.0).item() == pytest.approx(5**0.5)
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 0.0]]


@pytest.mark.contract("training: fp16")
def test_gradients_may_be_unscaled_after_each_batch_of_a_window(run_ranks):
    def train(unscales):
        accelerator = Accelerator(
            cpu=True,
            mixed_precision="fp16",
            gradient_accumulation_steps=3,
            kwargs_handlers=[GradScalerKwargs(init_scale=64.0, growth_interval=2)],
        )
        model, optimizer = one(accelerator)
        norms = []
        for number in range(9):
            with accelerator.accumulate(model):
                overflow = float("inf") if number == 4 else 1.0
                accelerator.backward(spread(model, overflow * (1 + accelerator.process_index + number)))
                if unscales:
                    accelerator.unscale_gradients()
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1e6).item())
                optimizer.step()
                optimizer.zero_grad()
        return accelerator.unwrap_model(model).weight.tolist(), norms, accelerator.scaler.state_dict()

    for once, each in [(train(False), train(True)), *zip(run_ranks(train, False), run_ranks(train, True), strict=True)]:
        assert repr(each) == repr(once)  # bit-equal, and NaN where the other has it


def test_an_error_between_clipping_and_the_step_does_not_hold_the_scale():
    accelerator = fp16(1024.0, growth_interval=1)
    model, optimizer = one(accelerator)
    other, other_optimizer = one(accelerator)
    accelerator.backward(spread(model))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)  # and then an error, and nobody drops anything
    for factor in (1.0, 1.0, float("inf"), 1.0):
        accelerator.backward(spread(other, factor))
        other_optimizer.step()
        other_optimizer.zero_grad()
    assert accelerator.scaler.get_scale() == 1024.0 * 2 * 2 / 2 * 2
    optimizer.step()
    assert model.weight.grad.norm().item() == pytest.approx(1.0)


def test_scaled_gradients_that_wait_for_their_step_go_along_with_the_scale():
    accelerator = fp16(1024.0, growth_interval=1)
    model, optimizer = one(accelerator)
    other, other_optimizer = one(accelerator)
    accelerator.backward(spread(model))
    for _ in range(2):
        accelerator.backward(spread(other))
        other_optimizer.step()
        other_optimizer.zero_grad()
    accelerator.backward(spread(model))
    optimizer.step()
    assert model.weight.grad.tolist() == [[2.0, 4.0]]


def test_free_memory_frees_the_memory_of_optimizers():
    accelerator = fp16()
    for _ in range(2):
        model, optimizer = one(accelerator)
        frozen = accelerator.prepare(nn.Linear(2, 1))  # with gradients that nobody uses
        accelerator.backward(spread(model) + spread(frozen))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        gone = [weakref.ref(thing) for thing in (optimizer.optimizer, model.weight, frozen.weight)]
        model, optimizer, frozen = accelerator.free_memory(model, optimizer, frozen)
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3


def test_the_saved_scale_is_that_of_the_next_step(tmp_path):
    accelerator = fp16(1024.0, growth_interval=2)
    model, optimizer = one(accelerator)
    for factor in (1.0, 1.0, float("inf"), 1.0):
        accelerator.backward(spread(model, factor))
        optimizer.step()
        optimizer.zero_grad()
    before = vars(accelerator.scaler)["_scale"].item()
    accelerator.save_state(tmp_path / "state")
    accelerator.backward(spread(model, float("inf")))
    optimizer.step()
    optimizer.zero_grad()
    accelerator.load_state(tmp_path / "state")
    state = accelerator.scaler.state_dict()
    assert (before, state["scale"], state["_growth_tracker"]) == (1024.0, 1024.0, 1)
    accelerator.backward(spread(model))
    optimizer.step()
    assert accelerator.scaler.get_scale() == 2048.0


def test_a_loss_that_was_not_scaled_is_noticed_at_the_step():
    accelerator = fp16()
    model, optimizer = one(accelerator)
    spread(model).backward()
    with pytest.raises(NotPreparedError, match=r"accelerator.backward\(loss\) instead of loss.backward\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(spread(model))
    optimizer.step()
    optimizer.zero_grad()
    spread(model).backward()
    with pytest.raises(NotPreparedError, match="not called since"):
        optimizer.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_a_prepared_optimizer_is_copied_without_what_an_accelerator_lends_it(copied):
    accelerator = fp16()
    model, optimizer = one(accelerator)
    accelerator.backward(spread(model))
    optimizer.step()
    again = copied(optimizer)
    assert again.param_groups[0]["lr"] == 0.5
    assert again.scaler is None
    (weight,) = again.param_groups[0]["params"]
    again = accelerator.prepare(again)
    accelerator.backward((weight * torch.tensor([[1.0, 2.0]], device=weight.device)).sum())
    again.step()
    assert weight.grad.tolist() == [[1.0, 2.0]]


def test_a_loss_may_be_scaled_by_hand():
    accelerator = fp16()
    model, optimizer = one(accelerator)
    accelerator.scaler.scale(spread(model)).backward()
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 0.0]]


def test_scaling_may_be_switched_off():
    accelerator = fp16(enabled=False)
    model, optimizer = one(accelerator)
    spread(model).backward()
    accelerator.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 0.0]]
    assert accelerator.scaler.state_dict() == {}


@pytest.mark.parametrize("drop", ["zero_grad", "in_place"])
def test_two_optimizers_of_one_model_divide_its_gradients_once(drop):
    accelerator = fp16(8.0, growth_interval=1)
    model, optimizer = one(accelerator)
    # As when the cell that makes an optimizer is run again, and a scheduler still refers to the first one.
    again = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    other, other_optimizer = one(accelerator)
    for _ in range(3):
        accelerator.backward(spread(model))
        accelerator.backward(spread(other))
        other_optimizer.step()  # the scale grows while gradients of the model wait
        other_optimizer.zero_grad()
        assert accelerator.clip_grad_norm_(model.parameters(), 1e6).item() == pytest.approx(5**0.5)
        accelerator.backward(spread(model))  # added to gradients that are unscaled
        again.step()
        accelerator.scaler.get_scale()  # it grows, and the gradients are unscaled already
        optimizer.step()
        assert model.weight.grad.tolist() == [[2.0, 4.0]]
        again.zero_grad(set_to_none=drop == "zero_grad")
    assert model.weight.tolist() == [[1 - 3.0, 1 - 6.0]]


def test_two_optimizers_of_one_model_both_skip_a_step_with_infinite_gradients():
    accelerator = fp16(1024.0)
    model, optimizer = one(accelerator)
    again = accelerator.prepare(torch.optim.SGD([model.weight, nn.Parameter(torch.ones_like(model.weight))], lr=0.5))
    accelerator.backward(spread(model, float("inf")))
    optimizer.step()
    again.step()
    assert (optimizer.step_was_skipped, again.step_was_skipped) == (True, True)
    assert model.weight.tolist() == [[1.0, 1.0]]
    model.zero_grad()
    accelerator.backward(spread(model))
    again.step()
    assert model.weight.grad.tolist() == [[1.0, 2.0]]
    assert accelerator.scaler.get_scale() == 512.0


def test_an_optimizer_that_is_kept_keeps_no_other_that_was_prepared_with_it():
    accelerator = fp16()
    model, optimizer = one(accelerator)
    _, other = one(accelerator)
    gone = [weakref.ref(thing) for thing in (optimizer.optimizer, model.weight, accelerator)]
    del model, optimizer, accelerator
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    assert other.param_groups

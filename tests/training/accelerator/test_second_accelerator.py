"""A cell that makes an `Accelerator` runs twice, and an evaluation makes one of its own: what was prepared goes on."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nb_accelerate.base.config.kwargs import GradScalerKwargs
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context
from nb_accelerate.training.state import GradientState

ROWS, BATCH, STEPS = 20, 2, 2
FP16 = {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=1024.0, growth_interval=3)]}


def data() -> torch.utils.data.TensorDataset:
    inputs = torch.linspace(-1, 1, ROWS * 3).reshape(ROWS, 3).sin()
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


def plain(ranks: int, epochs: int, clip: float) -> tuple[list[torch.Tensor], float]:
    """The same training in one process of plain PyTorch, on the batches of all ranks together."""
    model, optimizer, scheduler = parts()
    rows = data()
    group = BATCH * ranks
    for _ in range(epochs):
        starts = list(range(0, ROWS, group))
        for number, start in enumerate(starts):
            # Ranks get their rows in turn; a mean over all is the mean of their means.
            taken = [rows[(start + offset) % ROWS] for offset in range(group)]
            inputs, targets = (torch.stack(part) for part in zip(*taken, strict=True))
            ((model(inputs) - targets).square().mean() / STEPS).backward()
            if (number + 1) % STEPS == 0 or number == len(starts) - 1:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                for _ in range(ranks):
                    scheduler.step()
                optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], scheduler.get_last_lr()[0]


def train(second: str, epochs: int = 2, **options):
    """Train, and make a second `Accelerator` somewhere: as a cell that runs again does, or an evaluation."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, **options)
    model, optimizer, scheduler = parts()
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(data(), batch_size=BATCH)
    )
    if second == "cell":
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, **options)
    if second == "prepared again":
        with contextlib.suppress(KeyboardInterrupt), accelerator.accumulate(model):
            assert not accelerator.sync_gradients
            raise KeyboardInterrupt  # in the middle of a window
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS, **options)
        again = accelerator.prepare(model, optimizer, scheduler, loader)
        assert again == (model, optimizer, scheduler, loader)
        model, optimizer, scheduler, loader = again
    gathered = []
    for _ in range(epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square()
                gathered.append(len(accelerator.gather_for_metrics(loss)))
                accelerator.backward(loss.mean())
                if second == "evaluation":
                    other = evaluate(model)
                    assert other.gradient_accumulation_steps == 1
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert sum(gathered) == epochs * ROWS
    weights = [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]
    return weights, scheduler.get_last_lr()[0], accelerator.optimizer_step_was_skipped


def evaluate(model):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(data(), batch_size=3))
    with torch.no_grad():
        rows = sum(len(accelerator.gather_for_metrics(model(inputs))) for inputs, _ in loader)
    assert rows == ROWS
    accelerator.free_memory()
    return accelerator


CASES = ["none", "cell", "prepared again", "evaluation"]


def in_all_cases(options):
    found = []
    for case in CASES:
        context.reset()
        found.append(train(case, **options)[:2])
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_another_accelerator_prepared_trains_as_plain_pytorch_does(run_ranks, ranks):
    expected, rate = plain(ranks, 2, 0.3)
    results = [in_all_cases({})] if ranks == 1 else run_ranks(in_all_cases, {})
    for result in results:
        for case, (weights, last) in zip(CASES, result, strict=True):
            assert last == pytest.approx(rate), case
            for one, other in zip(weights, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=2e-6, msg=case)


def test_fp16_goes_on_with_the_scale_of_the_accelerator_before(run_ranks):
    for result in [in_all_cases(FP16), *run_ranks(in_all_cases, FP16)]:
        for case, (weights, last) in zip(CASES, result, strict=True):
            assert last == result[0][1], case
            for one, other in zip(weights, result[0][0], strict=True):
                assert torch.equal(one, other), case


def test_a_cell_that_trains_a_new_model_in_fp16_repeats_its_numbers():
    first, _, _ = train("none", **FP16)
    second, _, _ = train("none", **FP16)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_prepared_objects_change_precision_with_the_newest_accelerator():
    class Model(nn.Linear):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            self.seen = outputs.dtype
            return outputs

    model = Model(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for precision, dtype in [("fp16", torch.float16), ("no", torch.float32), ("bf16", torch.bfloat16)] * 2:
        accelerator = Accelerator(
            cpu=True, mixed_precision=precision, kwargs_handlers=[GradScalerKwargs(init_scale=8.0)]
        )
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(1, 2)).sum())
        norm = accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        assert (model.seen, norm.item()) == (dtype, pytest.approx(3**0.5))
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert "forward" not in vars(model)


def test_a_window_of_one_accelerator_is_seen_by_all():
    first = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = first.prepare(nn.Linear(1, 1))
    seen = []
    for _ in range(2):
        with first.accumulate(model):
            second = Accelerator(cpu=True, gradient_accumulation_steps=7)
            seen.append((first.sync_gradients, second.sync_gradients, GradientState().sync_gradients))
    assert seen == [(False,) * 3, (True,) * 3]
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 7)
    assert first.gradient_state.num_steps == 2
    assert GradientState().num_steps == 7


def test_prepared_objects_stay_usable_after_end_training():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(3, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data(), batch_size=BATCH)
    )
    accelerator.end_training()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    steps = 0
    for inputs, _ in loader:
        before = model.weight.detach().clone()
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
        steps += not torch.equal(before, model.weight)
    assert steps == ROWS // BATCH // 2


def test_a_model_is_wrapped_anew_when_its_process_group_has_ended(run_ranks, tmp_path):
    def again():
        accelerator = Accelerator(cpu=True)
        model, optimizer, _ = parts()
        model, optimizer = accelerator.prepare(model, optimizer)
        wrapped = accelerator.prepare(model)
        assert wrapped is model
        assert Accelerator(cpu=True).prepare(model) is model
        rank = accelerator.process_index
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert model is not wrapped
        accelerator.backward(model(torch.ones(2, 3) * rank).sum())
        optimizer.step()
        return [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()]

    first, second = run_ranks(again)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_free_memory_leaves_the_loops_of_other_accelerators_alone():
    first = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = first.prepare(nn.Linear(3, 1))
    closes = []
    for _ in first.prepare(DataLoader(data(), batch_size=4)):
        second = Accelerator(cpu=True)
        next(iter(second.prepare(DataLoader(data(), batch_size=4))))
        second.free_memory()
        with first.accumulate(model):
            closes.append(first.sync_gradients)
    assert closes == [False, False, False, True, True]


def test_accelerators_that_are_gone_keep_nothing():
    accelerator = Accelerator(cpu=True, **FP16)
    model, optimizer, scheduler, loader = accelerator.prepare(*parts(), DataLoader(data()))
    gone = [weakref.ref(thing) for thing in (accelerator, model, optimizer, optimizer.optimizer, scheduler, loader)]
    del accelerator, model, optimizer, scheduler, loader
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_a_schedule_waits_for_the_optimizer_that_another_accelerator_prepared():
    accelerator = Accelerator(cpu=True, **FP16)
    model, optimizer, scheduler = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator = Accelerator(cpu=True)
    scheduler = accelerator.prepare(scheduler)
    accelerator.backward(model(torch.ones(1, 3)).sum() * float("inf"))
    optimizer.step()
    scheduler.step()
    assert optimizer.step_was_skipped
    assert scheduler.get_last_lr() == [0.05]

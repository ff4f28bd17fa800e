"""One step at a time: windows, clipping, skipped steps, schedulers."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.base.config.kwargs import AutocastKwargs, GradScalerKwargs
from nb_accelerate.errors import ConfigError, NotPreparedError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.optim import AcceleratedScheduler
from nb_accelerate.training.process import context

Schedulers = torch.optim.lr_scheduler


def small(**options):
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def forward(model, value=1.0):
    """Return what a model computes of one row, which is on its device."""
    return model(torch.full((1, 2), value, device=next(model.parameters()).device))


def test_windows_close_after_their_steps_and_at_the_end_of_the_loader():
    accelerator, model, _ = small(gradient_accumulation_steps=3)
    closes = []
    for _ in range(2):
        for _ in accelerator.prepare(DataLoader(range(5))):
            with accelerator.accumulate(model):
                closes.append(accelerator.sync_gradients)
    assert closes == [False, False, True, False, True] * 2


def test_windows_may_run_on_over_the_end_of_the_loader():
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    accelerator, model, _ = small(gradient_accumulation_plugin=plugin)
    closes = []
    for _ in range(2):
        for _ in accelerator.prepare(DataLoader(range(4))):
            with accelerator.accumulate(model):
                closes.append(accelerator.sync_gradients)
    assert closes == [False, False, True, False, False, True, False, False]


def test_gradients_travel_only_when_the_window_closes(run_ranks):
    def train(sync_each_batch):
        accelerator, model, _ = small(
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
        )
        gradients = []
        for step in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(forward(model, float(accelerator.process_index + 1 + step)).sum())
                gradients.append(accelerator.unwrap_model(model).weight.grad[0, 0].item())
        with accelerator.no_sync(model):
            accelerator.backward(forward(model, float(accelerator.process_index)).sum())
        return gradients, accelerator.unwrap_model(model).weight.grad[0, 0].item()

    # Halves, since a window has two batches: inputs 1 and 2 on rank 0, then 2 and 3 on rank 1.
    assert run_ranks(train, False) == [([0.5, 2.0], 2.0), ([1.0, 2.0], 2.5)]
    assert run_ranks(train, True) == [([0.75, 2.0], 2.0), ([0.75, 2.0], 2.5)]


def test_optimizers_wait_for_their_window():
    accelerator, model, optimizer = small(gradient_accumulation_steps=2)
    before = model.weight.detach().clone()
    for step in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(forward(model).sum())
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(model.weight, before) == (step == 0)
            assert (model.weight.grad is None) == (step == 1)


def test_clipping_reports_the_norm_and_waits_for_the_window():
    accelerator, model, _ = small(gradient_accumulation_steps=2)
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(forward(model, 4.0).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
    assert norms == pytest.approx([33**0.5 / 2, 33**0.5])
    assert nn.utils.get_total_norm([p.grad for p in model.parameters()]).item() == pytest.approx(0.5, rel=1e-4)
    accelerator.clip_grad_value_(model.parameters(), 0.1)
    assert max(p.grad.abs().max().item() for p in model.parameters()) == pytest.approx(0.1)


def test_a_step_with_infinite_gradients_is_skipped_and_the_schedule_waits():
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=4.0, growth_interval=1000)]
    )
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Schedulers.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    other = accelerator.prepare(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))
    of_both = AcceleratedScheduler(Schedulers.StepLR(other.optimizer, 1, gamma=0.5), [other, optimizer])
    seen = []
    for factor in (1.0, float("inf"), 1.0):
        before = model.weight.detach().clone()
        accelerator.backward(forward(model).sum() * factor)
        optimizer.step()
        scheduler.step()
        other.step()
        of_both.step()
        assert of_both.get_last_lr() == scheduler.get_last_lr()
        optimizer.zero_grad()
        moved = not torch.equal(before, model.weight)
        seen.append((moved, accelerator.optimizer_step_was_skipped, scheduler.get_last_lr()[0]))
    assert seen == [(True, False, 0.05), (False, True, 0.05), (True, False, 0.025)]
    assert accelerator.scaler.get_scale() == 2.0


def test_fp16_clips_the_true_gradients_once():
    accelerator, model, optimizer = small(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
    twin = copy.deepcopy(accelerator.unwrap_model(model, keep_fp32_wrapper=False))
    nn.Linear.forward(twin, torch.full((1, 2), 4.0, device=accelerator.device)).sum().backward()
    norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    accelerator.backward(forward(model, 4.0).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 0.5).item() == pytest.approx(norm.item(), rel=1e-3)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    torch.testing.assert_close(model.weight, twin.weight - 0.1 * twin.weight.grad, rtol=1e-3, atol=1e-3)


def test_two_optimizers_share_one_scale():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    models = [nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    models = accelerator.prepare(*models)
    optimizers = accelerator.prepare(*optimizers)
    for _ in range(2):
        # The first is clipped before the second has gradients: its true gradients must not be divided again.
        accelerator.backward(forward(models[0]).sum())
        accelerator.clip_grad_norm_(models[0].parameters(), 100.0)
        accelerator.backward(forward(models[1]).sum())
        accelerator.clip_grad_norm_(models[1].parameters(), 100.0)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            assert model.weight.grad.tolist() == [[1.0, 1.0]]
            optimizer.zero_grad()
    # Unscaled, and then dropped without a step.
    accelerator.backward(forward(models[0]).sum())
    accelerator.clip_grad_norm_(models[0].parameters(), 100.0)
    optimizers[0].zero_grad()
    accelerator.backward(forward(models[0]).sum())
    optimizers[0].step()
    assert models[0].weight.grad.tolist() == [[1.0, 1.0]]


def test_float16_weights_are_refused_with_a_scaler():
    with pytest.raises(ConfigError, match=r"'weight'\) are float16 already"):
        Accelerator(cpu=True, mixed_precision="fp16").prepare(nn.Linear(2, 1).half())


def test_closures_are_refused_with_a_scaler_and_work_without():
    _, _, optimizer = small(mixed_precision="fp16")
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)
    accelerator, model, _ = small(mixed_precision="no")
    optimizer = accelerator.prepare(torch.optim.LBFGS(model.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = (forward(model) - 3).square().sum()
        accelerator.backward(loss)
        return loss

    optimizer.step(closure)
    assert forward(model).item() == pytest.approx(3.0, abs=1e-3)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_models_compute_in_half_precision_and_return_float32(precision, dtype):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, inputs):
            outputs = self.layer(inputs)
            self.seen = outputs.dtype
            return {"outputs": outputs, "rows": len(inputs)}

    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(Model())
    found = forward(model)
    assert (model.seen, found["outputs"].dtype, found["rows"]) == (dtype, torch.float32, 1)
    with accelerator.autocast():
        assert forward(model.layer).dtype == dtype
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert forward(model.layer).dtype == torch.float32
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert forward(model)["outputs"].dtype == torch.float32
    assert model.seen == torch.float32
    assert "forward" not in vars(model)


def test_precision_comes_from_the_launcher_unless_it_is_written(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    assert Accelerator(cpu=True).gradient_accumulation_steps == 3
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"


def test_an_accelerator_says_that_it_computes_in_the_precision_of_the_one_before(caplog):
    context.reset()
    Accelerator(cpu=True, mixed_precision="bf16")
    Accelerator(cpu=True, mixed_precision="bf16")
    assert not caplog.messages
    assert Accelerator(cpu=True).mixed_precision == "bf16"
    assert caplog.messages == [
        "mixed_precision='bf16' holds for this Accelerator too: it was chosen for the one before it in this process. "
        "Write mixed_precision='no' for another."
    ]
    Accelerator(cpu=True, mixed_precision="no")
    Accelerator(cpu=True)
    assert len(caplog.messages) == 1


def test_schedulers_advance_once_per_process_and_say_so_in_one_line(run_ranks, capfd):
    def train(total_steps=3, **options):
        context.reset()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = Schedulers.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        cycle = Schedulers.OneCycleLR(torch.optim.SGD(model.parameters(), lr=1.0), max_lr=1.0, total_steps=total_steps)
        model, optimizer, scheduler, cycle = accelerator.prepare(model, optimizer, scheduler, cycle)
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(forward(model).sum())
                optimizer.step()
                scheduler.step()
                cycle.step()
                optimizer.zero_grad()
        return scheduler.scheduler.last_epoch, cycle.scheduler.last_epoch

    def train_in_all_ways():
        others = ({"scheduler_steps_per_process": False}, {"split_batches": True})
        steps = [train(**options)[0] for options in others]
        return train(), [*steps, train(9, step_scheduler_with_optimizer=False)[0]]

    for steps, others in run_ranks(train_in_all_ways):
        assert steps == (4, 3)  # 2 optimizer steps on 2 ranks; the cycle ends where it ends
        assert others == [2, 2, 4]
    told = [line.partition(" at each")[0] for line in capfd.readouterr().err.splitlines() if " at each" in line]
    assert told == ["LambdaLR advances 2 times", "OneCycleLR advances 2 times"]
    assert train()[0] == 2
    assert " at each" not in capfd.readouterr().err


def test_schedules_of_epochs_advance_once_an_epoch_and_say_so_once(run_ranks, capsys):
    def train(kind):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if kind == "accumulated" else 1)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = Schedulers.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        loader = DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=2)
        model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
        for _ in range(3):
            for number, (inputs,) in enumerate(loader):
                with accelerator.accumulate(model):
                    accelerator.backward(model(inputs).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    if kind in ("each batch", "accumulated") or (kind == "each second" and number % 2):
                        scheduler.step()
            if kind == "each epoch":
                scheduler.step()
        return scheduler.scheduler.last_epoch

    kinds = ("each batch", "each second", "accumulated")
    assert run_ranks(lambda: [train(kind) for kind in kinds]) == [[24, 12, 12]] * 2
    capsys.readouterr()
    assert run_ranks(train, "each epoch") == [3, 3]
    said = "".join(capsys.readouterr())
    assert said.count("so it counts epochs") == 1


def test_schedulers_made_after_prepare_accept_the_prepared_optimizer(recwarn):
    _, model, optimizer = small()
    scheduler = Schedulers.StepLR(optimizer, 1, gamma=0.5)
    forward(model).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not recwarn.list


def test_a_prepared_optimizer_is_the_optimizer_inside():
    _, _, optimizer = small()
    inner = optimizer.optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert optimizer.state_dict() == inner.state_dict()
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra], "lr": 3.0})
    assert inner.param_groups[1]["lr"] == 3.0
    called = []
    handle = optimizer.register_step_post_hook(lambda *_: called.append(1))
    optimizer.step()
    handle.remove()
    assert called == [1]
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[1]["lr"] == 3.0
    optimizer.train()
    optimizer.eval()


def test_prepare_returns_objects_in_the_order_they_came():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Schedulers.StepLR(optimizer, 1)
    loader = DataLoader(range(2))
    got = accelerator.prepare(scheduler, loader, None, optimizer, model)
    kinds = ["AcceleratedScheduler", "DataLoaderShard", "NoneType", "AcceleratedOptimizer", "Linear"]
    assert [type(item).__name__ for item in got] == kinds
    assert got[0].optimizers == [got[3]]
    assert accelerator.prepare(*got) == got
    assert accelerator.prepare(model) is model


def test_prepare_refuses_what_it_does_not_know():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match=r"given a list.*Leave it"):
        accelerator.prepare([1, 2])
    with pytest.raises(ConfigError, match=r"1 entries .*2 objects"):
        accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1), device_placement=[True])
    with pytest.raises(NotPreparedError, match="SGD"):
        accelerator.unscale_gradients(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


def test_models_without_anything_to_train_are_prepared_too(run_ranks):
    def forward():
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(2, 1).requires_grad_(False)
        assert accelerator.prepare(model) is model
        trained = accelerator.prepare(nn.Linear(2, 1))
        return type(trained).__name__, type(accelerator.unwrap_model(trained)).__name__

    assert run_ranks(forward) == [("DistributedDataParallel", "Linear")] * 2


def test_compiled_models_are_unwrapped_as_asked():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    compiled = accelerator.prepare(torch.compile(model, backend="eager"))
    assert accelerator.unwrap_model(compiled) is compiled
    assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model


def test_free_memory_lets_go_of_everything():
    accelerator, model, optimizer = small()
    assert (accelerator._models, accelerator._optimizers) == ([model], [optimizer])  # names that scripts look for
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert (model, optimizer) == (None, None)
    assert accelerator._models == accelerator._optimizers == accelerator._schedulers == accelerator._dataloaders == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_goes_when_its_last_user_has_dropped_it(run_ranks, world_size):
    def train(prepares_loader):
        accelerator = Accelerator(cpu=True)
        gone = []
        for _ in range(2):
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=1)
            model, optimizer = accelerator.prepare(model, optimizer)
            if prepares_loader:
                loader = accelerator.prepare(loader)
            prepared, inner = weakref.ref(model), weakref.ref(accelerator.unwrap_model(model))
            for (batch,) in loader:
                accelerator.backward(model(batch.to(accelerator.device)).sum())
                optimizer.step()
                optimizer.zero_grad()
            model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
            gc.collect()
            gone.append((prepared(), inner()))
        return gone

    for prepares_loader in (True, False):
        for gone in run_ranks(train, prepares_loader, world_size=world_size):
            assert gone == [(None, None)] * 2

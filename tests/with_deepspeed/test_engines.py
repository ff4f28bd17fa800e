"""Optimizers and schedulers of a configuration, several models and plugins, transformers, what is refused."""

from __future__ import annotations

import pytest
import torch
from fixtures.deepspeed_runs import difference, epoch, make_loader, make_model, plugin, train
from torch import nn
from training.rehearsal.rehearsing import rehearsed

from nb_accelerate import Accelerator, DeepSpeedPlugin
from nb_accelerate.errors import ConfigError, NotPreparedError
from nb_accelerate.utils import DistributedType, DummyOptim, DummyScheduler

DESCRIBED = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": 4, "warmup_type": "linear"},
    },
}


def test_an_optimizer_and_a_scheduler_of_the_configuration_train_as_those_of_torch(run_ranks):
    def compare():
        reference = []
        for engine in (None, plugin(2, **DESCRIBED)):
            accelerator = Accelerator(cpu=True, deepspeed_plugin=engine, scheduler_steps_per_process=False)
            model = make_model()
            if engine is None:
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
                scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(0, step - 1) / 4))
            else:
                optimizer = DummyOptim(model.parameters(), lr=0.01, weight_decay=0.1)
                scheduler = DummyScheduler(optimizer)
            reference.append(epoch(accelerator, *accelerator.prepare(model, optimizer, make_loader(), scheduler)))
        return reference

    plain, engine = run_ranks(compare)[0]
    assert difference(plain.losses, engine.losses) < 1e-5
    assert difference(plain.rates, engine.rates) < 1e-9  # WarmupLR of DeepSpeed begins one step later than LambdaLR


def test_a_window_that_the_configuration_says_is_that_of_the_loop(run_ranks):
    def both():
        said = DeepSpeedPlugin(
            {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
        )
        return train(None, steps=2, clip=0.5).losses, train(said).losses

    plain, engine = run_ranks(both)[0]
    assert difference(plain, engine) < 1e-5


def test_models_of_several_plugins_train_side_by_side(run_ranks):
    def both():
        accelerator = Accelerator(cpu=True, deepspeed_plugins={"one": plugin(2), "other": plugin(3)})
        assert accelerator.distributed_type is DistributedType.DEEPSPEED
        assert accelerator.deepspeed_plugin is accelerator.state.get_deepspeed_plugin("one")
        results = []
        things = []
        for name in ("one", "other"):
            accelerator.state.select_deepspeed_plugin(name)
            model = make_model()
            things.append(accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), make_loader()))
        with pytest.raises(ConfigError, match=r"plugin 'onee'.*mean 'one'"):
            accelerator.state.select_deepspeed_plugin("onee")
        stages = [int(model.zero_optimization_stage()) for model, _, _ in things]
        for model, optimizer, loader in things:
            results.append(epoch(accelerator, model, optimizer, loader, None, clip=0.5).losses)
        # A loss of both: the teacher (the first) is only read.
        (teacher, _, loader), (student, optimizer, _) = things
        inputs, _ = next(iter(loader))
        with torch.no_grad():
            targets = teacher(inputs)
        accelerator.backward(nn.functional.mse_loss(student(inputs), targets))
        optimizer.step()
        return stages, results

    stages, (one, other) = run_ranks(both)[0]
    assert stages == [2, 3]
    assert difference(one, other) < 1e-5


def test_what_an_engine_cannot_do_is_refused_with_what_to_write(run_ranks):
    run_ranks(refusals, world_size=1)


def refusals():
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin(2))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"prepared without its model.*prepare\(model, optimizer\)"):
        accelerator.prepare(optimizer)
    two = torch.optim.AdamW([*model.parameters(), *nn.Linear(2, 2).parameters()])
    with pytest.raises(ConfigError, match="trains 2 parameters that are not those of the Sequential"):
        accelerator.prepare(model, two)
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    with pytest.raises(ConfigError, match="2 optimizers train parts of one Sequential"):
        accelerator.prepare(model, *halves)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(torch.ones(2, 6)).sum()
    with pytest.raises(ConfigError, match="given inputs, which"):
        accelerator.backward(loss, inputs=[])
    accelerator.backward(loss)
    parameters = list(model.parameters())
    with pytest.raises(ConfigError, match="or zero_stage=0"):
        accelerator.clip_grad_value_(parameters, 1.0)
    with pytest.raises(ConfigError, match="norm_type=inf"):
        accelerator.clip_grad_norm_(parameters, 1.0, float("inf"))
    with pytest.raises(ConfigError, match="parameters of a model of which 5 others are trained"):
        accelerator.clip_grad_norm_(parameters[:1], 1.0)
    with pytest.raises(ConfigError, match="takes none"):
        optimizer.step(lambda: 0.0)
    optimizer.step()
    for arguments, words in (({"dynamo_backend": "eager"}, "model.compile"),):
        with pytest.raises(ConfigError, match=words):
            Accelerator(cpu=True, deepspeed_plugin=plugin(2), **arguments)
    accelerator.prepare(other := make_model(), torch.optim.AdamW(other.parameters()))
    with pytest.raises(NotPreparedError, match="from no DeepSpeed engine"):
        accelerator.backward(torch.ones((), requires_grad=True) * 2)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rehearsal_counts_what_an_engine_holds(stage, precision, run_ranks, tmp_path):
    def held():
        accelerator = Accelerator(
            cpu=True, mixed_precision=precision, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage)
        )
        model = nn.Sequential(nn.Linear(64, 2048, bias=False), nn.Linear(2048, 64, bias=False))
        loader = torch.utils.data.DataLoader(torch.ones(64, 64), batch_size=8)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        for rows in loader:
            accelerator.backward(model(rows).float().mean())
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.core.strategy.model_memory([model], [optimizer.optimizer])

    real = run_ranks(held)[0]
    (trace,) = rehearsed(held, folder=tmp_path, world_size=2, ranks=(0,)).traces
    counted = max(trace.memory, key=sum)
    assert counted.weights == real.parameters
    assert counted.optimizer == pytest.approx(real.optimizer, abs=2000)  # blocks of steps that are counted
    if stage == 3:  # else they are gone after a step
        assert counted.gradients == pytest.approx(real.gradients, abs=100)

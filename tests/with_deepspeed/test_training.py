"""Losses, norms, learning rates and weights of DeepSpeed's stages are those of DistributedDataParallel."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from fixtures.deepspeed_runs import difference, make_loader, make_model, plugin, train

from nb_accelerate import Accelerator
from nb_accelerate.errors import ConfigError

STAGES = (0, 1, 2, 3)
EXACT = 1e-5  # float32: other orders of adding up
BF16 = 3e-2  # bf16 weights against float32 weights under autocast: a mantissa of 8 bits


def with_and_without(stages, **how):
    """Train with DistributedDataParallel, then with each stage in the same process."""
    return [train(None, **how), *(train(plugin(stage), **how) for stage in stages)]


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "how",
    [
        {"steps": 2, "clip": 0.5},
        {"optimizer": "SGD", "clip": 0.5, "drop": 1},
    ],
    ids=["accumulated and clipped", "SGD, one batch dropped"],
)
def test_losses_of_all_stages_are_those_of_ddp(run_ranks, how):
    results = run_ranks(partial(with_and_without, STAGES, **how), deadline=110)
    for reference, *stages in results:
        assert sum(reference.losses[-4:]) < sum(reference.losses[:4])  # of epochs
        assert reference.rows == 3 * 26
        for result in stages:
            assert difference(reference.losses, result.losses) < EXACT
            assert difference(reference.norms, result.norms) < EXACT
            assert result.rates == reference.rates
            assert result.rows == reference.rows
    weights = results[0][0].weights
    for result in results[0][1:]:  # rank 0 has them whole
        assert result.weights.keys() == weights.keys()
        assert max(float((weights[name] - result.weights[name]).abs().max()) for name in weights) < EXACT


@pytest.mark.limit(120)
def test_bf16_losses_are_those_of_ddp_to_the_tolerance_of_16_bits(run_ranks):
    def compare():
        reference = train(None, precision="bf16", clip=0.5)
        return reference, [train(plugin(stage), precision="bf16", clip=0.5) for stage in (1, 2, 3)]

    reference, found = run_ranks(compare, deadline=110)[0]
    for result in found:
        assert_close_in_16_bits(reference, result)


@pytest.mark.limit(120)
def test_fp16_losses_are_those_of_ddp_to_the_tolerance_of_16_bits_where_the_cpu_has_fp16(run_ranks):
    def compare():
        reference = train(None, precision="bf16", clip=0.5)
        engine = plugin(2, fp16={"enabled": "auto", "initial_scale_power": 8})
        return reference, train(engine, precision="fp16", clip=0.5)

    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        assert_close_in_16_bits(*run_ranks(compare, deadline=110)[0])
    else:
        with pytest.raises(ConfigError, match=r"fp16 on.*mixed_precision='bf16'"):
            run_ranks(compare, deadline=110)


def assert_close_in_16_bits(reference, result):
    assert difference(reference.losses, result.losses) < BF16
    assert sum(result.losses[-4:]) < sum(result.losses[:4])
    assert difference(reference.norms, result.norms) < BF16


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own; ranks have the filters of this process
def test_nothing_is_compiled_and_nothing_is_printed(run_ranks, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    run_ranks(lambda: train(plugin(3), epochs=1).losses, env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "compiled")})
    printed = capfd.readouterr()
    kept = [line for line in (printed.out + printed.err).splitlines() if "processes on CPU" not in line]
    assert not [line for line in kept if "advances 2 times" not in line]
    assert not (tmp_path / "compiled").exists()


def test_a_second_engine_in_a_process_trains_after_the_first_one_s_group_has_ended(run_ranks):
    def twice():
        from nb_accelerate import PartialState

        first = train(plugin(3), epochs=1)
        PartialState().destroy_process_group()
        assert not torch.distributed.is_initialized()
        second = train(plugin(2), epochs=1)
        return difference(first.losses, second.losses)

    assert run_ranks(twice)[0] < EXACT


def test_one_process_trains_with_offloaded_state(run_ranks):
    def both():
        plain = train(None, epochs=1, drop=1, clip=0.5)
        return plain.losses, train(
            plugin(2, zero={"offload_optimizer": {"device": "cpu"}}), epochs=1, drop=1, clip=0.5
        ).losses

    plain, engine = run_ranks(both, world_size=1)[0]
    assert difference(plain, engine) < EXACT


@pytest.mark.limit(100)
def test_two_ranks_train_with_offloaded_state(run_ranks):
    def compare():
        how = {"steps": 2, "clip": 0.5, "epochs": 1}
        offloaded = {"offload_optimizer": {"device": "cpu"}}
        return train(None, **how), [train(plugin(stage, zero=offloaded), **how) for stage in (2, 3)]

    plain, engines = run_ranks(compare)[0]
    for engine in engines:
        assert difference(plain.losses, engine.losses) < EXACT
        assert difference(plain.norms, engine.norms) < EXACT


def windows_by_hand(engine, holds_back):
    """Train with two backward passes for one step, without ``accumulate``."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=engine)
    model = make_model()
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), make_loader())
    losses = []
    for _ in range(2):
        for number, (inputs, targets) in enumerate(loader):
            closes = number % 2 == 1
            with accelerator.no_sync(model) if holds_back and not closes else contextlib.nullcontext():
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
            if closes:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


@pytest.mark.limit(120)
def test_windows_that_are_made_by_hand_add_up_as_with_ddp_or_are_refused(run_ranks):
    def compare():
        held_back = [windows_by_hand(engine, True) for engine in (None, *map(plugin, STAGES))]
        for stage in (1, 2, 3):
            with pytest.raises(ConfigError, match=r"called twice.*accelerator.no_sync\(model\)"):
                windows_by_hand(plugin(stage), False)
        return held_back

    for reference, *stages in run_ranks(compare, deadline=110):
        for losses in stages:
            assert difference(reference, losses) < EXACT


def test_an_error_on_one_rank_reaches_the_caller(run_ranks):
    def train_until_it_fails():
        accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin(3))
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(4):
            accelerator.backward(model(torch.ones(2, 6)).sum())
            if number == 2 and accelerator.process_index == 1:
                raise KeyError("a mistake on rank 1")
            optimizer.step()

    with pytest.raises(KeyError, match="a mistake on rank 1"):
        run_ranks(train_until_it_fails)

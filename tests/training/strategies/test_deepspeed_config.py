"""What DeepSpeed is asked to do: plugins, JSON with "auto", environment. DeepSpeed itself is not needed."""

from __future__ import annotations

import base64
import json
import sys
import types

import pytest
import torch

from nb_accelerate import Accelerator, DeepSpeedPlugin, MissingDependencyError, NotPreparedError
from nb_accelerate.base.config.deepspeed import resolve_deepspeed
from nb_accelerate.base.config.deepspeed_json import HfDeepSpeedConfig, contradictions, filled
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.file import read_config
from nb_accelerate.base.config.kwargs import DistributedDataParallelKwargs
from nb_accelerate.base.config.parallelism import ParallelismConfig
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.strategies.deepspeed.resolve import Run, engine_config
from nb_accelerate.training.strategies.select import resolve_strategy_options
from nb_accelerate.utils import DummyOptim, DummyScheduler, FullyShardedDataParallelPlugin

RUN = Run(precision="no", world_size=2, accumulation_steps=4, batch_sizes=(8,))
ALL_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
}


def weights() -> list[torch.nn.Parameter]:
    return list(torch.nn.Linear(2, 2).parameters())


def test_what_is_auto_is_filled_in_from_what_is_prepared():
    optimizer = DummyOptim(weights(), lr=0.02, weight_decay=0.1, betas=[0.8, 0.9])
    scheduler = DummyScheduler(optimizer, total_num_steps=101, warmup_num_steps=10)
    run = Run(precision="bf16", world_size=2, accumulation_steps=4, batch_sizes=(8,), scheduler_steps=2, hidden_size=16)
    config = engine_config(DeepSpeedPlugin(hf_ds_config=ALL_AUTO), run, optimizer, [scheduler])
    assert config["train_micro_batch_size_per_gpu"] == 8
    assert config["gradient_accumulation_steps"] == 4
    assert config["bf16"] == {"enabled": True}
    assert config["fp16"] == {"enabled": False}
    assert config["optimizer"]["params"] == {"lr": 0.02, "betas": [0.8, 0.9], "weight_decay": 0.1, "torch_adam": True}
    assert config["scheduler"]["params"] == {"warmup_max_lr": 0.02, "warmup_num_steps": 10, "total_num_steps": 51}
    assert config["zero_optimization"]["reduce_bucket_size"] == 256
    assert config["zero_optimization"]["stage3_param_persistence_threshold"] == 160
    assert config["gradient_clipping"] == 0


def test_auto_without_a_value_leaves_the_default_of_deepspeed():
    config = engine_config(DeepSpeedPlugin(hf_ds_config=ALL_AUTO), RUN, None, [])
    assert "reduce_bucket_size" not in config["zero_optimization"]
    with pytest.raises(ConfigError, match=r"total_num_steps is 'auto'.*DummyScheduler\(optimizer, total_num_steps="):
        filled(ALL_AUTO, {})


def test_contradictions_are_named_with_both_values():
    for fields, config, message in (
        ({"zero_stage": 2}, {"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3 .* and 2 here"),
        ({"gradient_clipping": 0.5}, {"gradient_clipping": 1.0}, "gradient_clipping is 1.0 .* and 0.5 here"),
        (
            {"offload_param_device": "cpu", "zero_stage": 2},
            {},
            "offload_param_device='cpu' needs zero_stage=3 or more, and the stage is 2",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            DeepSpeedPlugin(hf_ds_config=config, **fields)
    assert contradictions({"a": {"b": "auto"}, "c": None}, {"a.b": 1, "c": 2, "d.e": 3}) == []


def test_a_configuration_that_contradicts_what_is_prepared_is_refused():
    optimizer = torch.optim.AdamW(weights())
    for config, run, message in (
        ({"train_micro_batch_size_per_gpu": 3}, RUN, "is 3 in the DeepSpeed configuration.*batches of 8 rows"),
        ({"train_batch_size": 100}, RUN, "train_batch_size is 100 in the configuration and 64 here"),
        ({"optimizer": {"type": "AdamW"}}, RUN, 'has an "optimizer", and a AdamW is prepared'),
        (
            {"zero_optimization": {"stage": 0}},
            Run(precision="bf16", world_size=2, accumulation_steps=1),
            "mixed_precision='bf16' was asked for with ZeRO stage 0.*zero_stage=1",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            engine_config(DeepSpeedPlugin(hf_ds_config=config), run, optimizer, [])
    with pytest.raises(ConfigError, match="A DummyOptim stands for"):
        engine_config(DeepSpeedPlugin(), RUN, DummyOptim(weights()), [])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with pytest.raises(ConfigError, match='"scheduler", and a LambdaLR'):
        engine_config(DeepSpeedPlugin(hf_ds_config={"scheduler": {"type": "WarmupLR"}}), RUN, optimizer, [schedule])


def test_a_configuration_is_a_dict_a_file_or_text(tmp_path):
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    text = json.dumps(config)
    (tmp_path / "ds.json").write_text(text)
    encoded = base64.b64encode(text.encode()).decode()
    for given in (config, tmp_path / "ds.json", str(tmp_path / "ds.json"), text, encoded):
        read = HfDeepSpeedConfig(given)
        assert read.config == config
        assert read.is_zero3()
        assert read.is_offload()
        assert DeepSpeedPlugin(hf_ds_config=given).zero_stage == 3
    assert read.config is not config
    for wrong in ("nowhere.json", "[1]", 3):
        with pytest.raises(ConfigError, match="hf_ds_config="):
            HfDeepSpeedConfig(wrong)


def test_variables_say_what_a_plugin_leaves_open_and_a_configuration_says_more():
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        "ACCELERATE_GRADIENT_CLIPPING": "0.25",
    }
    (plugin,) = resolve_deepspeed(None, Environment(variables)).values()
    assert plugin.deepspeed_config["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
    assert plugin.gradient_clipping == plugin.deepspeed_config["gradient_clipping"] == 0.25
    mine = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}})
    assert resolve_deepspeed(mine, Environment(dict(list(variables.items())[:2]))) == {"default": mine}
    assert mine.stage == 1
    assert resolve_deepspeed(None, Environment({})) is None
    assert next(iter(resolve_deepspeed(DeepSpeedPlugin(), Environment({})).values())).stage == 2


def test_a_configuration_file_of_accelerate_says_the_same(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  gradient_clipping: 0.5\n"
        "  offload_optimizer_device: none\n  zero3_init_flag: false\n  gradient_accumulation_steps: 2\n"
    )
    variables = Environment(read_config(tmp_path / "config.yaml").as_variables())
    (plugin,) = resolve_deepspeed(None, variables).values()
    assert (plugin.zero_stage, plugin.gradient_clipping, plugin.zero3_init_flag) == (3, 0.5, False)
    assert variables.gradient_accumulation_steps == 2


def test_one_engine_shards_a_model_and_one_place_says_how_long_a_window_is():
    def resolve(variables=None, **plugins):
        return resolve_strategy_options(
            plugins, ddp=DistributedDataParallelKwargs(), before=None, environment=Environment(variables or {})
        )

    with pytest.raises(ConfigError, match="fsdp_plugin and deepspeed_plugin"):
        resolve(fsdp_plugin=FullyShardedDataParallelPlugin(), deepspeed_plugin=DeepSpeedPlugin())
    with pytest.raises(ConfigError, match="ACCELERATE_USE_DEEPSPEED and ACCELERATE_USE_FSDP"):
        resolve({"ACCELERATE_USE_DEEPSPEED": "1", "ACCELERATE_USE_FSDP": "1"})
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps is 2\b.* 4 "):
        Accelerator(cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=DeepSpeedPlugin("{}", 4))


def test_what_is_given_replaces_another_engine_of_an_accelerator_before():
    def resolve(before=None, **plugins):
        return resolve_strategy_options(
            plugins, ddp=DistributedDataParallelKwargs(), before=before, environment=Environment({})
        )

    sharded = resolve(parallelism_config=ParallelismConfig(dp_shard_size=2))
    assert sharded.fsdp is not None
    assert resolve(before=sharded).parallelism == sharded.parallelism
    other = resolve(before=sharded, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))
    assert (other.fsdp, other.parallelism) == (None, None)
    assert other.selected_deepspeed is not None
    assert resolve(before=other).deepspeed == other.deepspeed
    back = resolve(before=other, parallelism_config=ParallelismConfig(dp_shard_size=2))
    assert back.deepspeed is None
    assert back.fsdp is not None


def test_without_deepspeed_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    from nb_accelerate.training.strategies.deepspeed.library import import_deepspeed

    with pytest.raises(MissingDependencyError, match="pip install deepspeed"):
        import_deepspeed("cpu")


def test_stand_ins_train_nothing_by_themselves():
    optimizer = DummyOptim(weights())
    with pytest.raises(NotPreparedError, match="A DummyOptim trains nothing"):
        optimizer.step()
    with pytest.raises(NotPreparedError, match="A DummyScheduler changes nothing"):
        DummyScheduler(optimizer).step()


def test_layers_that_stage_3_gathers_whole_are_found_by_their_class(monkeypatch):
    told = []
    utils = types.SimpleNamespace(set_z3_leaf_modules=lambda model, classes: told.append((model, classes)))
    monkeypatch.setitem(sys.modules, "deepspeed", types.SimpleNamespace(utils=utils))
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    DeepSpeedPlugin(transformer_moe_cls_names="Linear, ReLU").set_moe_leaf_modules(model)
    DeepSpeedPlugin().set_moe_leaf_modules(model)
    assert told == [(model, [torch.nn.Linear, torch.nn.ReLU])]
    with pytest.raises(ConfigError, match=r"names Experts, .*Linear, ReLU"):
        DeepSpeedPlugin(transformer_moe_cls_names="Linear,Experts").set_moe_leaf_modules(model)

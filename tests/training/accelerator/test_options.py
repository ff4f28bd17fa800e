"""Options refuse bad values with what was given, why it cannot be, and what to write."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.base.config.dynamo import TorchDynamoPlugin
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.kwargs import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.base.config.parallelism import ParallelismConfig
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context
from nb_accelerate.training.process.rng import set_seed


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Accelerator(mixed_precision="bf61"),
            "mixed_precision='bf61'.*mean 'bf16'.*'fp16', 'bf16'",
        ),
        (lambda: Accelerator(mixed_precision="fp4"), r"mixed_precision='fp4' is not a choice"),
        (lambda: Accelerator(gradient_accumulation_steps=0), "gradient_accumulation_steps=0.*at least 1"),
        (lambda: Accelerator(gradient_accumulation_steps="4"), "'4' is of type str"),
        (lambda: Accelerator(gradient_accumulation_steps=True), "type bool, not a whole"),
        (
            lambda: Accelerator(
                gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3)
            ),
            r"=2 and .*num_steps=3 contradict",
        ),
        (lambda: Accelerator(cpu="no"), "Write cpu=True or cpu=False"),
        (
            lambda: Accelerator(split_batches=False, dataloader_config=DataLoaderConfiguration(split_batches=True)),
            "contradict",
        ),
        (lambda: Accelerator(rng_types=["torsh"]), r"rng_types='torsh'.*Did you mean 'torch'"),
        (lambda: Accelerator(kwargs_handlers=[AutocastKwargs(), AutocastKwargs()]), "two AutocastKwargs"),
        (lambda: Accelerator(kwargs_handlers=[{"timeout": 3}]), "not a handler.*InitProcessGroupKwargs"),
        (lambda: Accelerator(kwargs_handlers={"timeout": 3}), "type dict.*InitProcessGroupKwargs"),
        (
            lambda: Accelerator(kwargs_handlers=DistributedDataParallelKwargs(find_unused_parameters=True)),
            r"handlers. Write kwargs_handlers=\[",
        ),
        (
            lambda: Accelerator(dataloader_config={"data_seed": 1}),
            r"type dict.* Write dataloader_config=DataLoaderConfiguration\(",
        ),
        (
            lambda: Accelerator(gradient_accumulation_plugin={"steps": 1}),
            r"gradient_accumulation_plugin=GradientAccumulationPlugin\(\.\.\.\), with `from nb_accelerate.utils",
        ),
        (lambda: Accelerator(dynamo_plugin="inductor"), "dynamo_plugin='inductor' is of type"),
        (lambda: Accelerator(project_config="runs"), "type str, not a ProjectConfig"),
        (
            lambda: Accelerator(deepspeed_plugin=object()),
            "deepspeed_plugin=.*not a DeepSpeedPlugin",
        ),
        (lambda: Accelerator(fsdp_plugin=object()), "fsdp_plugin=.*not a FullyShardedDataParallelPlugin"),
        (lambda: DataLoaderConfiguration(even_batches="False"), "even_batches='False' is of type"),
        (lambda: DataLoaderConfiguration(data_seed=-1), "data_seed=-1 is too small"),
        (lambda: GradScalerKwargs(growth_factor=1.0), "growth_factor=1.0 is too small"),
        (lambda: GradScalerKwargs(backoff_factor=2.0), "does not shrink"),
        (
            lambda: InitProcessGroupKwargs(timeout=60),
            r"timeout=60 is not a datetime.timedelta.*timedelta\(seconds=60\)",
        ),
        (lambda: InitProcessGroupKwargs(timeout=timedelta(0)), "not a datetime.timedelta above 0"),
        (lambda: DistributedDataParallelKwargs(comm_hook="bf61"), "comm_hook='bf61'.*Did you mean 'bf16'"),
        (lambda: DistributedDataParallelKwargs(bucket_cap_mb=0), "bucket_cap_mb=0 is too small"),
        (lambda: set_seed("1"), "seed='1' is of type"),
    ],
)
def test_bad_values_are_refused_with_what_to_write(make, text):
    with pytest.raises(ConfigError, match=text):
        make()


def test_an_unknown_argument_names_the_one_that_was_meant():
    with pytest.raises(TypeError, match="argument 'mixed_precison'"):
        Accelerator(mixed_precison="bf16")


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        ({"fp16": True}, "Write mixed_precision='fp16'."),
        ({"fp16": False}, "Leave it out: that is the default."),
        ({"dispatch_batches": True}, "Write dataloader_config=DataLoaderConfiguration(dispatch_batches=True)."),
        ({"even_batches": False}, "Write dataloader_config=DataLoaderConfiguration(even_batches=False)."),
        ({"use_seedable_sampler": True}, "dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)."),
        ({"logging_dir": "logs"}, "Write project_config=ProjectConfiguration(logging_dir='logs'), or project_dir "),
        ({"total_limit": 2}, "Write project_config=ProjectConfiguration(total_limit=2)."),
        ({"sync_each_batch": True}, "gradient_accumulation_plugin=GradientAccumulationPlugin(sync_each_batch=True)."),
        (
            {"find_unused_parameters": True},
            "Write kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)].",
        ),
        ({"init_scale": 8.0}, "Write kwargs_handlers=[GradScalerKwargs(init_scale=8.0)]."),
    ],
)
def test_an_argument_that_belongs_elsewhere_says_where(arguments, instead):
    (name,) = arguments
    with pytest.raises(TypeError, match=f"no argument '{name}'. .*{re.escape(instead)}"):
        Accelerator(**arguments)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ACCELERATE_MIXED_PRECISION", "half", "ACCELERATE_MIXED_PRECISION='half' is not a choice"),
        ("ACCELERATE_USE_CPU", "maybe", "ACCELERATE_USE_CPU='maybe' is not a yes"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "two", "is not a whole number"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "0", "is too small"),
    ],
)
def test_bad_values_in_the_environment_name_the_variable(monkeypatch, name, value, text):
    monkeypatch.setenv(name, value)
    context.reset()  # a process looks for its device once
    with pytest.raises(ConfigError, match=text):
        Accelerator()


def test_an_empty_variable_counts_as_not_set():
    environment = Environment({"ACCELERATE_USE_CPU": " ", "A": "YES", "B": "0"})
    assert environment.use_cpu is None
    assert (environment.flag("A"), environment.flag("B"), environment.whole("C")) == (True, False, None)


def test_options_that_are_not_given_are_those_of_the_environment_when_they_are_made(monkeypatch):
    names = {"BACKEND": "aot_ts_nvfuser", "MODE": "reduce-overhead", "USE_FULLGRAPH": "1"}
    for name, value in names.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    kwargs = TorchDynamoPlugin().to_kwargs()
    assert kwargs == {"backend": "aot_ts_nvfuser", "mode": "reduce-overhead", "fullgraph": True}
    assert TorchDynamoPlugin(backend="eager").to_kwargs() == {"backend": "eager"}
    assert TorchDynamoPlugin(mode="max-autotune").mode == "max-autotune"
    assert (ParallelismConfig().tp_size, ParallelismConfig(tp_size=4).tp_size) == (2, 4)
    assert ParallelismConfig().dp_shard_size is None


def test_handlers_know_what_differs_from_the_defaults():
    handler = DistributedDataParallelKwargs(bucket_cap_mb=10, comm_hook="fp16", check_reduction=True)
    assert handler.to_dict()["static_graph"] is False
    assert handler.comm_hook is DDPCommunicationHookType.FP16
    assert handler.to_kwargs().keys() == {"bucket_cap_mb", "check_reduction"}

    @dataclasses.dataclass
    class Own(KwargsHandler):
        size: int = 1
        name: str = "a"

    assert Own(size=2).to_kwargs() == {"size": 2}
    assert handler.to_dict(ignore_keys=["dim"])["comm_hook"] is DDPCommunicationHookType.FP16
    assert handler.to_ddp() == {"bucket_cap_mb": 10}


def test_seeds_make_numbers_repeat_and_ranks_differ_when_asked(run_ranks):
    def draw():
        import random

        import numpy as np

        from nb_accelerate.training.accelerator import Accelerator

        set_seed(3, device_specific=True)  # known to the environment before there is an Accelerator
        early = torch.rand(1).item()
        Accelerator(cpu=True)
        found = []
        for specific in (False, True):
            set_seed(3, device_specific=specific)
            found.append((random.random(), np.random.rand(), torch.rand(1).item()))
        assert early == found[1][2]
        return found

    first, second = run_ranks(draw)
    assert first[0] == second[0]
    assert first[1] == first[0]
    assert all(one != other for one, other in zip(first[1], second[1], strict=True))


def test_options_and_topology_import_no_torch():
    code = (
        "import sys, nb_accelerate.base.topology, nb_accelerate.base.config.kwargs, nb_accelerate.base.config.loader, "
        "nb_accelerate.base.config.accumulation; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

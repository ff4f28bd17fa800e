"""Option objects are plain dataclasses: positional, and changed until they are used."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nb_accelerate import utils
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

KINDS = (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)


class Half(nn.Module):
    """Uses one of its two layers, so that gradients of the other never come."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_stand_in_accelerates_order(kind):
    theirs = getattr(pytest.importorskip("accelerate.utils"), kind.__name__)
    names = [field.name for field in dataclasses.fields(kind)]
    wanted = [field.name for field in dataclasses.fields(theirs)]
    assert names[: len(wanted)] == wanted  # what is only here comes after, so that positions mean the same
    first = next(iter(dataclasses.asdict(kind()).values()))
    assert kind(first) == kind()


@pytest.mark.parametrize(
    ("options", "name", "good", "bad", "text"),
    [
        (DataLoaderConfiguration(), "data_seed", 42, -1, "data_seed=-1 is too small"),
        (DistributedDataParallelKwargs(), "find_unused_parameters", True, "yes", "'yes' is of type"),
        (GradScalerKwargs(), "backoff_factor", 0.25, 1.0, "does not shrink"),
        (InitProcessGroupKwargs(), "timeout", timedelta(seconds=9), 9, "not a datetime.timedelta"),
        (GradientAccumulationPlugin(), "num_steps", 2, 0, "too small"),
        (ProfileKwargs(), "activities", ["cpu"], "gpu", "is not a choice"),
        (ProjectConfiguration(), "total_limit", 3, 0, "too small"),
        (TorchDynamoPlugin(options={"a": 1}), "fullgraph", True, None, "fullgraph=None is None"),
        (TorchDynamoPlugin(options={"a": 1}), "dynamic", True, 3, "dynamic=3 is of type"),
        (AutocastKwargs(), "cache_enabled", False, 1, "cache_enabled=1 is of type"),
    ],
)
def test_a_field_is_checked_when_it_is_set_as_when_the_object_is_built(options, name, good, bad, text):
    setattr(options, name, good)
    assert getattr(options, name) == good
    with pytest.raises(ConfigError, match=text):
        setattr(options, name, bad)
    assert getattr(options, name) == good


def test_a_value_is_written_in_its_usual_form_and_fields_are_checked_together():
    options = DistributedDataParallelKwargs()
    options.comm_hook = "bf16"
    assert options.comm_hook is utils.DDPCommunicationHookType.BF16
    plugin = TorchDynamoPlugin("eager", options={"a": 1})
    plugin.backend = "inductor"
    assert plugin.backend is utils.DynamoBackend.INDUCTOR


def test_a_name_that_is_no_field_is_refused():
    with pytest.raises(AttributeError, match=r"field 'data_sede'.*mean 'data_seed'"):
        DataLoaderConfiguration().data_sede = 3


def test_options_are_copied_and_pickled_like_any_dataclass():
    for kind in KINDS:
        options = kind()
        for again in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
            assert again == options
            assert vars(again).keys() == {field.name for field in dataclasses.fields(kind)}
    changed = copy.copy(options)
    changed.fullgraph = True
    assert not options.fullgraph

    @dataclasses.dataclass(frozen=True)
    class Frozen(KwargsHandler):
        size: int = 1

    @dataclasses.dataclass
    class Own(KwargsHandler):
        size: int = 1

        def __post_init__(self) -> None:
            self.area = self.size**2

    with pytest.raises(dataclasses.FrozenInstanceError):
        Frozen().size = 2
    own = Own(3)
    own.color = "red"
    assert (own.area, own.to_kwargs()) == (9, {"size": 3})


def test_what_is_set_before_it_is_used_counts():
    config, plugin = DataLoaderConfiguration(), GradientAccumulationPlugin(num_steps=2)
    autocast, scaler = AutocastKwargs(), GradScalerKwargs()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        dataloader_config=config,
        gradient_accumulation_plugin=plugin,
        kwargs_handlers=[autocast, scaler],
    )
    assert accelerator.dataloader_config is config
    config.use_seedable_sampler = True
    config.data_seed = 42
    autocast.cache_enabled = False
    first, model = accelerator.prepare(DataLoader(range(9), shuffle=True), nn.Linear(1, 1))
    again = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=42))
    assert [int(row) for row in first] == [int(row) for row in again.prepare(DataLoader(range(9), shuffle=True))]
    assert model.forward.arguments["cache_enabled"] is False
    accelerator.even_batches = False
    assert (first.even, config.even_batches) == (True, False)  # for loaders that are prepared from now on


def test_attributes_of_an_accelerator_that_scripts_set_count_for_what_is_prepared_afterwards():
    accelerator = Accelerator(cpu=True)
    accelerator.device_placement = False
    accelerator.step_scheduler_with_optimizer = False
    accelerator.rng_types = ["torch"]
    accelerator.dataloader_config = config = DataLoaderConfiguration(split_batches=True)
    accelerator.profile_handler = ProfileKwargs(with_flops=True)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    loader = accelerator.prepare(DataLoader(range(4)))
    assert (scheduler.step_with_optimizer, scheduler.split_batches, loader.device) == (False, True, None)
    assert accelerator.dataloader_config is config
    assert [str(kind) for kind in accelerator.rng_types] == ["torch"]
    assert accelerator.profile_handler.with_flops
    for name, value, text in (
        ("device_placement", "no", "of type str"),
        ("dataloader_config", {"data_seed": 1}, r"Write dataloader_config=DataLoaderConfiguration\("),
        ("profile_handler", None, r"Write profile_handler = ProfileKwargs\(\)"),
        ("rng_types", ["torsh"], "Did you mean 'torch'"),
    ):
        with pytest.raises(ConfigError, match=text):
            setattr(accelerator, name, value)


def test_the_environment_counts_more_than_the_argument_and_says_so(monkeypatch, caplog):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 4
    assert Accelerator(cpu=True, gradient_accumulation_steps=4).gradient_accumulation_steps == 4
    assert not caplog.messages
    assert Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps == 4
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 counts more" in caplog.text
    plugin = GradientAccumulationPlugin(num_steps=3)
    assert Accelerator(cpu=True, gradient_accumulation_plugin=plugin).gradient_accumulation_steps == 3


def test_on_several_ranks_options_set_before_prepare_count(run_ranks):
    def train():
        options, process_group = DistributedDataParallelKwargs(), InitProcessGroupKwargs()
        process_group.timeout = timedelta(seconds=50)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[options, process_group])
        options.find_unused_parameters = True
        accelerator.dataloader_config.split_batches = True
        torch.manual_seed(0)
        model = Half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        loader = accelerator.prepare(DataLoader(range(8), batch_size=4))
        for _ in range(3):  # without find_unused_parameters the second step raises
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        second = accelerator.prepare_model(Half())
        sizes = [len(batch) for batch in loader]
        return second.find_unused_parameters, sizes, scheduler.repeats

    assert run_ranks(train) == [(True, [2, 2], 1)] * 2

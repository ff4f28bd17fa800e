"""Options of FSDP, and the blocks of models that they find."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fixtures.block_models import Block, Model, Tied
from fixtures.old_torch import SHARDS_ON_CPUS
from fixtures.ranks import RunRanks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin as Plugin, resolve_fsdp
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.strategies.blocks import blocks_by_class, blocks_by_size, check_ties, find_blocks


def test_tied_weights_in_two_blocks_are_refused_by_name():
    model = Tied()
    check_ties(model, [model.block])
    with pytest.raises(ConfigError, match=r"words\.weight and head\.weight"):
        check_ties(model, [model.head])


def test_blocks_are_found_by_class_by_size_and_by_what_the_model_says():
    model = Model()
    assert blocks_by_class(model) == [model.blocks[1], model.blocks[0]]
    assert blocks_by_class(Tied()) == []
    assert blocks_by_class(model, ["Linear"])[-1] is model.first
    with pytest.raises(ConfigError, match=r"names Blok.*Block"):
        blocks_by_class(model, ["Blok", "Block"])
    size = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    assert blocks_by_size(model, size) == list(model.blocks)
    assert model.blocks[0].up in blocks_by_size(model, 8 * 13)
    assert blocks_by_size(model, 10**6) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fsdp_version": 3}, "fsdp_version=3 .*Write fsdp_version=2"),
        ({"sharding_strategy": "NO_SHARD"}, "sharding_strategy='NO_SHARD'.*DistributedDataParallel"),
        ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, "Leave sharding_strategy out"),
        ({"use_orig_params": 1}, "use_orig_params=1"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "'LOCAL_STATE_DICT' is not a choice.*'sharded_state_dict'"),
        ({"param_init_fn": print}, "param_init_fn=.*1 of FSDP.*Leave it"),
        ({"activation_checkpointing_offload": True}, "activation_checkpointing=True too"),
        (
            {"mixed_precision_policy": {"buffer_dtype": "bf16"}},
            "mixed_precision_policy=.*unexpected keyword argument 'buffer_dtype'",
        ),
        ({"mixed_precision_policy": "fp8"}, "is not a choice"),
        ({"cpu_offload": "yes"}, "Write cpu_offload=True"),
        ({"auto_wrap_policy": "size_based_wrap"}, "needs a size"),
        ({"reshard_after_forward": 3}, "not a yes or no"),
    ],
)
def test_options_that_fsdp2_has_not_are_refused_with_what_to_write(options, said):
    with pytest.raises(ConfigError, match=said):
        Plugin(**options)


def test_options_of_version_1_are_translated():
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy, StateDictType

    with pytest.warns(UserWarning, match="fsdp_version=1 is translated"):
        plugin = Plugin(
            fsdp_version=1,
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            backward_prefetch=BackwardPrefetch.BACKWARD_POST,
            cpu_offload=CPUOffload(offload_params=True),
            state_dict_type=StateDictType.FULL_STATE_DICT,
            mixed_precision_policy="bf16",
        )
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is False
    assert plugin.cpu_offload is True
    assert not plugin.saves_shards
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    plugin.set_state_dict_type("sharded_state_dict")
    assert plugin.saves_shards
    assert Plugin(reshard_after_forward="SHARD_GRAD_OP").reshard_after_forward is False


def test_policies_find_blocks_and_one_that_finds_none_is_refused():
    model, tied = Model(), Tied()
    assert find_blocks(model, Plugin()) == [model.blocks[1], model.blocks[0]]
    assert find_blocks(model, Plugin(auto_wrap_policy="no_wrap")) == []
    assert find_blocks(tied, Plugin()) == []
    assert set(find_blocks(model, Plugin(auto_wrap_policy=ModuleWrapPolicy({Block})))) == set(model.blocks)
    repeated = nn.Sequential(Block(), Block())
    assert find_blocks(repeated, Plugin()) == list(repeated)
    repeated[0].up.weight = repeated[1].up.weight
    assert find_blocks(repeated, Plugin()) == []  # they were not asked for, and their tie stays whole
    for options, said in (
        ({"min_num_params": 10**6}, "min_num_params=1000000 finds no block in Model.*transformer_cls_names_to_wrap"),
        ({"auto_wrap_policy": ModuleWrapPolicy({nn.Conv2d})}, "finds no block in Model"),
        ({"transformer_cls_names_to_wrap": ["Blok"]}, "names Blok"),
    ):
        with pytest.raises(ConfigError, match=said):
            find_blocks(model, Plugin(**options))
    with pytest.raises(ConfigError, match=r"_no_split_modules, finds.* Write transformer_cls_names_to_wrap"):
        find_blocks(tied, Plugin(auto_wrap_policy="transformer_based_wrap"))


LAUNCHED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
"""What `accelerate launch --use_fsdp --fsdp_version 2` sets, whatever else it is given."""


@pytest.mark.parametrize(
    ("policy", "size"), [(None, None), ("TRANSFORMER_BASED_WRAP", None), ("SIZE_BASED_WRAP", 100_000_000)]
)
def test_what_accelerates_launcher_sets_without_being_asked_is_no_error(policy, size):
    asked = {} if policy is None else {"FSDP_AUTO_WRAP_POLICY": policy}
    plugin = resolve_fsdp(None, Environment(LAUNCHED | asked))
    assert plugin is not None
    assert plugin.min_num_params == size


def test_options_that_the_environment_adds_nothing_to_stay_the_users_object():
    plugin = Plugin()
    assert resolve_fsdp(plugin, Environment({})) is plugin


def test_fsdp_on_cpus_is_refused_where_pytorch_adds_up_what_it_should_average(run_ranks: RunRanks):
    def shard() -> str:
        if SHARDS_ON_CPUS:
            torch.__version__ = "2.8.0+cu128"  # type: ignore[assignment]
        with pytest.raises(ConfigError) as caught:
            Accelerator(cpu=True, fsdp_plugin=Plugin())
        return str(caught.value)

    said = run_ranks(shard)
    assert all("PyTorch 2.8.0" in one and "pip install 'torch>=2.9'" in one and "DDP" in one for one in said)


def test_gloo_averages_the_gradients_of_shards(run_ranks: RunRanks):
    def average() -> list[float]:
        Accelerator(cpu=True)
        part = torch.empty(1)
        # What FSDP2 does with gradients. PyTorch 2.8 returns 2 and 4.
        dist.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0]), op=dist.ReduceOp.AVG)
        return part.tolist()

    if not SHARDS_ON_CPUS:
        pytest.skip(f"PyTorch {torch.__version__} adds up, and FSDP on CPUs is refused")
    assert run_ranks(average) == [[1.0], [2.0]]

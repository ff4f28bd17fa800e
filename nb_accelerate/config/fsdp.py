"""How models are sharded with FSDP2, torch's ``fully_shard``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.config.checks import check_choice, check_flag, check_options, check_whole
from nb_accelerate.config.kwargs import KwargsHandler
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.config.env import Environment

_WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")

_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fsdp_version": ((None, 2), "Only FSDP2 (fully_shard) is supported. Write fsdp_version=2, or leave it out"),
    "sharding_strategy": (
        (None, "FULL_SHARD"),
        "FSDP2 has no sharding_strategy. Write reshard_after_forward=True for FULL_SHARD, or False for SHARD_GRAD_OP",
    ),
    "backward_prefetch": ((None,), "FSDP2 prefetches in backward by itself. Leave it out"),
    "mixed_precision_policy": ((None,), "Sharded models are trained in float32 in this version. Leave it out"),
    "cpu_offload": ((None, False), "Keeping shards in host memory is not supported in this version. Leave it out"),
    "ignored_modules": ((None,), "All parameters are sharded in this version. Leave it out"),
    "state_dict_type": (
        (None, "FULL_STATE_DICT"),
        "Checkpoints hold whole weights, as without sharding. Write FULL_STATE_DICT, or leave it out",
    ),
    "state_dict_config": ((None,), "Whole weights are collected in host memory. Leave it out"),
    "optim_state_dict_config": ((None,), "Whole states are collected in host memory. Leave it out"),
    "limit_all_gathers": ((None, True), "FSDP2 always limits them. Leave it out"),
    "use_orig_params": ((None, True), "FSDP2 always keeps the parameters as they were defined. Leave it out"),
    "param_init_fn": ((None,), "Models on the device meta are not supported in this version. Leave it out"),
    "sync_module_states": ((None, True), "All ranks always get the weights of rank 0. Leave it out"),
    "forward_prefetch": ((None, False), "Explicit prefetching is not supported in this version. Leave it out"),
    "activation_checkpointing": (
        (None, False),
        "Call torch.utils.checkpoint in the model, or model.gradient_checkpointing_enable(). Leave it out",
    ),
    "activation_checkpointing_offload": ((None, False), "It is not supported in this version. Leave it out"),
    "cpu_ram_efficient_loading": ((None, False), "Every rank loads the model in this version. Leave it out"),
}
"""Fields of accelerate's plugin of which this version knows one way: the values that ask for it, and what to write."""


@dataclass
class FullyShardedDataParallelPlugin(KwargsHandler):
    """Shard models over ranks with FSDP2: ``Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())``.

    Every rank holds a part of each parameter, of its gradient and of its optimizer state. A block is gathered when its
    forward or backward runs, and the rest of the model is one more block. Names are accelerate's; of the fields that
    are not described here only the default is supported.

    Attributes:
        reshard_after_forward: drop the gathered parameters of a block after its forward and gather them again for its
            backward: less memory, more traffic. Default: True.
        auto_wrap_policy: how blocks are found: ``"transformer_based_wrap"`` by their class, ``"size_based_wrap"`` by
            ``min_num_params``, ``"no_wrap"`` makes the model one block. Default: by size if ``min_num_params`` is
            given, else by class if classes are known, else one block.
        transformer_cls_names_to_wrap: names of the classes of blocks, as a list or separated by commas. Default: the
            model's ``_no_split_modules``, which models of transformers have.
        min_num_params: with ``"size_based_wrap"``, the parameters (numbers, not tensors) that a block has at least.

    Raises:
        ConfigError: a value is not supported, of the wrong type, or contradicts another one.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: bool | str | None = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | None = None
    cpu_offload: bool | None = None
    ignored_modules: Any = None
    state_dict_type: str | None = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Sequence[str] | str | None = None
    min_num_params: int | None = None

    @override
    def _check(self) -> None:
        for name, (values, instead) in _SUPPORTED.items():
            value = getattr(self, name)
            word = value.upper() if isinstance(value, str) else value
            if not any(word is one or (type(word) is type(one) and word == one) for one in values):
                raise ConfigError(f"{name}={value!r} of FullyShardedDataParallelPlugin cannot be used. {instead}.")
        if isinstance(self.transformer_cls_names_to_wrap, str):
            names = [name.strip() for name in self.transformer_cls_names_to_wrap.split(",")]
            object.__setattr__(self, "transformer_cls_names_to_wrap", [name for name in names if name])
        if self.auto_wrap_policy is not None:
            policy = check_choice("auto_wrap_policy", self.auto_wrap_policy, _WRAP_POLICIES)
            object.__setattr__(self, "auto_wrap_policy", policy)
        if self.reshard_after_forward is not None:
            check_flag("reshard_after_forward", self.reshard_after_forward)
        if self.min_num_params is not None:
            check_whole("min_num_params", self.min_num_params, at_least=1)
        if self.auto_wrap_policy == "size_based_wrap" and self.min_num_params is None:
            raise ConfigError("auto_wrap_policy='size_based_wrap' needs a size. Write min_num_params=1_000_000, say.")
        if self.auto_wrap_policy not in {None, "size_based_wrap"} and self.min_num_params is not None:
            raise ConfigError(
                f"min_num_params={self.min_num_params} is not used by auto_wrap_policy={self.auto_wrap_policy!r}. "
                "Write auto_wrap_policy='size_based_wrap', or leave min_num_params out."
            )


def resolve_fsdp(
    plugin: FullyShardedDataParallelPlugin | None, environment: Environment
) -> FullyShardedDataParallelPlugin | None:
    """Choose how models are sharded: the plugin, and for what it leaves open ``FSDP_*`` variables.

    Returns:
        None if there is no plugin, and ``ACCELERATE_USE_FSDP`` is not set: models are not sharded.

    Raises:
        ConfigError: a value is not supported.
    """
    given = check_options("fsdp_plugin", plugin, FullyShardedDataParallelPlugin)
    if given is None and not environment.flag("ACCELERATE_USE_FSDP"):
        return None
    given = given or FullyShardedDataParallelPlugin()
    found: dict[str, Any] = {
        "fsdp_version": environment.whole("FSDP_VERSION"),
        "sharding_strategy": environment.text("FSDP_SHARDING_STRATEGY"),
        "reshard_after_forward": environment.flag("FSDP_RESHARD_AFTER_FORWARD"),
        "auto_wrap_policy": environment.text("FSDP_AUTO_WRAP_POLICY"),
        "cpu_offload": environment.flag("FSDP_OFFLOAD_PARAMS"),
        "state_dict_type": environment.text("FSDP_STATE_DICT_TYPE"),
        "use_orig_params": environment.flag("FSDP_USE_ORIG_PARAMS"),
        "sync_module_states": environment.flag("FSDP_SYNC_MODULE_STATES"),
        "forward_prefetch": environment.flag("FSDP_FORWARD_PREFETCH"),
        "activation_checkpointing": environment.flag("FSDP_ACTIVATION_CHECKPOINTING"),
        "transformer_cls_names_to_wrap": environment.text("FSDP_TRANSFORMER_CLS_TO_WRAP"),
    }
    # accelerate's launcher always sets a size, and transformers reads FSDP_CPU_RAM_EFFICIENT_LOADING by itself: with it
    # only rank 0 loads weights, and those of rank 0 are what all ranks get here.
    if (given.auto_wrap_policy or str(found["auto_wrap_policy"])).lower() == "size_based_wrap":
        found["min_num_params"] = environment.whole("FSDP_MIN_NUM_PARAMS") or None
    missing = {name: value for name, value in found.items() if value is not None and getattr(given, name) is None}
    return replace(given, **missing) if missing else given

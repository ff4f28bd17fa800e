"""How models are sharded with FSDP2, torch's ``fully_shard``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.config.checks import check_choice, check_flag, check_options, check_whole, described, shown
from nb_accelerate.base.config.kwargs import KwargsHandler
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.base.config.env import Environment

_WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
_STRATEGIES = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
"""Sharding strategies of version 1, and the ``reshard_after_forward`` that means the same."""
_STRATEGY_NUMBERS = {
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "NO_SHARD",
    "4": "HYBRID_SHARD",
    "5": "HYBRID_SHARD_ZERO2",
}
_STATE_DICT_TYPES = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_POLICY_KEYS = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "limit_all_gathers": ((None, True), "FSDP2 always limits them. Leave it out"),
    "state_dict_config": ((None,), "Whole weights are collected in host memory, shards are not moved. Leave it out"),
    "optim_state_dict_config": ((None,), "Whole states are collected in host memory. Leave it out"),
    "param_init_fn": (
        (None,),
        "A model on the device meta gets the weights of rank 0. Make it with weights on rank 0 and leave it out",
    ),
}
"""Fields of version 1 that FSDP2 lacks: the values that are accepted without effect, and what to do instead."""


@dataclass
class FullyShardedDataParallelPlugin(KwargsHandler):
    """Shard models over ranks with FSDP2: ``Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())``.

    Every rank holds a part of each parameter, of its gradient and of its optimizer state. A block is gathered when its
    forward or backward runs, and the rest of the model is one more block. Names are accelerate's. Options of version 1
    of FSDP are translated; those that FSDP2 lacks are refused.

    Attributes:
        fsdp_version: 2. Version 1 is accepted with a warning: its options are translated, and FSDP2 trains.
        sharding_strategy: version 1's name for ``reshard_after_forward``: ``"FULL_SHARD"`` is True,
            ``"SHARD_GRAD_OP"`` False. ``"HYBRID_SHARD"`` also keeps a whole model on each machine.
        reshard_after_forward: drop the gathered parameters of a block after its forward and gather them again for its
            backward: less memory, more traffic. Default: True; the part outside of blocks stays gathered.
        backward_prefetch: accepted without effect: FSDP2 gathers the next block while backward computes one.
        mixed_precision_policy: dtypes in which blocks compute and reduce: a `torch.distributed.fsdp.
            MixedPrecisionPolicy`, a dict of its arguments, or ``"bf16"``, ``"fp16"``, ``"fp32"`` for all of them.
            Default: parameters in the ``mixed_precision`` of the `Accelerator`, gradients reduced in float32.
        auto_wrap_policy: how blocks are found: ``"transformer_based_wrap"`` by their class, ``"size_based_wrap"`` by
            ``min_num_params``, ``"no_wrap"`` makes the model one block; or a function as those of
            `torch.distributed.fsdp.wrap`. Default: by size or class where these are given, else the layers that the
            model repeats.
        cpu_offload: keep shards of parameters, gradients and optimizer state in host memory: True, or a
            `torch.distributed.fsdp.CPUOffloadPolicy`.
        ignored_modules: parts that are not sharded: modules, or a regular expression for their whole names.
        state_dict_type: what `save_state` writes: ``"SHARDED_STATE_DICT"``, the default, a part from each rank;
            ``"FULL_STATE_DICT"`` the files of a model that is not sharded. Either is loaded.
        use_orig_params: accepted without effect: FSDP2 always keeps the parameters as they were defined.
        sync_module_states: accepted without effect: all ranks get the weights of rank 0.
        forward_prefetch: gather the next block in the order of the model while one is computed in forward.
        activation_checkpointing: keep only the inputs of blocks, and compute the rest again in backward.
        activation_checkpointing_offload: also keep these inputs in host memory.
        cpu_ram_efficient_loading: only rank 0 loads pretrained models of transformers; others get its weights.
            A model on the device meta, on other ranks than 0, gets them in any case.
        transformer_cls_names_to_wrap: names of the classes of blocks, as a list or separated by commas. Default: the
            model's ``_no_split_modules``, which models of transformers have.
        min_num_params: with ``"size_based_wrap"``, the least number of elements of all parameters of a block.

    Raises:
        ConfigError: a value is not supported, of the wrong type, or contradicts another one.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: bool | str | None = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | Callable[..., bool] | None = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
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
        for name, (values, instead) in _REFUSED.items():
            value = getattr(self, name)
            if not any(value is one for one in values):
                raise ConfigError(f"{name}={shown(value)} of FullyShardedDataParallelPlugin cannot be used. {instead}.")
        self._check_version()
        self._set("sharding_strategy", _strategy(self.sharding_strategy))
        self._check_reshard()
        self._check_wrapping()
        for name in (
            "use_orig_params",
            "sync_module_states",
            "forward_prefetch",
            "activation_checkpointing",
            "activation_checkpointing_offload",
            "cpu_ram_efficient_loading",
        ):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigError(
                "activation_checkpointing_offload=True keeps what activation_checkpointing leaves. Write "
                "activation_checkpointing=True too, or leave it out."
            )
        if self.backward_prefetch is not None:
            word = _name_of(self.backward_prefetch)
            check_choice("backward_prefetch", word, ("no_prefetch", "backward_pre", "backward_post"))
        if self.state_dict_type is not None:
            self._set("state_dict_type", _state_dict_type(self.state_dict_type))
        self._set("mixed_precision_policy", _precision_policy(self.mixed_precision_policy))
        self._set("cpu_offload", _offload(self.cpu_offload))
        if self.ignored_modules is not None and not isinstance(self.ignored_modules, (str, Iterable)):
            raise ConfigError(
                f"ignored_modules={shown(self.ignored_modules)} is {described(self.ignored_modules)}. Write a list of "
                "modules, or a regular expression for their names."
            )

    @override
    def _tell(self, name: str, value: Any) -> None:
        if name != "state_dict_type":  # it is read at every save, so a change is never too late
            super()._tell(name, value)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_version(self) -> None:
        if self.fsdp_version is None:
            return
        if str(self.fsdp_version) not in {"1", "2"}:
            raise ConfigError(f"fsdp_version={self.fsdp_version!r} is not a version of FSDP. Write fsdp_version=2.")
        if int(self.fsdp_version) == 1:
            warnings.warn(
                "fsdp_version=1 is translated: FSDP2 (fully_shard) trains the same with the same options. Write "
                "fsdp_version=2, or leave it out.",
                stacklevel=4,
            )
        self._set("fsdp_version", 2)

    def _check_reshard(self) -> None:
        given: Any = self.reshard_after_forward
        if isinstance(given, str) or (given is not None and hasattr(given, "name")):
            word = _name_of(given)
            if word.lower() in {"true", "false"}:
                given = word.lower() == "true"
            elif word in _STRATEGIES:  # as version 1 has it
                given = _STRATEGIES[word]
        if given is not None:
            check_flag("reshard_after_forward", given)
        if self.sharding_strategy is not None:
            wanted = _STRATEGIES[self.sharding_strategy]
            if given is None:
                given = wanted
            elif given != wanted:
                raise ConfigError(
                    f"sharding_strategy={self.sharding_strategy!r} means reshard_after_forward={wanted}, and "
                    f"reshard_after_forward={given} was given too. Leave sharding_strategy out."
                )
        self._set("reshard_after_forward", given)

    def _check_wrapping(self) -> None:
        if isinstance(self.transformer_cls_names_to_wrap, str):
            names = [name.strip() for name in self.transformer_cls_names_to_wrap.split(",")]
            self._set("transformer_cls_names_to_wrap", [name for name in names if name])
        policy = self.auto_wrap_policy
        if policy is not None and not callable(policy):
            policy = check_choice("auto_wrap_policy", policy, _WRAP_POLICIES)
            self._set("auto_wrap_policy", policy)
        if self.min_num_params is not None:
            check_whole("min_num_params", self.min_num_params, at_least=1)
        if policy == "size_based_wrap" and self.min_num_params is None:
            raise ConfigError("auto_wrap_policy='size_based_wrap' needs a size. Write min_num_params=1_000_000, say.")
        if policy not in {None, "size_based_wrap"} and self.min_num_params is not None:
            raise ConfigError(
                f"min_num_params={self.min_num_params} is not used by auto_wrap_policy={policy!r}. "
                "Write auto_wrap_policy='size_based_wrap', or leave min_num_params out."
            )
        if policy not in {None, "transformer_based_wrap"} and self.transformer_cls_names_to_wrap:
            raise ConfigError(
                f"transformer_cls_names_to_wrap is not used by auto_wrap_policy={policy!r}. "
                "Write auto_wrap_policy='transformer_based_wrap', or leave the names out."
            )

    @property
    def saves_shards(self) -> bool:
        """Whether `save_state` writes a part from each rank; else whole weights."""
        return str(self.state_dict_type) != "FULL_STATE_DICT"

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set what `save_state` writes from now on.

        Args:
            state_dict_type: ``"FULL_STATE_DICT"`` or ``"SHARDED_STATE_DICT"``, the default.
        """
        self.state_dict_type = _STATE_DICT_TYPES[1] if state_dict_type is None else state_dict_type

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set ``mixed_precision_policy`` to one dtype, unless there is one already.

        Args:
            mixed_precision: ``"bf16"``, ``"fp16"`` or ``"fp32"``, or the dtype itself.
            buffer_autocast: without effect; FSDP2 does not convert buffers.
            override: also if there is one already.
        """
        del buffer_autocast
        if override or self.mixed_precision_policy is None:
            self.mixed_precision_policy = mixed_precision


def _name_of(value: Any) -> str:
    """Return the upper-case name of a text, of an enum's member, or of a number of version 1."""
    word = str(getattr(value, "name", value)).upper()
    return _STRATEGY_NUMBERS.get(word, word)


def _strategy(value: Any) -> str | None:
    if value is None:
        return None
    word = _name_of(value)
    if word == "NO_SHARD":
        raise ConfigError(
            "sharding_strategy='NO_SHARD' keeps the whole model on every rank, which is DistributedDataParallel. "
            "Leave fsdp_plugin (or --use_fsdp) out."
        )
    return check_choice("sharding_strategy", word, [name.lower() for name in _STRATEGIES]).upper()


def _state_dict_type(value: Any) -> str:
    word = str(getattr(value, "name", value)).upper()
    word = {"1": "FULL_STATE_DICT", "2": "LOCAL_STATE_DICT", "3": "SHARDED_STATE_DICT"}.get(word, word)
    if word == "LOCAL_STATE_DICT":
        raise ConfigError("state_dict_type='LOCAL_STATE_DICT' is not in FSDP2. Write 'SHARDED_STATE_DICT'.")
    return check_choice("state_dict_type", word, [name.lower() for name in _STATE_DICT_TYPES]).upper()


def _precision_policy(value: Any) -> Any:
    """Return torch's policy for a name, a dtype or a dict of arguments."""
    if value is None:
        return None
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, Mapping):
        odd = [key for key in value if key not in _POLICY_KEYS]
        if odd:
            raise ConfigError(
                f"mixed_precision_policy has {odd[0]!r}, which FSDP2 has not. Its keys are {', '.join(_POLICY_KEYS)}."
            )
        return MixedPrecisionPolicy(**{key: _dtype(one) for key, one in value.items()})
    dtype = _dtype(value)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"mixed_precision_policy={shown(value)} is {described(value)}. Write 'bf16', 'fp16' or 'fp32', or "
            "torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)."
        )
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)


def _dtype(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    import torch

    return getattr(torch, _DTYPES[check_choice("mixed_precision_policy", value, _DTYPES)])


def _offload(value: Any) -> Any:
    """Return True, False or torch's policy; `OffloadPolicy` alone means that nothing is offloaded."""
    if value is None or isinstance(value, bool):
        return value
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if isinstance(value, CPUOffloadPolicy):
        return value
    if isinstance(value, OffloadPolicy):
        return False
    offloads = getattr(value, "offload_params", None)  # version 1's CPUOffload
    if isinstance(offloads, bool):
        return offloads
    raise ConfigError(
        f"cpu_offload={shown(value)} is {described(value)}. Write cpu_offload=True, or a "
        "torch.distributed.fsdp.CPUOffloadPolicy."
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
        "backward_prefetch": environment.text("FSDP_BACKWARD_PREFETCH"),
        "auto_wrap_policy": environment.text("FSDP_AUTO_WRAP_POLICY"),
        "cpu_offload": environment.flag("FSDP_OFFLOAD_PARAMS"),
        "ignored_modules": environment.text("FSDP_IGNORED_MODULES"),
        "state_dict_type": environment.text("FSDP_STATE_DICT_TYPE"),
        "use_orig_params": environment.flag("FSDP_USE_ORIG_PARAMS"),
        "sync_module_states": environment.flag("FSDP_SYNC_MODULE_STATES"),
        "forward_prefetch": environment.flag("FSDP_FORWARD_PREFETCH"),
        "activation_checkpointing": environment.flag("FSDP_ACTIVATION_CHECKPOINTING"),
        "activation_checkpointing_offload": environment.flag("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"),
        "cpu_ram_efficient_loading": environment.flag("FSDP_CPU_RAM_EFFICIENT_LOADING"),
    }
    # accelerate's launcher always sets both, and looks at the strategy with version 1 only.
    if given.reshard_after_forward is None:
        is_first = found["fsdp_version"] == 1
        name = "FSDP_SHARDING_STRATEGY" if is_first else "FSDP_RESHARD_AFTER_FORWARD"
        found["sharding_strategy" if is_first else "reshard_after_forward"] = environment.text(name)
    # It sets a size and classes whatever the policy is, too.
    policy = _policy_word(given.auto_wrap_policy or found["auto_wrap_policy"])
    if policy == "size_based_wrap":
        found["min_num_params"] = environment.whole("FSDP_MIN_NUM_PARAMS") or None
    if policy in {None, "transformer_based_wrap"} and given.min_num_params is None:
        found["transformer_cls_names_to_wrap"] = environment.text("FSDP_TRANSFORMER_CLS_TO_WRAP")
    missing = {name: value for name, value in found.items() if value is not None and getattr(given, name) is None}
    return replace(given, **missing) if missing else given


def _policy_word(policy: Any) -> Any:
    return policy.lower() if isinstance(policy, str) else policy

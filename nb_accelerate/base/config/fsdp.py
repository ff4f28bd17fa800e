"""How models are sharded with FSDP2, torch's ``fully_shard``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from nb_accelerate.base.config.checks import check_choice, check_flag, check_options, check_whole, described, shown
from nb_accelerate.base.config.kwargs import KwargsHandler
from nb_accelerate.base.config.options import fields_in
from nb_accelerate.base.config.variables import FSDP, USES
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from nb_accelerate.base.config.env import Environment

_WRAP_POLICIES = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
FSDP_AUTO_WRAP_POLICY = [policy.upper() for policy in _WRAP_POLICIES]
FSDP_SHARDING_STRATEGY = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
# Sharding strategies of version 1, and the ``reshard_after_forward`` that means the same.
RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}
_STATE_DICT_TYPES = ("full_state_dict", "sharded_state_dict")
_PREFETCHES = ("no_prefetch", "backward_pre", "backward_post")
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
# Fields that FSDP2 has nothing for; their defaults, None or True, are accepted without effect.
_OF_VERSION_1 = ("limit_all_gathers", "state_dict_config", "optim_state_dict_config", "param_init_fn")

# Variables that are not read by themselves: which of them count depends on other options.
_DEPENDENT = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_min_num_params")


@dataclass
class FullyShardedDataParallelPlugin(KwargsHandler):
    """Shard models over ranks with FSDP2: ``Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())``.

    Every rank holds a part of each parameter, of its gradient and of its optimizer state. A block is gathered when its
    forward or backward runs, and the rest of the model is one more block. Names are accelerate's. Options of version 1
    of FSDP are translated; options that FSDP2 lacks are refused.

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

    _checks: ClassVar[dict[str, Any]] = {
        "fsdp_version": lambda _, value: _version(value),
        "sharding_strategy": lambda _, value: _strategy(value),
        "backward_prefetch": lambda name, value: check_choice(name, _name_of(value), _PREFETCHES) and value,
        "mixed_precision_policy": lambda _, value: _precision_policy(value),
        "auto_wrap_policy": lambda name, value: value if callable(value) else check_choice(name, value, _WRAP_POLICIES),
        "cpu_offload": lambda _, value: _offload(value),
        "state_dict_type": lambda name, value: check_choice(name, _name_of(value), _STATE_DICT_TYPES).upper(),
        "transformer_cls_names_to_wrap": lambda _, value: _names(value),
        "min_num_params": partial(check_whole, at_least=1),
    }

    @override
    def _check(self) -> None:
        for name in _OF_VERSION_1:
            value = getattr(self, name)
            if value is not None and value is not True:
                raise ConfigError(
                    f"{name}={shown(value)} is an option of version 1 of FSDP, which FSDP2 has not. Leave it out."
                )
        super()._check()
        self._check_reshard()
        if self.auto_wrap_policy == "size_based_wrap" and self.min_num_params is None:
            raise ConfigError("auto_wrap_policy='size_based_wrap' needs a size. Write min_num_params=1_000_000, say.")
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigError(
                "activation_checkpointing_offload=True keeps what activation_checkpointing leaves. Write "
                "activation_checkpointing=True too, or leave it out."
            )

    def _check_reshard(self) -> None:
        reshard: Any = self.reshard_after_forward
        if reshard is not None and not isinstance(reshard, bool):
            # The word of an environment variable, or a strategy, as version 1 has it.
            word = _name_of(reshard)
            reshard = RESHARDS.get(word, {"TRUE": True, "FALSE": False}.get(word, reshard))
            check_flag("reshard_after_forward", reshard)
        if self.sharding_strategy is not None:
            wanted = RESHARDS[self.sharding_strategy]
            if reshard not in {None, wanted}:
                raise ConfigError(
                    f"sharding_strategy={self.sharding_strategy!r} means reshard_after_forward={wanted}, and "
                    f"reshard_after_forward={reshard} was given too. Leave sharding_strategy out."
                )
            reshard = wanted
        self._set("reshard_after_forward", reshard)

    @property
    def saves_shards(self) -> bool:
        """Whether `save_state` writes a part from each rank; else whole weights."""
        return str(self.state_dict_type) != "FULL_STATE_DICT"

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set what `save_state` writes from now on.

        Args:
            state_dict_type: ``"FULL_STATE_DICT"`` or ``"SHARDED_STATE_DICT"``, the default.
        """
        self.state_dict_type = "SHARDED_STATE_DICT" if state_dict_type is None else state_dict_type

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Take the classes of blocks from a model of transformers, where classes are asked for and none are named.

        Preparing a model does so by itself, and takes other models too.
        """
        classes = getattr(model, "_no_split_modules", None)
        is_by_class = self.auto_wrap_policy == "transformer_based_wrap"
        if is_by_class and classes and self.transformer_cls_names_to_wrap is None:
            self.transformer_cls_names_to_wrap = list(classes)

    def set_cpu_offload(self) -> None:
        """Make torch's policy of ``cpu_offload=True``. Preparing a model does so by itself."""
        if self.cpu_offload is True:
            from torch.distributed.fsdp import CPUOffloadPolicy

            self.cpu_offload = CPUOffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Do nothing: ``cpu_offload`` is checked when it is set."""

    def validate_mixed_precision_policy(self) -> None:
        """Do nothing: ``mixed_precision_policy`` is checked when it is set."""

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
    """Return the upper-case name of a text, or of a member of an enum of torch."""
    return str(getattr(value, "name", value)).upper()


def _version(value: Any) -> int:
    if str(value) not in {"1", "2"}:
        raise ConfigError(f"fsdp_version={value!r} is not a version of FSDP. Write fsdp_version=2.")
    if int(value) == 1:
        warnings.warn(
            "fsdp_version=1 is translated: FSDP2 (fully_shard) trains the same with the same options. Write "
            "fsdp_version=2, or leave it out.",
            stacklevel=2,
        )
    return 2


def _strategy(value: Any) -> str:
    word = _name_of(value)
    if word == "NO_SHARD":
        raise ConfigError(
            "sharding_strategy='NO_SHARD' keeps the whole model on every rank, which is DistributedDataParallel. "
            "Leave fsdp_plugin (or --use_fsdp) out."
        )
    return check_choice("sharding_strategy", word, [name.lower() for name in RESHARDS]).upper()


def _names(value: Sequence[str] | str) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value
    return [name for part in parts if (name := part.strip())]


def _precision_policy(value: Any) -> Any:
    """Return torch's policy for a name, a dtype or a dict of arguments."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, Mapping):
        try:
            return MixedPrecisionPolicy(**{key: _dtype(dtype) for key, dtype in value.items()})
        except TypeError as error:
            raise ConfigError(f"mixed_precision_policy={shown(value)}: {error}") from None
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
    if isinstance(value, bool):
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
    """Choose how models are sharded: the plugin, then ``FSDP_*`` variables; None if nothing asks for it."""
    options = check_options("fsdp_plugin", plugin, FullyShardedDataParallelPlugin)
    if options is None and not environment.flag(USES["FSDP"]):
        return None
    options = options or FullyShardedDataParallelPlugin()
    variables = {key.removeprefix("fsdp_"): name for key, name in FSDP.items() if key not in _DEPENDENT}
    values = fields_in(environment, options, {"fsdp_version": FSDP["fsdp_version"], **variables})
    if options.cpu_offload is None:
        values["cpu_offload"] = environment.flag("FSDP_OFFLOAD_PARAMS")
    # accelerate's launcher always sets both, and looks at the strategy with version 1 only.
    if options.reshard_after_forward is None:
        is_first = values.get("fsdp_version") == 1
        name = "sharding_strategy" if is_first else "reshard_after_forward"
        values[name] = environment.text(f"FSDP_{name.upper()}")
    # It sets a size and classes for every policy, too.
    policy = options.auto_wrap_policy or values.get("auto_wrap_policy")
    policy = policy.lower() if isinstance(policy, str) else policy
    if policy == "size_based_wrap" and options.min_num_params is None:
        values["min_num_params"] = environment.whole("FSDP_MIN_NUM_PARAMS") or None
    uses_classes = policy in {None, "transformer_based_wrap"} and options.min_num_params is None
    if uses_classes and options.transformer_cls_names_to_wrap is None:
        values["transformer_cls_names_to_wrap"] = environment.text("FSDP_TRANSFORMER_CLS_TO_WRAP")
    return replace(options, **values) if any(value is not None for value in values.values()) else options

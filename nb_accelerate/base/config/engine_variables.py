"""The environment variables by which Hugging Face accelerate's launcher asks for FSDP and DeepSpeed.

The names are those that accelerate 1.15 sets (``accelerate/utils/launch.py``) and that transformers reads too. Keys are
those of the sections ``fsdp_config`` and ``deepspeed_config`` of its configuration file, which are also its flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

FSDP_KEYS = {
    f"fsdp_{name}": f"FSDP_{name.upper()}"
    for name in (
        "version",
        "sharding_strategy",
        "reshard_after_forward",
        "offload_params",
        "min_num_params",
        "auto_wrap_policy",
        "backward_prefetch",
        "state_dict_type",
        "forward_prefetch",
        "use_orig_params",
        "cpu_ram_efficient_loading",
        "sync_module_states",
        "activation_checkpointing",
        "activation_checkpointing_offload",
        "ignored_modules",
    )
} | {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
"""Variables by key."""

FSDP_DEFAULTS = {
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
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
"""What accelerate's launcher sets where nothing else is said, but for the version: it takes 1, which is not here."""

DEEPSPEED_KEYS = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
}
"""Variables by key. accelerate's launcher forgets those of the two paths, which its plugin reads."""

USES = {"FSDP": "ACCELERATE_USE_FSDP", "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED"}
"""Variables that ask for an engine, by the word for it in a configuration file."""

USE_MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"
"""Variable that says that those of `mesh_variables` count."""

MESH_KEYS = tuple(f"{kind}_size" for kind in ("dp_replicate", "dp_shard", "tp", "cp", "sp"))
"""Keys of ``parallelism_config``, and fields of `ParallelismConfig`. In a file of accelerate they have a prefix."""

MESH_PREFIX = "parallelism_config_"


def as_text(value: object) -> str:
    """Return a value of a configuration file as it stands in an environment variable."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def fsdp_variables(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables for keys of ``fsdp_config``, which may lack their ``fsdp_``; None values are left out."""
    return _variables({f"fsdp_{key.removeprefix('fsdp_')}": value for key, value in section.items()}, FSDP_KEYS)


def mesh_variables(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables for keys of ``parallelism_config``, which may lack their prefix; None values are left out.

    Keys that accelerate has for context and sequence parallelism are passed on too.
    """
    found = _with_prefix(section, MESH_PREFIX, MESH_PREFIX.upper())
    return {USE_MESH: "true", **found} if found else {}


def dynamo_variables(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables for keys of ``dynamo_config``, which may lack their ``dynamo_``."""
    return _with_prefix(section, "dynamo_", "ACCELERATE_DYNAMO_")


def deepspeed_variables(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables for keys of ``deepspeed_config``; None values are left out."""
    return _variables(section, DEEPSPEED_KEYS)


def deepspeed_fields(section: Collection[str], *, has_precision: bool) -> dict[str, str]:
    """Return the variable that says which keys the configuration file decides; a file of DeepSpeed must not say others.

    Args:
        has_precision: the precision is from the configuration file too.
    """
    fields = [*section, *(["mixed_precision"] if has_precision else [])]
    return {"ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields).lower()}


def xla_variables(*, downcast: bool) -> dict[str, str]:
    """Return the variable by which torch_xla keeps all numbers on a TPU in half the bits; bf16 alone asks for none.

    With bf16 an `Accelerator` computes in bfloat16 and keeps weights in float32. accelerate's launcher sets
    ``XLA_USE_BF16`` then, by which weights and the state of optimizers lose these bits.
    """
    return {"XLA_DOWNCAST_BF16": "1"} if downcast else {}


def _variables(section: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    return {names[key]: as_text(value) for key, value in section.items() if key in names and value is not None}


def _with_prefix(section: Mapping[str, Any], of_key: str, of_variable: str) -> dict[str, str]:
    return {
        f"{of_variable}{key.removeprefix(of_key).upper()}": as_text(value)
        for key, value in section.items()
        if value is not None
    }

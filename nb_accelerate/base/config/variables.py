"""The environment variables by which Hugging Face accelerate's launcher passes its flags and its file to ranks.

accelerate 1.15 sets variables of these names (``accelerate/utils/launch.py``); transformers reads them too. The keys
are the keys of the configuration file, which are also the flags.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Variables that ask for an engine, by the word for it in a configuration file.
USES = {"FSDP": "ACCELERATE_USE_FSDP", "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED"}

USE_MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"  # variable that says that those of `MESH` count

# Variables by key, as in the tables below.
GENERAL = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "use_cpu": "ACCELERATE_USE_CPU",
    "debug": "ACCELERATE_DEBUG_MODE",
    "enable_cpu_affinity": "ACCELERATE_CPU_AFFINITY",
}

FSDP = {
    f"fsdp_{name}": f"FSDP_{name.upper()}"
    for name in (
        *("version", "sharding_strategy", "reshard_after_forward", "offload_params", "min_num_params"),
        *("auto_wrap_policy", "backward_prefetch", "state_dict_type", "forward_prefetch", "use_orig_params"),
        *("cpu_ram_efficient_loading", "sync_module_states", "ignored_modules"),
        *("activation_checkpointing", "activation_checkpointing_offload"),
    )
} | {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}

# What accelerate's launcher sets where nothing else is said, but for the version: it takes 1, which is not here.
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

DEEPSPEED = {
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
} | {
    name: f"ACCELERATE_DEEPSPEED_{name.upper()}"
    for name in (
        *("zero_stage", "zero3_save_16bit_model", "offload_optimizer_device", "offload_param_device"),
        *("offload_optimizer_nvme_path", "offload_param_nvme_path"),  # which accelerate's launcher forgets to set
    )
}

DYNAMO = {
    f"dynamo_{name}": f"ACCELERATE_DYNAMO_{name.upper()}"
    for name in ("backend", "mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
}

MESH = {
    f"parallelism_config_{name}": f"PARALLELISM_CONFIG_{name.upper()}"
    for name in (
        *("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"),
        # For those of accelerate that are not here: they are passed on.
        *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length"),
        *("sp_seq_length_is_variable", "sp_attn_implementation"),
    )
}

# Sections of the file: a prefix that their keys may lack, and the table of their variables.
SECTIONS = {
    "fsdp_config": ("fsdp_", FSDP),
    "deepspeed_config": ("", DEEPSPEED),
    "parallelism_config": ("parallelism_config_", MESH),
    "dynamo_config": ("dynamo_", DYNAMO),
}


def as_text(value: object) -> str:
    """Return a value of a configuration file as it stands in an environment variable."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def variables_of(values: Mapping[str, object], names: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for those of some values whose keys are in a table; None values are left out."""
    return {names[key]: as_text(value) for key, value in values.items() if key in names and value is not None}


def section_variables(section: str, values: Mapping[str, object]) -> dict[str, str]:
    """Return the variables for the keys of one of `SECTIONS`."""
    prefix, names = SECTIONS[section]
    return variables_of({f"{prefix}{key.removeprefix(prefix)}": value for key, value in values.items()}, names)

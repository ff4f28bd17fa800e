"""What files of checkpoints are called. The names are those of Hugging Face accelerate, and so are these constants."""

from __future__ import annotations

import re

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
RNG_STATE_NAME = "random_states"
SCALER_NAME = "scaler.pt"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = f"{MODEL_NAME}{{suffix}}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = f"{SAFE_MODEL_NAME}{{suffix}}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"

FSDP_MODEL_NAME = "pytorch_model_fsdp"
"""Of the folder with the shards of a model, and of a file with whole weights that accelerate collected from shards."""
METADATA_NAME = ".metadata"
"""Of the file by which a folder of `torch.distributed.checkpoint` is known."""

MANIFEST_NAME = "checkpoint.json"
"""Ours alone: what a checkpoint consists of."""

# Exactly the names that are written, here or by accelerate: in a folder there may be files of the user's.
OF_A_STATE = re.compile(
    r"model(_\d+)?\.safetensors|(pytorch_model|pytorch_model_fsdp|optimizer|scheduler|sampler)(_\d+)?\.bin|scaler\.pt|checkpoint\.json"
    r"|dl_state_dict(_\d+)?(_rank\d+)?\.bin|(random_states|custom_checkpoint)_\d+\.pkl"
)
OF_SHARDS = re.compile(rf"({FSDP_MODEL_NAME}|{OPTIMIZER_NAME})_\d+")
"""Folders."""
IN_SHARDS = re.compile(r"\.metadata|__\d+_\d+\.distcp")
"""Files in such a folder."""
OF_A_MODEL = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def shards_of(file: str) -> str:
    """Return the folder that holds shards of what is otherwise in a file: ``optimizer_1`` for ``optimizer_1.bin``."""
    match = re.fullmatch(r"(model|optimizer)(?:_(\d+))?\.\w+", file)
    assert match is not None
    return f"{FSDP_MODEL_NAME if match[1] == SAFE_MODEL_NAME else OPTIMIZER_NAME}_{match[2] or 0}"


def is_plain(name: str) -> bool:
    """Whether a name that was read from a file stays inside of the folder that it is for: ``part/file``, say."""
    return all(part not in {"", ".", ".."} and part.isprintable() and "\\" not in part for part in name.split("/"))

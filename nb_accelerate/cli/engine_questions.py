"""The questions of `nb-accelerate config` about engines that shard a model, FSDP and DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nb_accelerate.cli.asking import Asker

_POLICIES = [
    ("TRANSFORMER_BASED_WRAP", "each block of a transformer, by its class"),
    ("SIZE_BASED_WRAP", "each module with enough parameters"),
    ("NO_WRAP", "the model as a whole"),
]
_STATE_DICTS = [
    ("FULL_STATE_DICT", "one file with the whole model"),
    ("SHARDED_STATE_DICT", "a file from each process: faster, and needs less memory"),
]
_STAGES = [
    ("0", "0: shard nothing"),
    ("1", "1: shard the optimizer"),
    ("2", "2: shard gradients too"),
    ("3", "3: shard parameters too"),
]
_DEVICES = [("none", "on the GPUs"), ("cpu", "in the memory of the host"), ("nvme", "on a disk")]

SPLIT = "TENSOR_PARALLEL"
"""Each layer is split over processes. It has no ``distributed_type``: ``parallelism_config`` says it."""


def ask_engine(asker: Asker, *, is_alone: bool, has_deepspeed: bool) -> str:
    """Ask how the model is distributed over the processes.

    Returns:
        ``FSDP``, ``DEEPSPEED``, `SPLIT`, or "" for none of them.
    """
    missing = "" if has_deepspeed else " (not installed here: pip install deepspeed)"
    options = [
        ("", "whole on each GPU" if not is_alone else "whole on the GPU"),
        *(
            []
            if is_alone
            else [("FSDP", "in shards, by PyTorch (FSDP)"), (SPLIT, "each layer split (tensor parallel)")]
        ),
        ("DEEPSPEED", f"by DeepSpeed{missing}"),
    ]
    return asker.choose("How is the model kept?", options, "")


def ask_fsdp(asker: Asker) -> dict[str, Any]:
    """Ask for the options of FSDP, and return the section ``fsdp_config``."""
    found: dict[str, Any] = {"fsdp_version": 2}
    found["fsdp_reshard_after_forward"] = asker.confirm(
        "Free the gathered parameters of a block after its forward? It needs less memory, and is slower",
        default=True,
    )
    found["fsdp_offload_params"] = asker.confirm("Keep parameters and gradients in the memory of the host?")
    policy = asker.choose("What is gathered at a time?", _POLICIES, "TRANSFORMER_BASED_WRAP")
    found["fsdp_auto_wrap_policy"] = policy
    if policy == "TRANSFORMER_BASED_WRAP":
        names = asker.line(
            "Classes of the blocks, such as BertLayer,T5Block; nothing for those that the model names", ""
        )
        if names:
            found["fsdp_transformer_layer_cls_to_wrap"] = names
    elif policy == "SIZE_BASED_WRAP":
        found["fsdp_min_num_params"] = asker.value("Parameters of such a module, at least", 100_000_000, int)
    found["fsdp_state_dict_type"] = asker.choose("What is saved?", _STATE_DICTS, "FULL_STATE_DICT")
    found["fsdp_cpu_ram_efficient_loading"] = asker.confirm(
        "Read pretrained weights in one process, which sends them to the others?", default=True
    )
    found["fsdp_activation_checkpointing"] = asker.confirm(
        "Compute activations again in the backward? It needs less memory, and is slower"
    )
    return found


def ask_layout(asker: Asker, num_processes: int, *, is_sharded: bool) -> dict[str, Any]:
    """Ask how the processes are laid out, and return the section ``parallelism_config``.

    Args:
        is_sharded: FSDP keeps the model; otherwise its layers are split (tensor parallel), and copied.
    """
    split = asker.value(
        "Processes that compute each layer together (tensor parallel)",
        1 if is_sharded else num_processes,
        lambda text: _divisor(text, num_processes, "processes"),
    )
    copies = groups = num_processes // split
    if is_sharded:
        copies = asker.value(
            "Copies of the model, each in shards on its share of the processes",
            1,
            lambda text: _divisor(text, groups, "processes" if split == 1 else "groups of processes"),
        )
    if copies == split == 1:
        return {}
    return {
        "parallelism_config_dp_replicate_size": copies,
        "parallelism_config_dp_shard_size": groups // copies,
        "parallelism_config_tp_size": split,
        "parallelism_config_cp_size": 1,
    }


def ask_deepspeed(asker: Asker, *, num_machines: int) -> dict[str, Any]:
    """Ask for the options of DeepSpeed, and return the section ``deepspeed_config``."""
    # accelerate would ask on which machines to start processes; here the command is started on each.
    found: dict[str, Any] = {"deepspeed_multinode_launcher": "standard"} if num_machines > 1 else {}
    stage = 3
    if asker.confirm("Is there a JSON file with a configuration of DeepSpeed?"):
        found["deepspeed_config_file"] = asker.value("Path of that file", "", _not_empty)
    else:
        stage = int(asker.choose("Stage of ZeRO?", _STAGES, "2"))
        found["zero_stage"] = stage
        found |= _ask_offload(asker, stage)
        found["gradient_accumulation_steps"] = asker.number("Batches for one optimizer step", 1)
        if asker.confirm("Clip gradients?"):
            found["gradient_clipping"] = asker.value("Largest norm of all gradients", 1.0, float)
        if stage == 3:
            found["zero3_save_16bit_model"] = asker.confirm("Save models in 16 bits?")
    found["zero3_init_flag"] = stage == 3 and asker.confirm(
        "Shard models of stage 3 while they are built? For those that one process cannot hold"
    )
    if asker.confirm("Does the model have blocks with a mixture of experts?"):
        found["deepspeed_moe_layer_cls_names"] = asker.value(
            "Classes of these blocks, such as MixtralSparseMoeBlock", "", _not_empty
        )
    return found


def _ask_offload(asker: Asker, stage: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if stage < 2:
        return found
    for what, name, least in (("the state of the optimizer", "optimizer", 2), ("parameters", "param", 3)):
        devices = _DEVICES if stage == 3 else _DEVICES[:2]  # DeepSpeed uses a disk in stage 3 only
        device = asker.choose(f"Where is {what}?", devices, "none") if stage >= least else "none"
        found[f"offload_{name}_device"] = device
        if device == "nvme":
            found[f"offload_{name}_nvme_path"] = asker.value(f"Folder on that disk for {what}", "/nvme", str)
    return found


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("an answer is needed here.")
    return text


def _divisor(text: str, number: int, what: str) -> int:
    if not text.isdecimal() or not int(text) or number % int(text):
        raise ValueError(f"{text!r} does not divide {number}, the number of {what}.")
    return int(text)

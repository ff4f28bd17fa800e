"""`nb-accelerate config`: ask about the machine once, and write a file that every launch reads."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.machine import Machine, default_config
from nb_accelerate.cli.asking import Asker, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

_WHERE = "the file (default: default_config.yaml in $HF_HOME/accelerate, or in ~/.cache/huggingface/accelerate)"
_PRECISIONS = ("no", "fp16", "bf16")
_POLICIES = [
    ("TRANSFORMER_BASED_WRAP", "each block of a transformer, by its class"),
    ("SIZE_BASED_WRAP", "each module with enough parameters"),
    ("NO_WRAP", "the model as a whole"),
]
_STATE_DICTS = [
    ("FULL_STATE_DICT", "one file with the whole model"),
    ("SHARDED_STATE_DICT", "a file from each process: faster, and needs less memory"),
]
_STAGES = ["shard nothing", "shard the optimizer", "shard gradients too", "shard parameters too"]
_DEVICES = [("none", "on the GPUs"), ("cpu", "in the memory of the host"), ("nvme", "on a disk")]
_SPLIT = "TENSOR_PARALLEL"
"""Each layer is split over processes. It has no ``distributed_type``: ``parallelism_config`` says it."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `config` to the command line."""
    parser = subparsers.add_parser(
        "config",
        help="answer questions about this machine once, for all launches",
        description="Ask how to train on this machine and write the answers to a file, which `launch`, "
        "`notebook_launcher` and `Accelerator` read where arguments and environment variables say nothing. The file is "
        "that of Hugging Face accelerate: either package reads what the other has written.",
    )
    _add_file(parser, default=None)
    parser.set_defaults(run=_ask)
    commands = parser.add_subparsers(title="without questions", metavar="COMMAND")
    default = commands.add_parser(
        "default",
        help="write a file from what this machine has",
        description="Write a file from what this machine has. A file that is there is not changed.",
    )
    _add_file(default, default=argparse.SUPPRESS)
    default.add_argument("--mixed_precision", "--mixed-precision", choices=_PRECISIONS, default="no")
    default.set_defaults(run=_write_default)
    update = commands.add_parser(
        "update",
        help="bring an older file up to date",
        description="Write a file again with the names that keys have today. Keys that mean nothing here are kept.",
    )
    _add_file(update, default=argparse.SUPPRESS)
    update.set_defaults(run=_update)


def _add_file(parser: argparse.ArgumentParser, default: Any) -> None:
    # A default of the inner parser would replace what was given before the subcommand.
    parser.add_argument("--config_file", "--config-file", type=Path, default=default, metavar="FILE", help=_WHERE)


def _path(arguments: argparse.Namespace) -> Path:
    from nb_accelerate.base.config.file import default_path

    return arguments.config_file or default_path()


def _ask(arguments: argparse.Namespace) -> int:
    from nb_accelerate.base.config.file import write_config

    path = _path(arguments)
    try:
        answers = ask_config(Asker(), machine_here())
    except KeyboardInterrupt:
        print("\nnothing was written")
        return 130
    print(f"wrote {write_config(answers, path)}")
    return 0


def _write_default(arguments: argparse.Namespace) -> int:
    from nb_accelerate.base.config.file import write_config

    path = _path(arguments)
    if path.exists():
        print(f"{path} is there and was not changed. To answer the questions again: nb-accelerate config")
        return 0
    print(f"wrote {write_config(default_config(machine_here(), arguments.mixed_precision), path)}")
    return 0


def _update(arguments: argparse.Namespace) -> int:
    from nb_accelerate.base.config.file import name_unknown, read_config, write_config

    path = _path(arguments)
    file = read_config(path)
    assert file is not None
    defaults = {"compute_environment": "LOCAL_MACHINE", "debug": False, "use_cpu": False}
    print(f"wrote {write_config({**defaults, **file.values}, path)}")
    unknown = name_unknown(file)
    if unknown:
        print(unknown)
    return 0


def machine_here() -> Machine:
    """Return the hardware of this machine. PyTorch is imported only if there is the driver of a GPU."""
    from nb_accelerate.base.config.versions import is_installed
    from nb_accelerate.base.devices.xla import XLA
    from nb_accelerate.notebook.launch.machine import facts_here

    facts = facts_here({})
    return Machine(
        num_gpus=facts.num_gpus,
        num_cpus=facts.num_cpus,
        has_tpu=is_installed("torch_xla"),
        num_xla_devices=len(XLA.find(os.environ.get(XLA.visibility), False)),
        has_deepspeed=is_installed("deepspeed"),
    )


def ask_config(asker: Asker, machine: Machine) -> dict[str, Any]:
    """Put the questions that matter on this machine, and return the answers as a configuration."""
    found = default_config(machine)
    kind = asker.choose(
        "How do you want to train?",
        [
            ("NO", "in one process"),
            ("MULTI_CPU", "in several processes on CPUs"),
            ("MULTI_GPU", "on several GPUs"),
            ("XLA", "on a TPU"),
        ],
        "XLA" if machine.has_tpu else found["distributed_type"],
    )
    found["distributed_type"] = kind
    found["use_cpu"] = kind == "MULTI_CPU" or (kind == "NO" and machine.num_gpus == 0)
    if kind == "NO" and machine.num_gpus:
        found["use_cpu"] = asker.confirm("Train on the CPU only, although there is a GPU?")
    if kind in ("MULTI_CPU", "MULTI_GPU"):
        _ask_machines(asker, found)
    machines = _most(found["num_machines"])
    engine = ""
    if kind == "MULTI_GPU" or (kind == "NO" and not found["use_cpu"]):
        engine = _ask_engine(asker, machine, found, machines)
    if kind == "NO":
        found["num_processes"] = 1
    else:
        usual = {
            "MULTI_CPU": min(machine.num_cpus, 2),
            "MULTI_GPU": machine.num_gpus,
            "XLA": machine.num_xla_devices or 8,
        }[kind]
        found["num_processes"] = _ask_processes(asker, usual, machines)
    if engine in ("FSDP", _SPLIT):
        found |= _ask_layout(asker, found["num_processes"], is_sharded=engine == "FSDP")
    if machine.num_gpus and not found["use_cpu"] and kind != "XLA":
        found["gpu_ids"] = asker.value("GPUs of this machine, by number, such as 0,1", "all", _checked("gpu_ids"))
    if kind == "MULTI_GPU":
        found["enable_cpu_affinity"] = asker.confirm("Keep each process on the cores near its GPU?")
    if kind != "NO":
        found["debug"] = asker.confirm("Check what processes hand to each collective? It finds mistakes, and is slower")
    if asker.confirm("Compile models with torch.compile?"):
        found["dynamo_config"] = _ask_dynamo(asker)
    if "deepspeed_config_file" in found.get("deepspeed_config", {}):
        del found["mixed_precision"]  # that file says it
        return found
    found["mixed_precision"] = asker.choose(
        "Mixed precision?", [("no", "no"), ("bf16", "bf16"), *([("fp16", "fp16")] if kind != "XLA" else [])], "no"
    )
    if kind == "XLA" and found["mixed_precision"] == "bf16":
        found["downcast_bf16"] = asker.confirm("Keep weights in 16 bits on the TPU too, and torch.double in 32?")
    return found


def _ask_engine(asker: Asker, machine: Machine, found: dict[str, Any], machines: int) -> str:
    """Ask how the model is kept: ``FSDP``, ``DEEPSPEED``, `_SPLIT`, or "" for none of them."""
    missing = "" if machine.has_deepspeed else " (not installed here: pip install deepspeed)"
    options = [("", "whole on the GPU"), ("DEEPSPEED", f"by DeepSpeed{missing}")]
    if found["distributed_type"] != "NO":
        shards = ("FSDP", "in shards, by PyTorch (FSDP)"), (_SPLIT, "each layer split (tensor parallel)")
        options = [("", "whole on each GPU"), *shards, options[1]]
    engine = asker.choose("How is the model kept?", options, "")
    if engine and engine != _SPLIT:
        found["distributed_type"] = engine
    if engine == "FSDP":
        found["fsdp_config"] = _ask_fsdp(asker)
    elif engine == "DEEPSPEED":
        found["deepspeed_config"] = _ask_deepspeed(asker, num_machines=machines)
    return engine


def _ask_machines(asker: Asker, found: dict[str, Any]) -> None:
    machines: int | str = asker.value(
        "Number of machines; or, if they may come and go, a range such as 1:4", 1, _checked("num_machines")
    )
    found["num_machines"] = machines
    number = _most(machines)
    if number == 1:
        return
    if isinstance(machines, int):
        found["rdzv_backend"] = asker.choose(
            "How do the machines find one another?",
            [("static", "each has a number"), ("c10d", "they are numbered as they come")],
            "static",
        )
    else:
        found["rdzv_backend"] = "c10d"
    if found["rdzv_backend"] == "static":
        found["machine_rank"] = asker.number("Number of this machine, from 0", 0, at_least=0, below=number)
    found["main_process_ip"] = asker.value("Address of machine 0, as the others see it", "", _address)
    found["main_process_port"] = asker.number("Port on machine 0", 29500, below=1 << 16)
    found["same_network"] = asker.confirm("Are all machines in one local network?", default=True)


def _ask_processes(asker: Asker, usual: int, machines: int) -> int:
    def convert(text: str) -> int:
        number = whole_number(text)
        if number % machines:
            raise ValueError(f"{number} processes cannot be shared out equally to {machines} machines.")
        return number

    everywhere = " on all machines together" if machines > 1 else ""
    return asker.value(f"Number of processes{everywhere}", max(1, usual) * machines, convert)


def _ask_dynamo(asker: Asker) -> dict[str, Any]:
    backends = [(name, name.lower()) for name in ("INDUCTOR", "CUDAGRAPHS", "AOT_EAGER", "EAGER")]
    section: dict[str, Any] = {"dynamo_backend": asker.choose("Backend of torch.compile?", backends, "INDUCTOR")}
    if asker.confirm("Change how torch.compile works?"):
        modes = [(name, name) for name in ("default", "reduce-overhead", "max-autotune")]
        section["dynamo_mode"] = asker.choose("What to optimise for?", modes, "default")
        section["dynamo_use_fullgraph"] = asker.confirm("Refuse models that are not one graph?")
        section["dynamo_use_dynamic"] = asker.confirm("Compile for shapes that vary?")
        section["dynamo_use_regional_compilation"] = asker.confirm("Compile repeated blocks by themselves?")
    return section


def _checked(key: str) -> Callable[[str], Any]:
    """Return a function that makes an answer a value of the configuration file, as it is checked there."""
    from nb_accelerate.base.config.file import KEYS

    return lambda text: KEYS[key](key, int(text) if text.isdecimal() and key != "gpu_ids" else text)


def _most(machines: int | str) -> int:
    """Return the largest number of machines."""
    return int(str(machines).rpartition(":")[2])


def _address(text: str) -> str:
    if not text or any(letter.isspace() or letter in "/,;" for letter in text):
        raise ValueError(f"{text!r} is not an address. Write a name or an IP address, without the port.")
    return text


def _ask_fsdp(asker: Asker) -> dict[str, Any]:
    """Ask for the options of FSDP, and return the section ``fsdp_config``."""
    found: dict[str, Any] = {"fsdp_version": 2}
    found["fsdp_reshard_after_forward"] = asker.confirm(
        "Free the gathered parameters of a block after its forward? It needs less memory, and is slower", default=True
    )
    found["fsdp_offload_params"] = asker.confirm("Keep parameters and gradients in the memory of the host?")
    policy = asker.choose("What is gathered at a time?", _POLICIES, "TRANSFORMER_BASED_WRAP")
    found["fsdp_auto_wrap_policy"] = policy
    if policy == "TRANSFORMER_BASED_WRAP":
        names = asker.line("Classes of the blocks, such as BertLayer,T5Block; nothing for those that the model names")
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


def _ask_layout(asker: Asker, num_processes: int, *, is_sharded: bool) -> dict[str, Any]:
    """Ask how the processes are laid out, and return the section ``parallelism_config``, if one is needed.

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
    sizes = {"dp_replicate": copies, "dp_shard": groups // copies, "tp": split, "cp": 1}
    return {"parallelism_config": {f"parallelism_config_{name}_size": size for name, size in sizes.items()}}


def _ask_deepspeed(asker: Asker, *, num_machines: int) -> dict[str, Any]:
    """Ask for the options of DeepSpeed, and return the section ``deepspeed_config``."""
    # accelerate would ask on which machines to start processes; here the command is started on each.
    found: dict[str, Any] = {"deepspeed_multinode_launcher": "standard"} if num_machines > 1 else {}
    stage = 3
    if asker.confirm("Is there a JSON file with a configuration of DeepSpeed?"):
        found["deepspeed_config_file"] = asker.value("Path of that file", "", _not_empty)
    else:
        stages = [(str(number), f"{number}: {text}") for number, text in enumerate(_STAGES)]
        stage = int(asker.choose("Stage of ZeRO?", stages, "2"))
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
    for what, name, least in (("the state of the optimizer", "optimizer", 2), ("parameters", "param", 3)):
        if stage < 2:
            break
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

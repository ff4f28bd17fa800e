"""`nb-accelerate config`: ask about the machine once, and write a file that every launch reads."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.file import KEYS, default_config, default_path, name_unknown, read_config, write_config
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_WHERE = "the file (default: default_config.yaml in $HF_HOME/accelerate, or in ~/.cache/huggingface/accelerate)"
_PRECISIONS = ("no", "fp16", "bf16")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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


def _ask(arguments: argparse.Namespace) -> int:
    try:
        answers = ask_config(*devices_here())
    except KeyboardInterrupt:
        print("\nnothing was written")
        return 130
    print(f"wrote {write_config(answers, arguments.config_file or default_path())}")
    return 0


def _write_default(arguments: argparse.Namespace) -> int:
    path = arguments.config_file or default_path()
    if path.exists():
        print(f"{path} is there and was not changed. To answer the questions again: nb-accelerate config")
    else:
        print(f"wrote {write_config(default_config(*devices_here(), arguments.mixed_precision), path)}")
    return 0


def _update(arguments: argparse.Namespace) -> int:
    path = arguments.config_file or default_path()
    file = read_config(path)
    assert file is not None
    defaults = {"compute_environment": "LOCAL_MACHINE", "debug": False, "use_cpu": False}
    print(f"wrote {write_config({**defaults, **file.values}, path)}")
    if file.unknown:
        print(name_unknown(file))
    return 0


def devices_here() -> tuple[int, int]:
    """Return the numbers of GPUs and of XLA devices. PyTorch is imported only if there is the driver of a GPU."""
    from nb_accelerate.base.devices.xla import XLA
    from nb_accelerate.notebook.launch.machine import facts_here

    return facts_here({}).num_gpus, len(XLA.find(os.environ.get(XLA.visibility), False))


def ask_config(num_gpus: int = 0, num_xla_devices: int = 0) -> dict[str, Any]:
    """Put the questions that matter on this machine, and return the answers as a configuration."""
    answers = default_config(num_gpus, num_xla_devices) | {"_gpus": num_gpus, "_chips": num_xla_devices}
    for key, when, question, how in _QUESTIONS:
        conditions = (condition.split("=") for condition in when.split())
        if all(str(answers.get(name)) in values.split(",") for name, values in conditions):
            answer = how(answers) if callable(how) else how
            answers[key] = _ask_until_answered(question, *answer) if question else answer
    config: dict[str, Any] = {}
    for key, value in answers.items():
        section, _, name = key.rpartition(".")
        if not key.startswith("_") and value != "":
            (config.setdefault(section, {}) if section else config)[name] = value
    return config


def _ask_until_answered(question: str, default: Any, how: Callable[[str], Any] | tuple[str, ...]) -> Any:
    """Return the value of an answer; an empty one is the default.

    Args:
        how: makes a value of text, and raises ValueError where it cannot; or the words to choose from.
    """
    words = "" if callable(how) else f" ({', '.join(how)})"
    while True:
        try:
            answer = input(f"{question}{words}{f' [{default}]' if default != '' else ''}: ").strip()
        except EOFError:
            raise ConfigError(
                "the input ended before the last question; nothing was written. "
                "For a file without questions: nb-accelerate config default"
            ) from None
        if not sys.stdin.isatty():
            print(answer)  # nobody has typed it, and without it the questions would run together
        if not answer and default != "":
            return default
        try:
            return how(answer) if callable(how) else how[[word.lower() for word in how].index(answer.lower())]
        except ValueError as error:
            print(f"  {error}" if callable(how) else f"  {answer!r} is none of them")


def _checked(key: str) -> Callable[[str], Any]:
    """Return a function that makes an answer a value of the configuration file, as it is checked there."""
    return lambda text: KEYS[key](key, int(text) if text.isdecimal() and key != "gpu_ids" else text)


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("an answer is needed here.")
    return text


def _below(number: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) >= number:
            raise ValueError(f"{text!r} is not a whole number from 0 to {number - 1}.")
        return int(text)

    return convert


def _backend(text: str) -> str:
    from nb_accelerate.base.config.checks import check_choice
    from nb_accelerate.base.config.dynamo import DynamoBackend

    return text and check_choice("backend", text, [backend.value.lower() for backend in DynamoBackend]).upper()


_USUAL = {"MULTI_CPU": 2, "MULTI_GPU": 1, "XLA": 8}
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "XLA")
_ENGINES = ("NONE", "FSDP", "TENSOR_PARALLEL", "DEEPSPEED")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PLACES = ("none", "cpu")

# fmt: off
_QUESTIONS: tuple[tuple[str, str, str, Any], ...] = (
    ("_kind", "", "Train in one process (NO), several on CPUs or GPUs, or on a TPU (XLA)?",
     lambda a: (a["distributed_type"], _KINDS)),
    ("distributed_type", "", "", lambda a: a["_kind"]),
    ("use_cpu", "", "", lambda a: a["_kind"] == "MULTI_CPU" or (a["_kind"] == "NO" and not a["_gpus"])),
    ("num_machines", "_kind=MULTI_CPU,MULTI_GPU", "Number of machines", (1, _checked("num_machines"))),
    ("_several", "", "", lambda a: a["num_machines"] > 1),
    ("rdzv_backend", "_several=True", "", "static"),
    ("machine_rank", "_several=True", "Number of this machine, from 0", lambda a: (0, _below(a["num_machines"]))),
    ("main_process_ip", "_several=True", "Address of machine 0, as the others see it", ("", _not_empty)),
    ("main_process_port", "_several=True", "Port on machine 0", (29500, _checked("main_process_port"))),
    ("_engine", "_kind=MULTI_GPU", "How is the model kept: whole, in shards (FSDP), in parts of layers, by DeepSpeed?",
     ("NONE", _ENGINES)),
    ("fsdp_config.fsdp_version", "_engine=FSDP", "", 2),
    ("fsdp_config.fsdp_offload_params", "_engine=FSDP",
     "Keep parameters and gradients in the memory of the host, yes or no", (False, _checked("use_cpu"))),
    ("fsdp_config.fsdp_auto_wrap_policy", "_engine=FSDP",
     "What is gathered at a time: blocks of a transformer, modules of a size, all?", (_POLICIES[0], _POLICIES)),
    ("fsdp_config.fsdp_min_num_params", "fsdp_config.fsdp_auto_wrap_policy=SIZE_BASED_WRAP",
     "Parameters of such a module, at least", (100_000_000, int)),
    ("fsdp_config.fsdp_state_dict_type", "_engine=FSDP", "What is saved: one file, or one from each process?",
     ("FULL_STATE_DICT", ("FULL_STATE_DICT", "SHARDED_STATE_DICT"))),
    ("fsdp_config.fsdp_activation_checkpointing", "_engine=FSDP",
     "Compute activations again in the backward (less memory, and slower), yes or no", (False, _checked("use_cpu"))),
    # accelerate would ask on which machines to start processes; here the command is started on each.
    ("deepspeed_config.deepspeed_multinode_launcher", "_engine=DEEPSPEED _several=True", "", "standard"),
    ("deepspeed_config.deepspeed_config_file", "_engine=DEEPSPEED",
     "JSON file with a configuration of DeepSpeed, if there is one", ("", str)),
    ("_has_json", "_engine=DEEPSPEED", "", lambda a: a["deepspeed_config.deepspeed_config_file"] != ""),
    ("deepspeed_config.zero_stage", "_has_json=False",
     "Stage of ZeRO: 0 shards nothing, 1 the optimizer, 2 gradients too, 3 parameters too", (2, _below(4))),
    ("deepspeed_config.offload_optimizer_device", "deepspeed_config.zero_stage=2,3",
     "Where is the state of the optimizer, if not on the GPUs?", ("none", _PLACES)),
    ("deepspeed_config.offload_param_device", "deepspeed_config.zero_stage=3",
     "Where are parameters, if not on the GPUs?", ("none", _PLACES)),
    ("deepspeed_config.zero3_init_flag", "_engine=DEEPSPEED", "", False),
    ("num_processes", "_kind=NO", "", 1),
    ("num_processes", "_kind=MULTI_CPU,MULTI_GPU,XLA", "Number of processes, on all machines together",
     lambda a: ((a["_gpus"] or a["_chips"] or _USUAL[a["_kind"]]) * a["num_machines"], _checked("num_processes"))),
    ("parallelism_config.parallelism_config_tp_size", "_engine=TENSOR_PARALLEL", "", lambda a: a["num_processes"]),
    ("gpu_ids", "_kind=MULTI_GPU", "GPUs of this machine, such as 0,1", ("all", _checked("gpu_ids"))),
    ("dynamo_config.dynamo_backend", "", "Backend of torch.compile, such as inductor; nothing to compile no models",
     ("", _backend)),
    ("mixed_precision", "_has_json=True", "", ""),  # that file says it
    ("mixed_precision", "_has_json=False,None", "Mixed precision?", ("no", _PRECISIONS)),
    ("distributed_type", "_engine=FSDP,DEEPSPEED", "", lambda a: a["_engine"]),
)
# fmt: on
"""Key of an answer, with its section; one that begins with ``_`` is not written. Earlier answers after which the
question is put. The question; "" where the next field is the answer. The default, and options or what makes a value of
text. A function gets all answers and returns that."""

"""`nb-accelerate config`: ask about the machine once, and write a file that every launch reads."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nb_accelerate.base.config.machine import Machine, default_config
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_WHERE = "the file (default: default_config.yaml in $HF_HOME/accelerate, or in ~/.cache/huggingface/accelerate)"
_PRECISIONS = ("no", "fp16", "bf16")
_KINDS = {
    "NO": "in one process",
    "MULTI_CPU": "in several processes on CPUs",
    "MULTI_GPU": "on several GPUs",
    "XLA": "on a TPU",
}
_HOST = {"none": "on the GPUs", "cpu": "in the memory of the host"}
_DISK = {**_HOST, "nvme": "on a disk"}  # which DeepSpeed uses in stage 3 only


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


class Asker:
    """Asks the user questions."""

    def choose(self, question: str, options: Sequence[tuple[str, str]], default: str) -> str:
        """Return the value of one of ``options``, pairs of a value and a label: its number, value or label is typed."""
        self.say(question)
        for number, (value, label) in enumerate(options, start=1):
            self.say(f"  {number}. {label}{' (default)' if value == default else ''}")
        while True:
            answer = _read("> ").lower()
            if not answer:
                return default
            for number, (value, label) in enumerate(options, start=1):
                # "y" and "n" are what people type for a yes or no.
                if answer in (str(number), value.lower(), label.lower(), value[0] if value in ("yes", "no") else None):
                    return value
            self.say(
                f"  {answer!r} is none of them. Write a number from 1 to {len(options)}, or nothing for the default."
            )

    def line(self, question: str, default: str = "") -> str:
        """Return the line that was typed, without surrounding spaces; "" if it is empty. The default is only shown."""
        return _read(f"{question} [{default}]: " if default else f"{question}: ")

    def say(self, text: str) -> None:
        """Show a line."""
        print(text)

    def confirm(self, question: str, *, default: bool = False) -> bool:
        """Ask for a yes or no."""
        return self.choose(question, [("yes", "yes"), ("no", "no")], "yes" if default else "no") == "yes"

    def value(self, question: str, default: T, convert: Callable[[str], T]) -> T:
        """Ask until the answer can be converted.

        Args:
            default: the value of an empty answer; "" if there is none, and then ``convert`` gets the empty answer.
            convert: makes a value of text; raises ValueError where it cannot.
        """
        while True:
            answer = self.line(question, str(default))
            if not answer and default != "":
                return default
            try:
                return convert(answer)
            except ValueError as error:
                self.say(f"  {error}")


def whole_number(text: str, *, at_least: int = 1, below: int | None = None) -> int:
    """Return the number that a text says."""
    if not text.isdecimal() or int(text) < at_least or (below is not None and int(text) >= below):
        bounds = f"from {at_least}" + (f" to {below - 1}" if below is not None else "")
        raise ValueError(f"{text!r} is not a whole number {bounds}.")
    return int(text)


def _read(prompt: str) -> str:
    try:
        answer = input(prompt).strip()
    except EOFError:
        print()
        raise ConfigError(
            "the input ended before the last question; nothing was written. "
            "For a file without questions: nb-accelerate config default"
        ) from None
    if not sys.stdin.isatty():
        print(answer)  # nobody has typed it, and without it the questions would run together
    return answer


def ask_config(asker: Asker, machine: Machine) -> dict[str, Any]:
    """Put the questions that matter on this machine, and return the answers as a configuration."""
    answers = vars(machine) | default_config(machine)
    for key, when, question, how in _QUESTIONS:
        conditions = [condition.split("=") for condition in when.split()]
        if all(str(answers.get(name)) in values.split(",") for name, values in conditions):
            answers[key] = _answer(asker, question, how(answers) if callable(how) else how)
    config: dict[str, Any] = {}
    for key, value in answers.items():
        section, _, name = key.rpartition(".")
        if not key.startswith("_") and not hasattr(machine, key) and value not in ("", {}):
            (config.setdefault(section, {}) if section else config)[name] = value
    return config


def _answer(asker: Asker, question: str, how: Any) -> Any:
    match how:
        case _ if not question:
            return how
        case bool():
            return asker.confirm(question, default=how)
        case dict() as options, default:
            return asker.choose(question, list(options.items()), default)
        case default, convert:
            return asker.value(question, default, convert)


def _engines(a: dict[str, Any]) -> tuple[dict[str, str], str]:
    missing = "" if a["has_deepspeed"] else " (not installed here: pip install deepspeed)"
    deepspeed = {"DEEPSPEED": f"by DeepSpeed{missing}"}
    if a["distributed_type"] == "NO":
        return {"": "whole on the GPU", **deepspeed}, ""
    shards = {"FSDP": "in shards, by PyTorch (FSDP)", "TENSOR_PARALLEL": "each layer split (tensor parallel)"}
    return {"": "whole on each GPU", **shards, **deepspeed}, ""


def _processes(a: dict[str, Any]) -> tuple[int, Callable[[str], int]]:
    def convert(text: str) -> int:
        if whole_number(text) % a["_most"]:
            raise ValueError(f"{text} processes cannot be shared out equally to {a['_most']} machines.")
        return int(text)

    usual = {"MULTI_CPU": min(a["num_cpus"], 2), "MULTI_GPU": a["num_gpus"], "XLA": a["num_xla_devices"] or 8}
    return max(1, usual[a["distributed_type"]]) * a["_most"], convert


def _layout(a: dict[str, Any]) -> dict[str, int]:
    """Return the section ``parallelism_config``; none is needed where FSDP shards the model over all processes."""
    copies, split = a["_copies"], a["_split"]
    if copies == split == 1:
        return {}
    sizes = {"dp_replicate": copies, "dp_shard": a["num_processes"] // split // copies, "tp": split, "cp": 1}
    return {f"parallelism_config_{name}_size": size for name, size in sizes.items()}


def _checked(key: str) -> Callable[[str], Any]:
    """Return a function that makes an answer a value of the configuration file, as it is checked there."""
    from nb_accelerate.base.config.file import KEYS

    return lambda text: KEYS[key](key, int(text) if text.isdecimal() and key != "gpu_ids" else text)


def _address(text: str) -> str:
    if not text or any(letter.isspace() or letter in "/,;" for letter in text):
        raise ValueError(f"{text!r} is not an address. Write a name or an IP address, without the port.")
    return text


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("an answer is needed here.")
    return text


def _divides(number: int, what: str) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or not int(text) or number % int(text):
            raise ValueError(f"{text!r} does not divide {number}, the number of {what}.")
        return int(text)

    return convert


# fmt: off
_QUESTIONS: tuple[tuple[str, str, str, Any], ...] = (
    ("_kind", "", "How do you want to train?", lambda a: (_KINDS, "XLA" if a["has_tpu"] else a["distributed_type"])),
    ("distributed_type", "", "", lambda a: a["_kind"]),
    ("use_cpu", "", "", lambda a: a["_kind"] == "MULTI_CPU" or (a["_kind"] == "NO" and not a["num_gpus"])),
    ("use_cpu", "_kind=NO use_cpu=False", "Train on the CPU only, although there is a GPU?", False),
    ("num_machines", "_kind=MULTI_CPU,MULTI_GPU",
     "Number of machines; or, if they may come and go, a range such as 1:4", lambda _: (1, _checked("num_machines"))),
    ("_most", "", "", lambda a: int(str(a["num_machines"]).rpartition(":")[2])),
    ("_several", "", "", lambda a: a["_most"] > 1),
    ("_is_range", "", "", lambda a: isinstance(a["num_machines"], str)),
    ("rdzv_backend", "_is_range=True", "", "c10d"),
    ("rdzv_backend", "_several=True _is_range=False", "How do the machines find one another?",
     ({"static": "each has a number", "c10d": "they are numbered as they come"}, "static")),
    ("machine_rank", "_several=True rdzv_backend=static", "Number of this machine, from 0",
     lambda a: (0, lambda text: whole_number(text, at_least=0, below=a["_most"]))),
    ("main_process_ip", "_several=True", "Address of machine 0, as the others see it", ("", _address)),
    ("main_process_port", "_several=True", "Port on machine 0", (29500, lambda text: whole_number(text, below=65536))),
    ("same_network", "_several=True", "Are all machines in one local network?", True),
    ("_engine", "_kind=MULTI_GPU", "How is the model kept?", _engines),
    ("_engine", "_kind=NO use_cpu=False", "How is the model kept?", _engines),
    ("fsdp_config.fsdp_version", "_engine=FSDP", "", 2),
    ("fsdp_config.fsdp_reshard_after_forward", "_engine=FSDP",
     "Free the gathered parameters of a block after its forward? It needs less memory, and is slower", True),
    ("fsdp_config.fsdp_offload_params", "_engine=FSDP",
     "Keep parameters and gradients in the memory of the host?", False),
    ("fsdp_config.fsdp_auto_wrap_policy", "_engine=FSDP", "What is gathered at a time?", (
        {"TRANSFORMER_BASED_WRAP": "each block of a transformer, by its class",
         "SIZE_BASED_WRAP": "each module with enough parameters", "NO_WRAP": "the model as a whole"},
        "TRANSFORMER_BASED_WRAP")),
    ("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "fsdp_config.fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
     "Classes of the blocks, such as BertLayer,T5Block; nothing for those that the model names", ("", str)),
    ("fsdp_config.fsdp_min_num_params", "fsdp_config.fsdp_auto_wrap_policy=SIZE_BASED_WRAP",
     "Parameters of such a module, at least", (100_000_000, int)),
    ("fsdp_config.fsdp_state_dict_type", "_engine=FSDP", "What is saved?", (
        {"FULL_STATE_DICT": "one file with the whole model",
         "SHARDED_STATE_DICT": "a file from each process: faster, and needs less memory"}, "FULL_STATE_DICT")),
    ("fsdp_config.fsdp_cpu_ram_efficient_loading", "_engine=FSDP",
     "Read pretrained weights in one process, which sends them to the others?", True),
    ("fsdp_config.fsdp_activation_checkpointing", "_engine=FSDP",
     "Compute activations again in the backward? It needs less memory, and is slower", False),
    # accelerate would ask on which machines to start processes; here the command is started on each.
    ("deepspeed_config.deepspeed_multinode_launcher", "_engine=DEEPSPEED _several=True", "", "standard"),
    ("_has_json", "_engine=DEEPSPEED", "Is there a JSON file with a configuration of DeepSpeed?", False),
    ("deepspeed_config.deepspeed_config_file", "_has_json=True", "Path of that file", ("", _not_empty)),
    ("_stage", "_has_json=False", "Stage of ZeRO?", (
        {"0": "0: shard nothing", "1": "1: shard the optimizer", "2": "2: shard gradients too",
         "3": "3: shard parameters too"}, "2")),
    ("deepspeed_config.zero_stage", "_has_json=False", "", lambda a: int(a["_stage"])),
    ("deepspeed_config.offload_optimizer_device", "_stage=2", "Where is the state of the optimizer?", (_HOST, "none")),
    ("deepspeed_config.offload_optimizer_device", "_stage=3", "Where is the state of the optimizer?", (_DISK, "none")),
    ("deepspeed_config.offload_optimizer_nvme_path", "deepspeed_config.offload_optimizer_device=nvme",
     "Folder on that disk for the state of the optimizer", ("/nvme", str)),
    ("deepspeed_config.offload_param_device", "_stage=2", "", "none"),
    ("deepspeed_config.offload_param_device", "_stage=3", "Where are parameters?", (_DISK, "none")),
    ("deepspeed_config.offload_param_nvme_path", "deepspeed_config.offload_param_device=nvme",
     "Folder on that disk for parameters", ("/nvme", str)),
    ("deepspeed_config.gradient_accumulation_steps", "_has_json=False", "Batches for one optimizer step",
     (1, whole_number)),
    ("_clips", "_has_json=False", "Clip gradients?", False),
    ("deepspeed_config.gradient_clipping", "_clips=True", "Largest norm of all gradients", (1.0, float)),
    ("deepspeed_config.zero3_save_16bit_model", "_stage=3", "Save models in 16 bits?", False),
    ("_stage", "_has_json=True", "", "3"),  # or another one: the file says it
    ("deepspeed_config.zero3_init_flag", "_engine=DEEPSPEED", "", False),
    ("deepspeed_config.zero3_init_flag", "_stage=3",
     "Shard models of stage 3 while they are built? For those that one process cannot hold", False),
    ("_has_experts", "_engine=DEEPSPEED", "Does the model have blocks with a mixture of experts?", False),
    ("deepspeed_config.deepspeed_moe_layer_cls_names", "_has_experts=True",
     "Classes of these blocks, such as MixtralSparseMoeBlock", ("", _not_empty)),
    ("num_processes", "_kind=NO", "", 1),
    ("num_processes", "_kind=MULTI_CPU,MULTI_GPU,XLA _several=False", "Number of processes", _processes),
    ("num_processes", "_several=True", "Number of processes on all machines together", _processes),
    ("_split", "_engine=FSDP,TENSOR_PARALLEL", "Processes that compute each layer together (tensor parallel)",
     lambda a: (1 if a["_engine"] == "FSDP" else a["num_processes"], _divides(a["num_processes"], "processes"))),
    ("_copies", "_engine=TENSOR_PARALLEL", "", lambda a: a["num_processes"] // a["_split"]),
    ("_copies", "_engine=FSDP", "Copies of the model, each in shards on its share of the processes", lambda a: (
        1, _divides(a["num_processes"] // a["_split"], "processes" if a["_split"] == 1 else "groups of processes"))),
    ("parallelism_config", "_engine=FSDP,TENSOR_PARALLEL", "", _layout),
    ("_on_gpus", "", "", lambda a: a["num_gpus"] > 0 and not a["use_cpu"] and a["_kind"] != "XLA"),
    ("gpu_ids", "_on_gpus=True", "GPUs of this machine, such as 0,1", lambda _: ("all", _checked("gpu_ids"))),
    ("enable_cpu_affinity", "_kind=MULTI_GPU", "Keep each process on the cores near its GPU?", False),
    ("debug", "_kind=MULTI_CPU,MULTI_GPU,XLA",
     "Check what processes hand to each collective? It finds mistakes, and is slower", False),
    ("_compiles", "", "Compile models with torch.compile?", False),
    ("dynamo_config.dynamo_backend", "_compiles=True", "Backend of torch.compile?", (
        {name: name.lower() for name in ("INDUCTOR", "CUDAGRAPHS", "AOT_EAGER", "EAGER")}, "INDUCTOR")),
    ("_tunes", "_compiles=True", "Change how torch.compile works?", False),
    ("dynamo_config.dynamo_mode", "_tunes=True", "What to optimise for?", (
        {name: name for name in ("default", "reduce-overhead", "max-autotune")}, "default")),
    ("dynamo_config.dynamo_use_fullgraph", "_tunes=True", "Refuse models that are not one graph?", False),
    ("dynamo_config.dynamo_use_dynamic", "_tunes=True", "Compile for shapes that vary?", False),
    ("dynamo_config.dynamo_use_regional_compilation", "_tunes=True", "Compile repeated blocks by themselves?", False),
    ("mixed_precision", "_has_json=True", "", ""),  # that file says it
    ("mixed_precision", "_has_json=False,None", "Mixed precision?", lambda a: (
        {name: name for name in ("no", "bf16", "fp16") if name != "fp16" or a["_kind"] != "XLA"}, "no")),
    ("downcast_bf16", "_kind=XLA mixed_precision=bf16",
     "Keep weights in 16 bits on the TPU too, and torch.double in 32?", False),
    ("distributed_type", "_engine=FSDP,DEEPSPEED", "", lambda a: a["_engine"]),
)
# fmt: on
"""Key of an answer, with its section; one that begins with ``_`` is not written. Earlier answers after which the
question is put. The question; "" where the next field is the answer. A default: yes or no; options and the default
among them; or a default and what makes a value of text. A function gets all answers and returns one of these."""

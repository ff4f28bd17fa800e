"""`nb-accelerate config`: ask about the machine once, and write a file that every launch reads."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.cli.asking import Asker, whole_number

if TYPE_CHECKING:
    from collections.abc import Callable

_WHERE = "the file (default: default_config.yaml in $HF_HOME/accelerate, or in ~/.cache/huggingface/accelerate)"
_PRECISIONS = ("no", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware that the defaults of the questions depend on.

    Attributes:
        num_xla_devices: TPU chips, or other devices of torch_xla, that can have a process each.
    """

    num_gpus: int = 0
    num_cpus: int = 1
    has_tpu: bool = False
    num_xla_devices: int = 0
    has_deepspeed: bool = False


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
        print(f"{path} is there and was not changed. To answer the questions anew: nb-accelerate config")
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
    from nb_accelerate.base.config.installed import is_installed
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


def default_config(machine: Machine, mixed_precision: str = "no") -> dict[str, Any]:
    """Return the configuration of a machine, with the default answer to every question."""
    if machine.num_gpus:
        kind, devices = ("MULTI_GPU" if machine.num_gpus > 1 else "NO"), machine.num_gpus
    else:
        kind, devices = ("XLA" if machine.num_xla_devices else "NO"), machine.num_xla_devices
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": max(1, devices),
        "rdzv_backend": "static",
        "same_network": False,
        "use_cpu": devices == 0,
    }


def ask_config(asker: Asker, machine: Machine) -> dict[str, Any]:
    """Put the questions that matter on this machine, and return the answers as a configuration."""
    from nb_accelerate.cli.engine_questions import SPLIT, ask_layout

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
    if engine in ("FSDP", SPLIT) and (layout := ask_layout(asker, found["num_processes"], is_sharded=engine == "FSDP")):
        found["parallelism_config"] = layout
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
    from nb_accelerate.cli.engine_questions import SPLIT, ask_deepspeed, ask_engine, ask_fsdp

    is_alone = found["distributed_type"] == "NO"
    engine = ask_engine(asker, is_alone=is_alone, has_deepspeed=machine.has_deepspeed)
    if engine and engine != SPLIT:
        found["distributed_type"] = engine
    if engine == "FSDP":
        found["fsdp_config"] = ask_fsdp(asker)
    elif engine == "DEEPSPEED":
        found["deepspeed_config"] = ask_deepspeed(asker, num_machines=machines)
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
    from nb_accelerate.base.config.file_keys import KEYS

    return lambda text: KEYS[key](key, int(text) if text.isdecimal() and key != "gpu_ids" else text)


def _most(machines: int | str) -> int:
    """Return the largest number of machines."""
    return int(str(machines).rpartition(":")[2])


def _address(text: str) -> str:
    if not text or any(letter.isspace() or letter in "/,;" for letter in text):
        raise ValueError(f"{text!r} is not an address. Write a name or an IP address, without the port.")
    return text

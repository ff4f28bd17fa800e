"""The keys of configuration files: which there are, and what their values are checked and converted by.

Names and values are those of accelerate 1.15. Format: https://huggingface.co/docs/accelerate/package_reference/cli
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_choice, check_flag, check_whole
from nb_accelerate.base.config.distributed import DistributedType, PrecisionType
from nb_accelerate.base.config.variables import SECTIONS
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

_NOT_USED = (
    # For TPU pods that accelerate reaches through gcloud: what would use them is refused, see `_not_of_pods`.
    *("command_file", "commands", "tpu_env", "tpu_name", "tpu_vm", "tpu_zone"),
    # Written by older versions of accelerate, and not used by 1.15 either.
    *("ipex_config", "use_mps_device", "use_xpu"),
)
"""Keys that are accepted and not used."""

NO_WORDS = ("0", "false", "no", "n", "off", "f")
"""How an environment variable says no."""

_YES_OR_NO = {"yes": True, "true": True, "no": False, "false": False}


def _flag(key: str, value: object) -> bool:
    # Older files have 'no' in quotation marks, which YAML reads as text.
    return check_flag(key, _YES_OR_NO.get(value.lower(), value) if isinstance(value, str) else value)


def _not_of_pods(key: str, value: object) -> bool:
    if _flag(key, value):
        raise ConfigError(
            f"{key}={value!r} asks for the machines of a TPU pod, which accelerate reaches through gcloud. This "
            f"package starts processes on the machine where it runs. Write {key}: false."
        )
    return False


def _precision(key: str, value: object) -> str:
    return check_choice(key, _unquoted(value), PrecisionType.list())


def _distributed_type(key: str, value: object) -> str:
    return check_choice(key, _unquoted(value), [member.value.lower() for member in DistributedType] + ["tpu"]).upper()


def _unquoted(value: object) -> object:
    """Return ``"no"`` for False, which is how YAML 1.1 reads an unquoted ``no``."""
    return "no" if value is False else value


def _count(key: str, value: object) -> int:
    return -1 if value == -1 else check_whole(key, value, at_least=1)  # -1 is accelerate's value for "not set"


def _machines(key: str, value: object) -> int | str:
    """Return a number of machines, or a range of them as text."""
    if not isinstance(value, str):
        return _count(key, value)
    fewest, _, most = value.replace(" ", "").partition(":")
    most = most or fewest
    if not (fewest.isdecimal() and most.isdecimal() and 1 <= int(fewest) <= int(most)):
        raise ConfigError(f"{key}={value!r} is neither a number of machines nor a range. Write {key}: 2 or {key}: 1:4.")
    return int(most) if fewest == most else f"{fewest}:{most}"


def _port(key: str, value: object) -> int:
    number = check_whole(key, value, at_least=0)
    if number >= 1 << 16:
        raise ConfigError(f"{key}={number} is not a port. Write a number from 1 to 65535, or 0 for a free one.")
    return number


def _text(key: str, value: object) -> str:
    if isinstance(value, (dict, list, bool)):
        raise ConfigError(f"{key}={value!r} is of type {type(value).__name__}, not text.")
    return str(value)


def _gpu_ids(key: str, value: object) -> str:
    text = _text(key, value)
    if text != "all" and not all(part.strip().isdecimal() for part in text.split(",")):
        raise ConfigError(f"{key}={text!r} is not a list of GPU numbers. Write {key}: 0,1 or {key}: all.")
    return text


def _section(key: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{key}={value!r} is not a section with keys of its own. Leave it out.")
    return value


KEYS: dict[str, Callable[[str, Any], Any]] = {
    "compute_environment": _text,
    "debug": _flag,
    "distributed_type": _distributed_type,
    "downcast_bf16": _flag,
    "enable_cpu_affinity": _flag,
    "gpu_ids": _gpu_ids,
    "machine_rank": partial(check_whole, at_least=0),
    "main_process_ip": _text,
    "main_process_port": _port,
    "main_training_function": _text,
    "mixed_precision": _precision,
    "num_machines": _machines,
    "num_processes": _count,
    "rdzv_backend": _text,
    "same_network": _flag,
    "tpu_use_cluster": _not_of_pods,
    "tpu_use_sudo": _not_of_pods,
    "use_cpu": _flag,
    **dict.fromkeys((*SECTIONS, "fp8_config", "megatron_lm_config", "mpirun_config"), _section),
}

KNOWN = {*KEYS, *_NOT_USED}
"""Keys that accelerate 1.15 or this package knows."""

_ALSO_IN = {
    "fsdp_config": ("fsdp_backward_prefetch_policy",),
    "deepspeed_config": tuple(
        f"deepspeed_{name}" for name in ("multinode_launcher", "hostfile", "exclusion_filter", "inclusion_filter")
    ),
}
"""Keys of sections that accelerate knows and that say nothing here."""

KNOWN_IN = {
    section: {
        f"{section}.{start}{key.removeprefix(prefix)}"
        for key in (*names, *_ALSO_IN.get(section, ()))
        for start in ("", prefix)
    }
    for section, (prefix, names) in SECTIONS.items()
}
"""Keys of sections as ``fsdp_config.KEY``, with and without the prefix that they may lack."""

"""Configuration files: what ``nb-accelerate config`` writes, and what was written for Hugging Face accelerate.

Names, values and places are accelerate's. Format: https://huggingface.co/docs/accelerate/package_reference/cli
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_choice, check_flag, check_whole, suggest
from nb_accelerate.base.config.distributed import DistributedType, PrecisionType
from nb_accelerate.base.config.engine import VARIABLES as ENGINE_VARIABLES, EngineOptions
from nb_accelerate.base.config.variables import (
    FSDP_DEFAULTS,
    GENERAL,
    SECTIONS,
    USE_MESH,
    USES,
    as_text,
    section_variables,
    variables_of,
)
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NO_WORDS = ("0", "false", "no", "n", "off", "f")  # how an environment variable says no

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


def _unquoted(value: object) -> object:
    """Return ``"no"`` for False, which is how YAML 1.1 reads an unquoted ``no``."""
    return "no" if value is False else value


def _count(key: str, value: object) -> int:
    return -1 if value == -1 else check_whole(key, value, at_least=1)  # -1 is accelerate's value for "not set"


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


def _engine(key: str, value: object) -> dict[str, Any]:
    section = {name: of_name for name, of_name in _section(key, value).items() if of_name is not None}
    for name in section:
        if name not in ENGINE_VARIABLES:
            raise ConfigError(
                f"{key} has a key {name!r}.{suggest(name, ENGINE_VARIABLES)} Write some of: "
                f"{', '.join(ENGINE_VARIABLES)}."
            )
    EngineOptions.chosen(section)  # checks the values
    return section


_DISTRIBUTED_TYPES = [*(member.value.lower() for member in DistributedType), "tpu"]

KEYS: dict[str, Callable[[str, Any], Any]] = {
    "compute_environment": _text,
    "debug": _flag,
    "distributed_type": lambda key, value: check_choice(key, _unquoted(value), _DISTRIBUTED_TYPES).upper(),
    "downcast_bf16": _flag,
    "enable_cpu_affinity": _flag,
    "engine_config": _engine,
    "gpu_ids": _gpu_ids,
    "machine_rank": partial(check_whole, at_least=0),
    "main_process_ip": _text,
    "main_process_port": partial(check_whole, at_least=0),
    "main_training_function": _text,
    "mixed_precision": lambda key, value: check_choice(key, _unquoted(value), PrecisionType.list()),
    "num_machines": _count,
    "num_processes": _count,
    "rdzv_backend": _text,
    "same_network": _flag,
    "tpu_use_cluster": _not_of_pods,
    "tpu_use_sudo": _not_of_pods,
    "use_cpu": _flag,
    **dict.fromkeys((*SECTIONS, "fp8_config", "megatron_lm_config", "mpirun_config"), _section),
}

# Keys that are accepted and not used.
_NOT_USED = (
    # For TPU pods that accelerate reaches through gcloud: what would use them is refused, see `_not_of_pods`.
    *("command_file", "commands", "tpu_env", "tpu_name", "tpu_vm", "tpu_zone"),
    # Written by older versions of accelerate, and not used by 1.15 either.
    *("ipex_config", "use_mps_device", "use_xpu", "fsdp_config.fsdp_backward_prefetch_policy"),
    *("deepspeed_config.deepspeed_multinode_launcher", "deepspeed_config.deepspeed_hostfile"),
    *("deepspeed_config.deepspeed_exclusion_filter", "deepspeed_config.deepspeed_inclusion_filter"),
)

# Keys that accelerate 1.15 or this package knows: of sections as ``fsdp_config.KEY``, whose prefix may be missing.
KNOWN = {
    *KEYS,
    *_NOT_USED,
    *(
        f"{section}.{start}{key.removeprefix(prefix)}"
        for section, (prefix, names) in SECTIONS.items()
        for key in names
        for start in ("", prefix)
    ),
}


# Names the file to use; ``launch --config_file`` sets it for the processes that it starts.
CONFIG_FILE = "NB_ACCELERATE_CONFIG_FILE"


def default_path(variables: Mapping[str, str] | None = None) -> Path:
    """Return the path of the configuration file, by environment variables, where accelerate looks for it too."""
    variables = os.environ if variables is None else variables
    if variables.get(CONFIG_FILE):
        return _expanded(variables[CONFIG_FILE])
    cache = variables.get("XDG_CACHE_HOME") or "~/.cache"
    home = variables.get("HF_HOME") or os.path.join(cache, "huggingface")  # noqa: PTH118 - "~" is expanded below
    folder = _expanded(home) / "accelerate"
    yaml, older = folder / "default_config.yaml", folder / "default_config.json"
    return older if older.is_file() and not yaml.is_file() else yaml


def _expanded(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path's own refuses where nobody has a home


@dataclass(frozen=True, kw_only=True)
class ConfigFile:
    """A configuration file that was read and checked, with the keys of accelerate 1.15.

    Attributes:
        unknown: keys that neither accelerate 1.15 nor this package knows, those of sections as ``fsdp_config.KEY``.
            They are kept when the file is written again.
    """

    path: Path
    values: Mapping[str, Any]
    unknown: tuple[str, ...] = ()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` where the file does not say."""
        value = self.values.get(key)
        return default if value is None else value

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the value of a key that has keys of its own; empty where the file has none."""
        return self.get(name, {})  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        """Return what the file says, by keys."""
        return {key: value for key, value in self.values.items() if value is not None}

    def launcher_arguments(self) -> dict[str, Any]:
        """Return the values about the ranks of one machine, as arguments of `notebook_launcher`.

        A file for several machines gives no arguments: a cell waits for other machines only if its own call says so.
        """
        if self.get("num_machines", 1) > 1:
            return {}
        arguments: dict[str, Any] = {}
        if self.get("num_processes", -1) > 0:
            arguments["num_processes"] = self.values["num_processes"]
        if self.get("distributed_type") == DistributedType.MULTI_CPU:
            arguments["devices"] = "cpu"
        elif self.get("gpu_ids", "all") != "all" and not self.get("use_cpu"):
            arguments["devices"] = [int(number) for number in self.values["gpu_ids"].split(",")]
        return arguments

    def as_variables(self, environment: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment variables that say the same to an `Accelerator`.

        Those of the engine of the file are left out where the given environment turns it off.
        """
        kind = self.get("distributed_type")
        is_off = (environment or {}).get(USES.get(kind, ""), "").strip().lower() in NO_WORDS
        return self.general_variables() | ({} if is_off else self.engine_variables(kind))

    def engine_variables(self, kind: str | None) -> dict[str, str]:
        """Return the variables that ask for an engine, with the file's options: ``FSDP``, ``DEEPSPEED`` or ``XLA``."""
        precision = self.get("mixed_precision")
        if kind == DistributedType.FSDP:
            options = section_variables("fsdp_config", self.section("fsdp_config"))
            return {USES[kind]: "true", **FSDP_DEFAULTS, **options}
        if kind == DistributedType.DEEPSPEED:
            section = self.section("deepspeed_config")
            # Which keys the file decides, for accelerate: a file of DeepSpeed must not say others.
            fields = [*section, *(["mixed_precision"] if precision is not None else [])]
            decided = {"ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields).lower()}
            return {USES[kind]: "true", **decided, **section_variables("deepspeed_config", section)}
        if kind == DistributedType.XLA and precision == PrecisionType.BF16 and self.get("downcast_bf16"):
            # By this torch_xla keeps all numbers in half the bits. accelerate's launcher sets ``XLA_USE_BF16`` with
            # bf16 alone, by which weights and the state of optimizers lose these bits.
            return {"XLA_DOWNCAST_BF16": "1"}
        return {}

    def general_variables(self) -> dict[str, str]:
        """Return the variables that are the same for all engines."""
        variables = variables_of(self.values, GENERAL)
        if self.get("distributed_type") == DistributedType.MULTI_CPU:
            variables["ACCELERATE_USE_CPU"] = "true"
        if self.get("mixed_precision") == PrecisionType.FP8:
            section = self.section("fp8_config")
            variables |= {f"ACCELERATE_FP8_{key.upper()}": as_text(value) for key, value in section.items()}
        if mesh := section_variables("parallelism_config", self.section("parallelism_config")):
            variables |= {USE_MESH: "true", **mesh}
        return variables | section_variables("dynamo_config", self.section("dynamo_config"))


NO_FILE = ConfigFile(path=Path(), values={})  # stands for a configuration file that says nothing, where there is none


def read_config(path: str | os.PathLike[str] | None = None) -> ConfigFile | None:
    """Read and check a configuration file, YAML or JSON. Without a path, read `default_path` if it exists.

    Return None for ``/dev/null``.
    """
    file = default_path() if path is None else _expanded(path)
    if file == Path(os.devnull):
        return None
    try:
        changed = file.stat().st_mtime_ns
    except FileNotFoundError:
        if path is None and not os.environ.get(CONFIG_FILE):
            return None
        raise ConfigError(
            f"There is no configuration file {str(file)!r}. To make one: nb-accelerate config --config_file {file}"
        ) from None
    return _read(file, changed)


@functools.lru_cache(maxsize=8)
def _read(file: Path, changed: int) -> ConfigFile:  # noqa: ARG001 - a file that has changed is another one
    import yaml  # here, because it is slow to import

    class Loader(yaml.SafeLoader):
        """Leaves 1:4 a text, which YAML 1.1 reads as a number to the base 60."""

        def construct_yaml_int(self, node: Any) -> Any:
            return node.value if ":" in node.value else super().construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if file.suffix == ".json" else yaml.load(text, Loader)  # noqa: S506 - a safe one
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"The configuration file {str(file)!r} cannot be read: {error}.") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"The configuration file {str(file)!r} has no lines such as 'num_processes: 2'.")
    return ConfigFile(path=file, **_checked(file, values))


def write_config(values: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a configuration file, as YAML or, where its name ends so, as JSON, and without values that are None."""
    # An existing file is replaced atomically: a reader sees the old file or the new one.
    file = _expanded(path)
    checked = _checked(file, dict(values))["values"]
    kept = {key: value for key, value in sorted(checked.items()) if value is not None}
    if file.suffix == ".json":
        text = json.dumps(kept, indent=2) + "\n"
    else:
        import yaml

        text = yaml.safe_dump(kept, sort_keys=True)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as new:
            new.write(text)
        Path(new.name).replace(file)
    except OSError as error:
        raise ConfigError(f"The configuration file {str(file)!r} cannot be written: {error.strerror}.") from None
    return file


def _checked(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `ConfigFile`: values checked, converted and under the names of accelerate 1.15."""
    values = dict(values)
    if values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigError(
            f"The configuration file {str(file)!r} is for compute_environment={values['compute_environment']!r}, but "
            f"this package starts processes on your own machines only. Write compute_environment: LOCAL_MACHINE"
        )
    if "fp16" in values:
        was_on = values.pop("fp16")
        values.setdefault("mixed_precision", "fp16" if was_on else "no")
    if "dynamo_backend" in values:
        backend = values.pop("dynamo_backend")
        values.setdefault("dynamo_config", {} if backend == "NO" else {"dynamo_backend": backend})
    for key, value in values.items():
        check = KEYS.get(key)
        if check is None or value is None:
            continue
        try:
            values[key] = check(key, value)
        except ConfigError as error:
            raise ConfigError(f"In the configuration file {str(file)!r}: {error}") from None
    of_sections = [f"{name}.{key}" for name in SECTIONS for key in values.get(name) or {}]
    unknown = [key for key in (*values, *of_sections) if key not in KNOWN]
    return {"values": values, "unknown": tuple(unknown)}


def name_unknown(file: ConfigFile) -> str:
    """Return a sentence about the unknown keys of a file; empty if there are none."""
    if not file.unknown:
        return ""
    listed = "; ".join(f"{key!r}.{suggest(key, KNOWN)}".removesuffix(".") for key in file.unknown)
    return f"{file.path} has unknown keys, which are kept and not used: {listed}"


def default_config(num_gpus: int = 0, num_xla_devices: int = 0, mixed_precision: str = "no") -> dict[str, Any]:
    """Return the configuration of a machine, with the default answer to every question of ``nb-accelerate config``."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "MULTI_GPU" if num_gpus > 1 else "XLA" if num_xla_devices and not num_gpus else "NO",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": mixed_precision,
        "num_machines": 1,
        "num_processes": max(1, num_gpus or num_xla_devices),
        "rdzv_backend": "static",
        "same_network": False,
        "use_cpu": not (num_gpus or num_xla_devices),
    }

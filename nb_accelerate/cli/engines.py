"""Which engine ``launch`` is asked for, and the variables that say so to the ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nb_accelerate.base.config.engine_variables import (
    FSDP_DEFAULTS,
    USE_MESH,
    USES,
    deepspeed_fields,
    deepspeed_variables,
    fsdp_variables,
    mesh_variables,
    xla_variables,
)
from nb_accelerate.cli.flags import GROUPS
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from nb_accelerate.base.config.file import ConfigFile

_SWITCHES = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "tpu": "XLA"}
"""Flags that ask for an engine, and the word for it in a configuration file."""

_FLAGS = {flag.name: flag for _, flags in GROUPS for flag in flags if flag.needs in _SWITCHES}
_MESH_FLAGS = {flag.name for _, flags in GROUPS for flag in flags if flag.needs == "use_parallelism_config"}


def chosen_engine(arguments: argparse.Namespace, file: ConfigFile) -> str:
    """Return ``FSDP``, ``DEEPSPEED`` or ``XLA`` if flags ask for it, or else the file; "" for none of them."""
    switches = [name for name in (*_SWITCHES, "multi_gpu") if getattr(arguments, name)]
    if len(switches) > 1:
        raise ConfigError(f"--{switches[0]} and --{switches[1]} were both given. Leave one of them out.")
    of_file = file.get("distributed_type", "")
    engine = _SWITCHES.get(switches[0], "") if switches else of_file if of_file in _SWITCHES.values() else ""
    for name, flag in _FLAGS.items():
        if getattr(arguments, name) is not None and _SWITCHES[flag.needs] != engine:
            raise ConfigError(
                f"--{name} is for --{flag.needs}, which was not given. Add --{flag.needs}, or leave it out."
            )
    return engine


def engine_variables(arguments: argparse.Namespace, file: ConfigFile, engine: str) -> dict[str, str]:
    """Return the variables for an engine. Flags come before the environment, which comes before the file."""
    given = {name: getattr(arguments, name) for name, flag in _FLAGS.items() if getattr(arguments, name) is not None}
    low = file.engine_variables(engine)
    high: dict[str, str] = {}
    if engine == "FSDP":
        low = {**FSDP_DEFAULTS, **low}
        high = {**({"ACCELERATE_USE_FSDP": "true"} if arguments.use_fsdp else {}), **fsdp_variables(given)}
    elif engine == "DEEPSPEED":
        path = arguments.deepspeed_config_file
        if path is not None and not path.is_file():
            raise ConfigError(f"--deepspeed_config_file {str(path)!r}: there is no such file.")
        low = {**deepspeed_fields((), has_precision=False), **low}
        switch = {"ACCELERATE_USE_DEEPSPEED": "true"} if arguments.use_deepspeed else {}
        high = {**switch, **deepspeed_variables(given)}
        if arguments.mixed_precision is not None and file.values:  # then the file does not decide it
            high |= deepspeed_fields(file.section("deepspeed_config"), has_precision=False)
    elif engine == "XLA":
        precision = arguments.mixed_precision or file.get("mixed_precision")
        downcast = arguments.downcast_bf16 or bool(file.get("downcast_bf16"))
        low = xla_variables(downcast=downcast) if precision == "bf16" else {}
    asked = {name for name in USES.values() if arguments.multi_gpu or os.environ.get(name, "").strip()}
    # Ranks also read the configuration file, for variables that are not set.
    asked.add(USES.get(file.get("distributed_type", ""), ""))
    is_chosen = _is_chosen_by_flag(arguments)
    off = {name: "false" for word, name in USES.items() if is_chosen and word != engine and name in asked}
    return off | {name: value for name, value in low.items() if not os.environ.get(name, "").strip()} | high


def _is_chosen_by_flag(arguments: argparse.Namespace) -> bool:
    """Return whether a flag says how the model is distributed, which then overrides the configuration file."""
    return arguments.multi_gpu or any(getattr(arguments, name) for name in _SWITCHES)


def mesh_of(arguments: argparse.Namespace, file: ConfigFile, engine: str) -> dict[str, str]:
    """Return the variables about how ranks are laid out, as flags say it.

    Args:
        file: the configuration file. What it says counts no more when flags ask for another engine than FSDP.
    """
    sizes = {name: getattr(arguments, name) for name in _MESH_FLAGS if getattr(arguments, name) is not None}
    if arguments.use_parallelism_config:
        return mesh_variables(sizes) | {USE_MESH: "true"}
    if sizes:
        raise ConfigError(
            f"--{min(sizes)} is for --use_parallelism_config, which was not given. Add --use_parallelism_config, or "
            f"leave it out."
        )
    if _is_chosen_by_flag(arguments) and engine != "FSDP" and file.section("parallelism_config"):
        return {USE_MESH: "false"}
    return {}


def check_mesh(variables: Mapping[str, str], world_size: int | None) -> None:
    """Refuse a layout of ranks that cannot be, before any is started.

    Args:
        world_size: how many ranks there will be; None if that is not known yet.
    """
    from nb_accelerate.base.config.env import Environment
    from nb_accelerate.base.config.parallelism import resolve_parallelism

    layout = resolve_parallelism(None, None, Environment({**os.environ, **variables}))
    if layout is not None and world_size is not None:
        layout.check_ranks(world_size)

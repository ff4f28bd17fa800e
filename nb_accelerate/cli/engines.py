"""Which engine ``launch`` is asked for, and the environment variables of the ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.file import CONFIG_FILE, NO_FILE
from nb_accelerate.base.config.variables import DEEPSPEED, DYNAMO, FSDP, GENERAL, MESH, USE_MESH, USES, variables_of
from nb_accelerate.cli.flags import GROUPS
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from nb_accelerate.base.config.file import ConfigFile

_SWITCHES = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "tpu": "XLA"}
"""Flags that ask for an engine, and the word for it in a configuration file."""

_VARIABLES = {
    **GENERAL,
    **FSDP,
    **DEEPSPEED,
    **DYNAMO,
    **MESH,
    "use_fsdp": USES["FSDP"],
    "use_deepspeed": USES["DEEPSPEED"],
    "use_parallelism_config": USE_MESH,
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
}
"""Variables of the ranks by the flag that sets them."""


def chosen_engine(arguments: argparse.Namespace, file: ConfigFile) -> str:
    """Return ``FSDP``, ``DEEPSPEED`` or ``XLA`` if flags ask for it, or else the file; "" for none of them."""
    switches = [name for name in (*_SWITCHES, "multi_gpu") if getattr(arguments, name)]
    if len(switches) > 1:
        raise ConfigError(f"--{switches[0]} and --{switches[1]} were both given. Leave one of them out.")
    of_file = file.get("distributed_type", "")
    engine = _SWITCHES.get(switches[0], "") if switches else of_file if of_file in _SWITCHES.values() else ""
    for group in GROUPS:
        is_on = not group.switch or getattr(arguments, group.switch) or _SWITCHES.get(group.switch) == engine
        given = next((flag.name for flag in group.flags if getattr(arguments, flag.name, None) is not None), None)
        if given is not None and not is_on:
            raise ConfigError(
                f"--{given} is for --{group.switch}, which was not given. Add --{group.switch}, or leave it out."
            )
    path = arguments.deepspeed_config_file
    if path is not None and not path.is_file():
        raise ConfigError(f"--deepspeed_config_file {str(path)!r}: there is no such file.")
    return engine


def rank_variables(arguments: argparse.Namespace, file: ConfigFile, engine: str) -> dict[str, str]:
    """Return the variables of the ranks. Flags come before the environment, the environment before the file."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    is_set = {name for name, value in os.environ.items() if value.strip()}
    # What the file says of an engine depends on the precision, which a flag may have changed.
    decided: dict[str, Any] = {name: given[name] for name in ("mixed_precision", "downcast_bf16") if name in given}
    low = file.general_variables() | replace(file, values={**file.values, **decided}).engine_variables(engine)
    found = {name: value for name, value in low.items() if name not in is_set}
    if file is not NO_FILE and ("config_file" in given or CONFIG_FILE not in is_set):
        found[CONFIG_FILE] = str(file.path.absolute())
    if arguments.multi_gpu or arguments.gpu_ids:
        found[GENERAL["use_cpu"]] = "false"
    # Ranks also read the file, for variables that are not set: what a flag replaces in it is turned off.
    if arguments.multi_gpu or any(getattr(arguments, name) for name in _SWITCHES):
        of_others = {USES.get(file.get("distributed_type", ""))} | (
            set(USES.values()) if arguments.multi_gpu else is_set
        )
        found |= {name: "false" for word, name in USES.items() if word != engine and name in of_others}
        if engine != "FSDP" and file.section("parallelism_config"):
            found[USE_MESH] = "false"
    return found | variables_of(given, _VARIABLES)

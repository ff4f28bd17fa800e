"""The configurations of a sweep: the keyword arguments of each run, checked, and a name for each. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import described, shown
from nb_accelerate.base.config.launch import LaunchOptions
from nb_accelerate.base.records.naming import labels, settings
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXAMPLE = "sweep=[dict(lr=0.1), dict(lr=0.01)]"

_REFUSED = {
    "num_nodes": "its runs are all on this machine",
    "engine": "its runs are all on this machine",
    "max_restarts": "a run that fails costs only itself, and the others go on",
    "log_line_prefix_template": "each line is marked with the configuration of its run",
}
"""Options of a launch that are not for a sweep, and why."""


def check_sweep(sweep: Iterable[Mapping[str, Any]], options: LaunchOptions) -> list[dict[str, Any]]:
    """Return the keyword arguments of each run, which come on top of those that all runs share.

    Raises:
        ConfigError: they are no keyword arguments of the function, or an option is not for a sweep.
    """
    for name, why in _REFUSED.items():
        value = getattr(options, name)
        if value != getattr(LaunchOptions, name):
            value = getattr(value, "engine", value)  # of options of an engine, its name
            raise ConfigError(f"{name}={shown(value)} is not for a sweep: {why}. Leave it out")
    if isinstance(sweep, (Mapping, str)) or not isinstance(sweep, Iterable):
        hint = _EXAMPLE
        if isinstance(sweep, Mapping) and len(sweep) == 1:
            hint = f"sweep=[dict({next(iter(sweep))}=value) for value in ...]"
        raise ConfigError(
            f"sweep={shown(sweep)} is {described(sweep)}, but must be a list with the keyword arguments of each run. "
            f"Write {hint}"
        )
    runs = [_check_run(index, run, options) for index, run in enumerate(sweep)]
    if not runs:
        raise ConfigError(f"sweep has no configuration. (A generator can be read only once.) Write {_EXAMPLE}")
    return runs


def _check_run(index: int, run: object, options: LaunchOptions) -> dict[str, Any]:
    if not isinstance(run, Mapping) or not all(isinstance(name, str) for name in run):
        raise ConfigError(
            f"sweep[{index}]={shown(run)} is {described(run)}, but must be a dict with keyword arguments of the "
            f"function. Write {_EXAMPLE}"
        )
    try:
        signature = inspect.signature(options.function)
    except (TypeError, ValueError):  # a builtin function, or one of C code
        return dict(run)
    try:
        signature.bind(*options.args, **{**options.kwargs, **run})
    except TypeError as error:
        name = getattr(options.function, "__name__", "the function")
        raise ConfigError(
            f"sweep[{index}]={shown(run)} does not fit {name}{signature}: {error}. What all runs share goes into args "
            "or kwargs"
        ) from None
    return dict(run)


def names_of(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for each run: what differs in its configuration from others, ``lr=0.1, depth=3``."""
    if len(runs) == 1:
        return [settings(runs[0], runs[0]) or "#0"]
    return labels([f"#{index}" for index in range(len(runs))], runs)

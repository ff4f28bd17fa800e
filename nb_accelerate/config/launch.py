"""What one launch is asked to do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nb_accelerate.config.choices import one_of
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

START_METHODS = ("auto", "forkserver")
MIXED_PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The arguments of `nb_accelerate.launch.notebook_launcher`, checked.

    Raises:
        ConfigError: a value that cannot be; the text says what was given, why not, and what to write.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    num_processes: int | None = None
    mixed_precision: str = "no"
    start_method: str = "auto"
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    timeout: float | None = None

    def __post_init__(self) -> None:
        _check_function(self.function)
        _check_args(self.args)
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(key, str) for key in self.kwargs):
            raise ConfigError(f"kwargs={self.kwargs!r} does not map names to values. Write kwargs={{'lr': 0.1}}")
        _check_num_processes(self.num_processes)
        one_of("mixed_precision", self.mixed_precision, MIXED_PRECISIONS)
        one_of("start_method", self.start_method, START_METHODS)
        _check_env(self.env)
        _check_timeout(self.timeout)


def _check_function(function: object) -> None:
    if callable(function):
        return
    raise ConfigError(
        f"function={function!r} is of type {type(function).__name__} and cannot be called. Pass the function "
        f"itself, without calling it: notebook_launcher(train, args=(...,))"
    )


def _check_args(args: object) -> None:
    if isinstance(args, tuple):
        return
    hint = "args=tuple(...)" if isinstance(args, list) else "args=(x,): a tuple of one needs the comma"
    raise ConfigError(
        f"args must be a tuple with one entry for each argument of the function, but is of type "
        f"{type(args).__name__}. Write {hint}"
    )


def _check_num_processes(number: object) -> None:
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, int):
        digits = isinstance(number, str) and number.strip().isdigit()
        hint = f" Write num_processes={str(number).strip()}" if digits else ""
        raise ConfigError(
            f"num_processes={number!r} is of type {type(number).__name__}, but ranks are counted with an int, or "
            f"None for all devices.{hint}"
        )
    if number < 1:
        raise ConfigError(
            f"num_processes={number} starts nothing. Write num_processes=1 or more, or None for all devices"
        )


def _check_env(env: Mapping[str, object]) -> None:
    for key, value in env.items():
        if not isinstance(key, str) or not isinstance(value, (str, os.PathLike)):
            raise ConfigError(
                f"env has {key!r}: {value!r}, but environment variables are text. Write {str(key)!r}: '{value}'"
            )


def _check_timeout(timeout: object) -> None:
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0):
        raise ConfigError(f"timeout={timeout!r} is not a number of seconds above 0. None means no limit")

"""Functions that read and patch environment variables, for scripts that do so themselves."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import sys
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_whole
from nb_accelerate.base.config.env import Environment, variables_set
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

logger = logging.getLogger(__name__)

_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return a word such as ``"yes"``, ``"off"`` or ``"1"`` as 1 or 0, or with ``to_bool`` as True or False.

    Raises:
        ConfigError: it is not a yes or no.
    """
    answer = Environment({"value": value}).flag("value")
    if answer is None:
        raise ConfigError(f"value={value!r} is not a yes or no. Write 'yes', 'true', '1', or 'no', 'false', '0'.")
    return answer if to_bool else int(answer)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of some environment variables that holds a number of at least 0, or ``default``."""
    environment = Environment()
    for key in env_keys:
        number = environment.whole(key, at_least=-sys.maxsize)
        if number is not None and number >= 0:
            return number
    return default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether an environment variable says yes; ``default`` if it is not set.

    Raises:
        ConfigError: it is not a yes or no.
    """
    answer = Environment().flag(key)
    return default if answer is None else answer


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return the value of an environment variable, or ``default``."""
    return os.environ.get(key, default)


@contextlib.contextmanager
def patch_environment(**kwargs: Any) -> Iterator[None]:
    """Set environment variables inside a block, and restore them afterwards. Names become upper case.

    Examples:
        ```python
        with patch_environment(accelerate_use_cpu=1):
            ...
        ```
    """
    with variables_set({name.upper(): str(value) for name, value in kwargs.items()}):
        yield


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment inside a block, and restore it afterwards."""
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """Run a function, or each test of a class, and restore accelerate's environment variables afterwards.

    Use it as a decorator. Subclasses of a decorated class behave like it.
    """
    if isinstance(func_or_cls, type):
        base: type = func_or_cls
        before = getattr(base.__init_subclass__, "__func__", None)  # None: inherited from `object`, which does nothing

        def init_subclass(cls: type, /, *args: Any, **kwargs: Any) -> None:
            if before is not None:
                before(cls, *args, **kwargs)
            _purge_tests(cls)

        _purge_tests(base)
        setattr(base, "__init_subclass__", classmethod(init_subclass))  # noqa: B010 - mypy allows no assignment
        return base
    function: Callable[..., Any] = func_or_cls

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = _accelerate_variables()
        try:
            return function(*args, **kwargs)
        finally:
            for name in _accelerate_variables():
                del os.environ[name]
            os.environ.update(before)

    return run


def _purge_tests(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if callable(member) and name.startswith("test"):
            setattr(cls, name, purge_accelerate_environment(member))


def _accelerate_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return ``NAME=value`` lines for variables that can be written to a file; others are left out, with a warning."""
    plain = re.compile(r"[^\s;&|<>\"'=]+")
    lines = []
    for name, value in current_env.items():
        if plain.fullmatch(name) and plain.fullmatch(value):
            lines.append(f"{name}={value}\n")
        else:
            logger.warning("The environment variable %s is left out: it has characters a shell would act on.", name)
    return lines


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a port of this machine is in use; by default 29500, the default port of the rendezvous.

    Raises:
        ConfigError: it is not a port.
    """
    number = check_whole("port", int(port) if port is not None else 29500, at_least=0)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        return number != 0 and tried.connect_ex(("localhost", number)) == 0


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put the values of ``source`` into ``destination``, dict by dict, and return it."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination

"""Check the values of options. What is refused is a `ConfigError`: what was given, why it is wrong, what to write."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, TypeVar

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

_MOST_SHOWN = 80  # characters of a value in a message


def suggest(given: object, known: Iterable[str]) -> str:
    """Return a sentence with a leading space, ``" Did you mean 'bf16'?"``; an empty string if no word is near."""
    near = difflib.get_close_matches(str(given).lower(), list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """Return `repr` of what was given, in one line and cut off after 80 characters: it may be a model."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """Return ``value`` as one of ``choices``, which are in small letters; case does not matter."""
    words = tuple(choices)
    word = str(getattr(value, "value", value)).lower()
    if word in words:
        return word
    listed = ", ".join(repr(choice) for choice in words)
    raise ConfigError(f"{name}={shown(value)} is not a choice.{suggest(word, words)} Write one of: {listed}.")


def check_whole(name: str, value: object, *, at_least: int) -> int:
    """Return ``value`` if it is a whole number of at least ``at_least``; True and False are none."""
    whole = f"Write an integer of at least {at_least}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={shown(value)} is {described(value)}, not a whole number. {whole}", options=(name,))
    if value < at_least:
        raise ConfigError(f"{name}={value} is too small. {whole}", options=(name,))
    return value


def check_number(name: str, value: object, *, above: float) -> float:
    """Return ``value`` if it is a number greater than ``above``."""
    number = f"Write a number above {above}."
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={shown(value)} is {described(value)}, not a number. {number}")
    if not value > above:
        raise ConfigError(f"{name}={value} is too small. {number}")
    return value


def check_flag(name: str, value: object) -> bool:
    """Return ``value`` if it is True or False. The text ``"False"`` is true in Python, so text is not accepted."""
    if isinstance(value, bool):
        return value
    raise ConfigError(
        f"{name}={shown(value)} is {described(value)}, not a yes or no. Write {name}=True or {name}=False."
    )


def check_options(name: str, value: T | None, kind: type[T]) -> T | None:
    """Return ``value`` if it is an options object of class ``kind``, or None, and not a dict of its fields, say."""
    if value is None or isinstance(value, kind):
        return value
    raise ConfigError(
        f"{name}={shown(value)} is {described(value)}, not a {kind.__name__} of this package. Write "
        f"{name}={kind.__name__}(...), with `from nb_accelerate.utils import {kind.__name__}`."
    )


def described(value: object) -> str:
    """Return the type of a value, as a part of a sentence: ``"of type str"``, ``"of type other_package.Options"``."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return "None" if value is None else f"of type {module}{kind.__qualname__}"

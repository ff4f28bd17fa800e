"""A value that must be one of a few words."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """`value`, if it is one of `choices`.

    Raises:
        ConfigError: it is not; names the nearest choice, if one is near.
    """
    choices = tuple(choices)
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(str(value).lower(), choices, n=1)
    hint = f" Did you mean {name}={near[0]!r}?" if near else ""
    raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.{hint}")

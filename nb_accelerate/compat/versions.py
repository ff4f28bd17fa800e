"""Functions that compare versions of packages."""

from __future__ import annotations

import operator
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.version import parse

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from packaging.version import Version

_OPERATIONS: dict[str, Callable[[Version, Version], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Return whether a package's version, or a version, is ``operation`` another one.

    Examples:
        ```python
        compare_versions("torch", ">=", "2.8")
        ```

    Args:
        library_or_version: the name of an installed package, or a parsed version.
        operation: ``">"``, ``">="``, ``"=="``, ``"!="``, ``"<="`` or ``"<"``.
        requirement_version: what to compare with.

    Raises:
        ConfigError: there is no such operation.
        importlib.metadata.PackageNotFoundError: the package is not installed.
    """
    if operation not in _OPERATIONS:
        raise ConfigError(f"operation={operation!r} does not compare. Write one of: {', '.join(_OPERATIONS)}.")
    if isinstance(library_or_version, str):
        library_or_version = parse(metadata.version(library_or_version))
    return _OPERATIONS[operation](library_or_version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether the version of torch is ``operation`` another one: ``is_torch_version(">=", "2.8")``.

    Like `compare_versions`, but a build such as 2.8.0+cu128 counts as 2.8.0.
    """
    return compare_versions(parse(parse(metadata.version("torch")).base_version), operation, version)


def is_weights_only_available() -> bool:
    """Return whether ``torch.load(weights_only=True)`` reads everything a checkpoint holds."""
    return is_torch_version(">=", "2.4.0")

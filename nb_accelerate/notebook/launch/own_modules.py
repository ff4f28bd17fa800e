"""The user's modules that other machines lack, or have in another version. What is sent of them goes by value."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors.traceback_lines import is_users

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType


def own_entries() -> list[str]:
    """Return what the search path of this process has besides what belongs to its Python, which a host has itself."""
    own = {Path(entry) for entry in (*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix)}
    found = []
    for entry in sys.path:
        path = Path(entry or os.curdir).absolute()
        if isinstance(entry, str) and not own & {path, *path.parents}:
            found.append(str(path))
    return found


def own_modules(entries: Sequence[str]) -> dict[str, ModuleType]:
    """Return the modules of the user's that are imported here from entries of the search path, by their files there."""
    return {file: module for file, module in _found(sorted(entries, key=len, reverse=True)) if file}


def _found(entries: Sequence[str]) -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = Path(file) if isinstance(file, str) else Path()
        # What is no file of its own, as modules that torch makes, has no whole path.
        if path.is_absolute() and name not in ("__main__", "__mp_main__") and is_users(str(path)):
            yield next((str(path.relative_to(entry)) for entry in entries if path.is_relative_to(entry)), ""), module


def versions(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Return a checksum of the file of each module, as it is now; "" for one that is not there any more."""
    return {name: _checksum(Path(str(module.__file__))) for name, module in modules.items()}


def others(files: Mapping[str, str], path: Sequence[str]) -> dict[str, Any]:
    """Return which files this machine does not have with these checksums where Python would look for them first."""
    found = {name: next((file for entry in path if (file := Path(entry, name)).is_file()), None) for name in files}
    return {"names": [name for name, file in found.items() if file is None or _checksum(file) != files[name]]}


def _checksum(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""

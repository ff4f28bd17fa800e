"""Modules of the notebook that are imported on a machine which does not have them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import ModuleType


class SentModules(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Finds modules that were sent. It stands behind all other finders: what a machine has itself comes first.

    Args:
        modules: the file of each, on the machine of the notebook, and its text.
    """

    def __init__(self, modules: Mapping[str, tuple[str, str]]) -> None:
        self._modules = modules

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname in self._modules else None

    @override
    def get_filename(self, fullname: str) -> str:
        return self._modules[fullname][0]

    @override
    def get_source(self, fullname: str) -> str:
        return self._modules[fullname][1]

    @override
    def is_package(self, fullname: str) -> bool:
        return Path(self.get_filename(fullname)).name == "__init__.py"

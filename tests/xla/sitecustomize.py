"""Python imports this when it starts, where this folder is on PYTHONPATH: `gloo_double.install` puts it there."""

import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("GLOO_DOUBLE")


class PlaysChips:
    """Lets torch_xla's module that starts its runtime play a chip, as soon as it is imported."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != "torch_xla._internal.pjrt":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_play(module: ModuleType) -> None:
            import gloo_double

            execute(module)
            gloo_double.play(FOLDER, module)

        spec.loader.exec_module = execute_and_play
        return spec


if FOLDER is not None:
    sys.meta_path.insert(0, PlaysChips())

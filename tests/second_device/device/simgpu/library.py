"""Load the library that `building.py` made, from the folder that ``SIMGPU_LIBRARY`` names."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any


def _load() -> Any:
    folder = os.environ.get("SIMGPU_LIBRARY")
    if folder is None:
        raise RuntimeError(
            "SIMGPU_LIBRARY is not set: the fixture `simgpu` of the tests builds the library and sets it"
        )
    spec = importlib.util.spec_from_file_location("_simgpu", Path(folder) / "_simgpu.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


library: Any = _load()

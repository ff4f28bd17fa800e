"""Run a program with this package in accelerate's place: ``python in_accelerates_place.py PROGRAM ARGUMENTS``.

What the program and its libraries import from accelerate is what `nb_accelerate` has by the same name in the same
module. Accelerate's own are left where there is none, such as device maps of large models, which transformers imports
(`tests/structure/parity.py` says why).
"""

from __future__ import annotations

import importlib
import runpy
import sys
from types import ModuleType


def take_the_place() -> None:
    """Replace the names of accelerate's modules."""
    importlib.import_module("accelerate.big_modeling")  # with what nearly all others are imported by
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        try:
            ours = importlib.import_module(f"nb_{name}")
        except ModuleNotFoundError:
            continue
        for public in (one for one in dir(ours) if one[0] != "_"):
            value = getattr(ours, public)
            if not isinstance(value, ModuleType):
                setattr(sys.modules[name], public, value)


if __name__ == "__main__":
    take_the_place()
    sys.argv[:] = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

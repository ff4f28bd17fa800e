"""Find out which packages are installed, without importing them."""

from __future__ import annotations

import importlib.util
import sys


def is_installed(module: str) -> bool:
    """Return whether a module can be imported.

    A folder of that name in the working directory (the package wandb writes its runs into ``wandb/``) does not count.
    Asked each time: a notebook may install the package meanwhile.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:  # a parent that is missing
        return False
    except ValueError:  # a stand-in without a spec
        return sys.modules.get(module) is not None
    return spec is not None and spec.origin is not None

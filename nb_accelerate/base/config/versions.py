"""Which packages are installed, and the lowest version of each package that this one works with."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys

from nb_accelerate.errors import MissingDependencyError

# Those of pyproject.toml. They are here too because a copy of this package that was not installed has no metadata.
LOWEST = {
    "torch": "2.8",
    "numpy": "1.24",
    "cloudpickle": "3.0",
    "ipython": "7.34",
    "ipykernel": "6.17.1",
    "ipywidgets": "7.7.1",
    "jupyter_client": "7.4.9",
    "nbclient": "0.5.13",
    "nbconvert": "6.4.5",
    "nbformat": "5.10.4",
    "pyzmq": "24.0",
    "traitlets": "5.7.1",
    "safetensors": "0.7",
    "huggingface_hub": "0.24",
    "PyYAML": "6.0",
    "psutil": "5.9.5",
    "packaging": "24",
    "tqdm": "4.66",
    "typing_extensions": "4.10",
}

# With an older one of these something fails somewhere, with an error that does not name it.
_USED_CLOSELY = ("torch", "ipython", "ipykernel", "ipywidgets", "psutil")


def is_installed(module: str) -> bool:
    """Return whether a module can be imported."""
    # A folder of that name in the working directory (the package wandb writes its runs into `wandb/`) does not count.
    # Asked each time: a notebook may install the package meanwhile.
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:  # a parent that is missing
        return False
    except ValueError:  # a stand-in without a spec
        return sys.modules.get(module) is not None
    return spec is not None and spec.origin is not None


def installed_version(package: str) -> str | None:
    """Return the version of a package, without importing it; None if it is not installed."""
    from importlib import metadata  # all that imports this package would wait for it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_too_old(package: str, version: str) -> bool:
    """Return whether a version of a package is older than the lowest that works. "2.8.0a0+git" counts as 2.8.0."""
    return package in LOWEST and _numbers(version) < _numbers(LOWEST[package])


@functools.cache
def check_versions() -> None:
    """Refuse what is too old, in the kernel and once; this takes some milliseconds and imports none of the packages."""
    for package in _USED_CLOSELY:
        version = installed_version(package)
        if version is not None and is_too_old(package, version):
            raise MissingDependencyError(package, needed_for="nb_accelerate", installed=version, lowest=LOWEST[package])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))

"""`nb-accelerate env`: print hardware and versions, for a bug report."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.base.config.file import default_path, read_config
from nb_accelerate.base.config.versions import LOWEST, installed_version, is_too_old
from nb_accelerate.base.devices.host import num_cpus
from nb_accelerate.base.version import __version__
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_PACKAGES = (
    *(package for package in LOWEST if package != "torch"),  # which has a row with its build
    "jupyterlab",
    "notebook",
    "accelerate",
    "deepspeed",
    "torch_xla",
    "ray",
)
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (its size is read; nothing is written there)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "env",
        help="show Python, PyTorch, devices and versions",
        description="Show what this machine has: Python, PyTorch, devices, cores, shared memory, versions.",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:  # noqa: ARG001  (every command is called alike)
    rows = list(describe())
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def describe() -> Iterator[tuple[str, str]]:
    """Return what `env` prints, as pairs of a name and a value. Works without PyTorch, and says so."""
    yield "nb-accelerate", __version__
    yield "platform", platform.platform()
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "cores", f"{num_cpus()} of {os.cpu_count()}"
    if _SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(_SHARED_MEMORY)
        yield "shared memory", f"{usage.total / 2**30:.1f} GiB, {usage.free / 2**30:.1f} GiB free"
    else:
        yield "shared memory", f"no {_SHARED_MEMORY}"
    yield from _torch()
    yield "configuration", _configuration()
    for package in _PACKAGES:
        version = installed_version(package)
        yield package, "not installed" if version is None else _judged(package, version)


def _configuration() -> str:
    try:
        file = read_config()
    except ConfigError as error:
        return str(error)
    if file is None:
        return f"none (nb-accelerate config writes {default_path()})"
    settings = ", ".join(f"{key}={value}" for key, value in sorted(file.values.items()) if value not in (None, {}, []))
    return f"{file.path}: {settings}"


def _torch() -> Iterator[tuple[str, str]]:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        yield "torch", "not installed (pip install torch)"
        return
    yield "torch", _judged("torch", torch.__version__)
    yield "devices", "; ".join(_devices()) or "cpu"
    has_backend = torch.distributed.is_backend_available if torch.distributed.is_available() else lambda _: False
    backends = [name for name in ("gloo", "nccl", "mpi", "xccl") if has_backend(name)]
    yield "distributed", ", ".join(backends) or "not built into this PyTorch"


def _devices() -> Iterator[str]:
    from nb_accelerate.base.devices import DEVICE_KINDS

    for kind in DEVICE_KINDS:
        visible = os.environ.get(kind.visibility) if kind.visibility else None
        for index, _ in enumerate(kind.find(visible, False)):
            yield f"{kind.name}:{index} {kind.describe(index)}".rstrip()


def _judged(package: str, version: str) -> str:
    advice = f", too old (pip install '{package}>={LOWEST[package]}')" if is_too_old(package, version) else ""
    return version + advice

"""What scripts do before a launch: write a configuration file, or set the rank of a process that they started."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.base.config.file import default_config, default_path, write_config
from nb_accelerate.base.config.versions import is_installed
from nb_accelerate.base.devices import DEVICE_KINDS
from nb_accelerate.compat.environ import patch_environment
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


class PrepareForLaunch:
    """A function for `torch.multiprocessing.spawn` and its like, which call it with the number of the process.

    `nb_accelerate.notebook_launcher` does all this by itself, and more.

    Args:
        launcher: the function to run.
        distributed_type: a `DistributedType`; ``"NO"`` sets no rank.
        debug: rendezvous of ``WORLD_SIZE`` processes by the file ``ACCELERATE_DEBUG_RDV_FILE`` instead of a port.

    Raises:
        ConfigError: there is no such ``distributed_type``.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: DistributedType | str = "NO", debug: bool = False
    ) -> None:
        try:
            self.distributed_type = DistributedType(str(distributed_type))
        except ValueError:
            names = ", ".join(member.value for member in DistributedType)
            raise ConfigError(f"distributed_type={distributed_type!r} is none of: {names}.") from None
        self.launcher = launcher
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> Any:
        """Run the function as process ``index`` of this machine.

        Raises:
            ConfigError: ``debug``, and the environment does not say where and how many.
        """
        variables = {"FORK_LAUNCHED": "1"}
        if self.debug:
            self._init_process_group(index)
        elif self.distributed_type is not DistributedType.NO:
            per_node, node = (int(os.environ.get(name, default)) for name, default in (("NPROC", 1), ("NODE_RANK", 0)))
            variables |= {"LOCAL_RANK": str(index), "RANK": str(per_node * node + index)}
        with patch_environment(**variables):
            return self.launcher(*args)

    @staticmethod
    def _init_process_group(index: int) -> None:
        file, size = os.environ.get("ACCELERATE_DEBUG_RDV_FILE"), os.environ.get("WORLD_SIZE")
        if file is None or size is None:
            raise ConfigError(
                "PrepareForLaunch(debug=True) needs the environment variables ACCELERATE_DEBUG_RDV_FILE, a path, and "
                "WORLD_SIZE. debug_launcher sets up processes for debugging without any."
            )
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=index, world_size=int(size))


def write_basic_config(mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None) -> Path | bool:
    """Write a configuration file for the devices of this machine, as ``nb-accelerate config default`` does.

    Args:
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        save_location: the file; by default the one that launches read.

    Returns:
        The file, or False where there was one, which is not changed.

    Raises:
        ConfigError: there is no such precision, or the file cannot be written.
    """
    path = default_path() if save_location is None else Path(save_location).expanduser()
    if path.exists():
        print(f"{path} is there and was not changed. To answer the questions again: nb-accelerate config")  # noqa: T201 - as accelerate does
        return False
    kind = next(kind for kind in DEVICE_KINDS if kind.is_available())
    gpus = 0 if kind.is_host or kind.start_runtime else max(1, kind.count())
    return write_config(default_config(gpus, mixed_precision=mixed_precision.lower()), path)


_WHEELS = (
    "https://storage.googleapis.com/libtpu-releases/index.html",
    "https://storage.googleapis.com/libtpu-wheels/index.html",
)


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that fits torch, on Google Colab. Restart the runtime afterwards.

    Args:
        upgrade: upgrade torch first.

    Raises:
        RuntimeError: this is not Colab, where packages belong to the user and not to us.
        CalledProcessError: pip failed; it says why.
    """
    if not is_installed("google.colab"):
        raise RuntimeError(
            "install_xla was called outside of Google Colab. Install torch_xla as the rest of your environment: "
            f"pip install {_requirement()}."
        )
    if upgrade:
        _pip("--upgrade", "torch")
    _pip(_requirement(), *(word for page in _WHEELS for word in ("--find-links", page)))


def _requirement() -> str:
    """Return what to install: torch_xla has the version of the torch that it is for."""
    major, minor = importlib.metadata.version("torch").split("+")[0].split(".")[:2]
    return f"torch_xla[tpu]~={major}.{minor}.0"


def _pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)

"""Functions that return what the devices of this machine can do."""

from __future__ import annotations

import functools
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import parse

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.precision import AORecipeKwargs
from nb_accelerate.base.config.versions import is_installed
from nb_accelerate.base.devices import DEVICE_KINDS
from nb_accelerate.base.topology import read_topology
from nb_accelerate.errors import MissingDependencyError
from nb_accelerate.training.precision.fp8 import replace_layers
from nb_accelerate.training.process.devices import device_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from nb_accelerate.base.devices import DeviceKind


@dataclass(frozen=True)
class CPUInformation:
    """Rank and world size of this process, on its machine (``local_``) and in all."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def _preferred_kind() -> DeviceKind:
    return next(kind for kind in DEVICE_KINDS if kind.is_available())


def is_cuda_available() -> bool:
    """Return whether there is a CUDA device."""
    return device_kind("cuda").is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether there is an Apple GPU.

    Args:
        min_version: accepted and not needed: every torch this package works with has it.
    """
    del min_version
    return device_kind("mps").is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether there is an Intel GPU.

    Args:
        check_device: accepted; whether there is one is always checked.
    """
    del check_device
    return device_kind("xpu").is_available()


def is_rocm_available() -> bool:
    """Return whether torch was built for AMD GPUs, and there is one."""
    return torch.version.hip is not None and is_cuda_available()


def is_xccl_available() -> bool:
    """Return whether torch.distributed can carry tensors between Intel GPUs."""
    return torch.distributed.is_available() and torch.distributed.is_backend_available("xccl")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the best device of this machine computes in bfloat16.

    Args:
        ignore_tpu: accepted; TPUs all do.
    """
    del ignore_tpu
    return _preferred_kind().supports_bf16()


def is_fp16_available() -> bool:
    """Return whether the best device of this machine computes in float16; all known kinds do."""
    return True


def check_cuda_fp8_capability() -> bool:
    """Return whether the CUDA device has 8-bit floating point units (Ada, Hopper and newer)."""
    kind = device_kind("cuda")
    return kind.is_available() and kind.supports_fp8()


def is_fp8_available() -> bool:
    """Return whether a package for 8-bit training is installed: transformer_engine or torchao."""
    return is_installed("transformer_engine") or is_installed("torchao")


def get_current_device_type() -> tuple[str, str]:
    """Return torch's name of the preferred device type, and the `DistributedType` of several such devices."""
    kind = _preferred_kind()
    return kind.name, str(kind.distributed_type)


def get_cpu_distributed_information() -> CPUInformation:
    """Return rank and world size of this process from the environment variables of its launcher."""
    topology = read_topology(Environment().variables)
    return CPUInformation(topology.rank, topology.world_size, topology.local_rank, topology.local_world_size)


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of NVIDIA GPUs and how many there are, without starting CUDA in this process."""
    names = _ask_nvidia_smi("name")
    return list(names), len(names)


@functools.cache
def _ask_nvidia_smi(what: str) -> tuple[str, ...]:
    """Return a property of each GPU; nothing where there is no ``nvidia-smi``."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = [command, f"--query-gpu={what}", "--format=csv,noheader"]
    run = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return tuple(line.strip() for line in run.stdout.splitlines() if line.strip()) if run.returncode == 0 else ()


def check_cuda_p2p_ib_support() -> bool:
    """Return whether GPUs may talk to each other directly; GeForce cards from the RTX 40 series on cannot.

    Where they cannot, ``NCCL_P2P_DISABLE=1`` and ``NCCL_IB_DISABLE=1`` keep nccl from trying. Recent drivers need
    neither.
    """
    names, count = get_gpu_info()
    if count < 2 or not any("RTX 40" in name for name in names):
        return True
    drivers = _ask_nvidia_smi("driver_version")
    return bool(drivers) and parse(drivers[0]) >= parse("550.40.7")


def check_os_kernel() -> None:
    """Warn about Linux kernels older than 5.5, on which ranks were seen to hang."""
    if platform.system() != "Linux":
        return
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (5, 5):
        from nb_accelerate.compat.output import get_logger

        get_logger(__name__).warning(
            "This machine runs Linux %s. Ranks were seen to hang on kernels before 5.5; use a newer one.",
            platform.release(),
        )


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether a model has linear layers that torchao trains in 8 bits."""
    return _has_layers(model, "torchao.float8.")


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether a model has layers of TransformerEngine."""
    return _has_layers(model, "transformer_engine.")


def _has_layers(model: nn.Module, package: str) -> bool:
    # By name: what was not imported has made no layers.
    return any(type(layer).__module__.startswith(package) for layer in model.modules())


def torchao_required(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function refuse to run where torchao is not installed. A decorator."""

    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        """Check, and call the function."""
        if not is_installed("torchao"):
            raise MissingDependencyError("torchao", needed_for=func.__name__)
        return func(*args, **kwargs)

    return checked


def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[Any, str], bool] | None = None
) -> None:
    """Replace linear layers of a model by torchao's, which compute in 8 bits. They have the same weights and names.

    Args:
        model: changed in place.
        config: see `AORecipeKwargs`.
        module_filter_func: see `AORecipeKwargs`.

    Raises:
        MissingDependencyError: torchao is not installed.
    """
    replace_layers(model, AORecipeKwargs(config=config, module_filter_func=module_filter_func))

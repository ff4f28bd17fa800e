"""Which packages are installed, in which version. Nothing is imported to find out."""

from __future__ import annotations

import operator
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.version import parse

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.versions import is_installed
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from packaging.version import Version

STR_OPERATION_TO_FUNC: dict[str, Callable[[Version, Version], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Return whether a package's version, or a version, is ``operation`` another one.

    Examples:
        ```python
        compare_versions("torch", ">=", "2.8")
        ```

    Args:
        library_or_version: the name of an installed package, or a parsed version.
        operation: ``">"``, ``">="``, ``"=="``, ``"!="``, ``"<="`` or ``"<"``.
        requirement_version: what to compare with.

    Raises:
        ConfigError: there is no such operation.
        importlib.metadata.PackageNotFoundError: the package is not installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ConfigError(
            f"operation={operation!r} does not compare. Write one of: {', '.join(STR_OPERATION_TO_FUNC)}."
        )
    if isinstance(library_or_version, str):
        library_or_version = parse(metadata.version(library_or_version))
    return STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether the version of torch is ``operation`` another one: ``is_torch_version(">=", "2.8")``.

    Like `compare_versions`, but a build such as 2.8.0+cu128 counts as 2.8.0.
    """
    return compare_versions(parse(parse(metadata.version("torch")).base_version), operation, version)


def is_weights_only_available() -> bool:
    """Return whether ``torch.load(weights_only=True)`` reads everything a checkpoint holds."""
    return is_torch_version(">=", "2.4.0")


_PACKAGES = (
    "aim amdsmi boto3 clearml comet_ml datasets deepspeed dvclive import_timer matplotlib mlflow pandas peft pynvml "
    "pytest schedulefree swanlab timm torchao torchdata torchdata.stateful_dataloader torchvision trackio "
    "transformer_engine transformers triton wandb"
)
# Functions that return whether a module can be imported.
_MODULES = {f"is_{module.replace('.', '_')}_available": module for module in _PACKAGES.split()}

_NEVER = "hpu lomo megatron_lm mlu msamp musa neuron npu pippy sagemaker sdaa"
# Functions that return False, for scripts that ask.
_UNSUPPORTED = {"is_habana_gaudi1", *(f"is_{what}_available" for what in _NEVER.split())}


def __getattr__(name: str) -> Callable[..., bool]:
    module = _MODULES.get(name)
    if module is None and name not in _UNSUPPORTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def available(*_: object, **__: object) -> bool:
        return module is not None and is_installed(module)

    available.__name__ = available.__qualname__ = name
    available.__doc__ = (
        f"Return whether {module} can be imported." if module else "Return False: this is not supported."
    )
    globals()[name] = available
    return available


def is_tensorboard_available() -> bool:
    """Return whether tensorboard, or tensorboardX, can be imported."""
    return is_installed("tensorboard") or is_installed("tensorboardX")


def is_rich_available() -> bool:
    """Return whether the package rich is installed and wanted: ``ACCELERATE_ENABLE_RICH`` says so."""
    return is_installed("rich") and bool(Environment().flag("ACCELERATE_ENABLE_RICH"))


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, in a version of at least ``min_version``."""
    if not is_installed("bitsandbytes"):
        return False
    return min_version is None or compare_versions("bitsandbytes", ">=", min_version)


def is_8bit_bnb_available() -> bool:
    """Return whether bitsandbytes has 8-bit weights."""
    return is_bnb_available("0.37.2")


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes has 4-bit weights."""
    return is_bnb_available("0.39.0")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes works on devices that are not CUDA."""
    return is_bnb_available("0.46.0")


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether transformer_engine has MXFP8 blocks."""
    return is_installed("transformer_engine") and compare_versions("transformer_engine", ">=", "2.1.0")


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed, and on request whether it runs on a TPU or a GPU.

    Args:
        check_is_tpu: its device has to be a TPU.
        check_is_gpu: its device has to be a GPU.

    Raises:
        ValueError: both are asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise ValueError("check_is_tpu and check_is_gpu were both given, and no device is both. Write one of them.")
    if not is_installed("torch_xla"):
        return False
    if not check_is_tpu and not check_is_gpu:
        return True
    import torch_xla.runtime as xla

    return xla.device_type() in ({"TPU"} if check_is_tpu else {"CUDA", "GPU"})


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of some libraries that have been imported in this process."""
    return [name for name in library_names if name in sys.modules]

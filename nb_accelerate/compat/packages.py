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

_OPERATIONS: dict[str, Callable[[Version, Version], bool]] = {
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
    if operation not in _OPERATIONS:
        raise ConfigError(f"operation={operation!r} does not compare. Write one of: {', '.join(_OPERATIONS)}.")
    if isinstance(library_or_version, str):
        library_or_version = parse(metadata.version(library_or_version))
    return _OPERATIONS[operation](library_or_version, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether the version of torch is ``operation`` another one: ``is_torch_version(">=", "2.8")``.

    Like `compare_versions`, but a build such as 2.8.0+cu128 counts as 2.8.0.
    """
    return compare_versions(parse(parse(metadata.version("torch")).base_version), operation, version)


def is_weights_only_available() -> bool:
    """Return whether ``torch.load(weights_only=True)`` reads everything a checkpoint holds."""
    return is_torch_version(">=", "2.4.0")


def _check(*modules: str) -> Callable[[], bool]:
    def available() -> bool:
        return all(map(is_installed, modules))

    available.__doc__ = f"Return whether {' and '.join(modules)} can be imported."
    return available


is_aim_available = _check("aim")
is_amdsmi_available = _check("amdsmi")
is_boto3_available = _check("boto3")
is_clearml_available = _check("clearml")
is_comet_ml_available = _check("comet_ml")
is_datasets_available = _check("datasets")
is_deepspeed_available = _check("deepspeed")
is_dvclive_available = _check("dvclive")
is_import_timer_available = _check("import_timer")
is_matplotlib_available = _check("matplotlib")
is_mlflow_available = _check("mlflow")
is_pandas_available = _check("pandas")
is_peft_available = _check("peft")
is_pynvml_available = _check("pynvml")
is_pytest_available = _check("pytest")
is_schedulefree_available = _check("schedulefree")
is_swanlab_available = _check("swanlab")
is_timm_available = _check("timm")
is_torchao_available = _check("torchao")
is_torchdata_available = _check("torchdata")
is_torchdata_stateful_dataloader_available = _check("torchdata.stateful_dataloader")
is_torchvision_available = _check("torchvision")
is_trackio_available = _check("trackio")
is_transformer_engine_available = _check("transformer_engine")
is_transformers_available = _check("transformers")
is_triton_available = _check("triton")
is_wandb_available = _check("wandb")


def _never(what: str) -> Callable[..., bool]:
    def available(*_: object, **__: object) -> bool:
        return False

    available.__doc__ = f"Return False: {what} is not supported. There for scripts that ask."
    return available


is_habana_gaudi1 = _never("habana gaudi1")
is_hpu_available = _never("hpu")
is_lomo_available = _never("lomo")
is_megatron_lm_available = _never("megatron lm")
is_mlu_available = _never("mlu")
is_msamp_available = _never("msamp")
is_musa_available = _never("musa")
is_neuron_available = _never("neuron")
is_npu_available = _never("npu")
is_pippy_available = _never("pippy")
is_sagemaker_available = _never("sagemaker")
is_sdaa_available = _never("sdaa")


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
    return is_transformer_engine_available() and compare_versions("transformer_engine", ">=", "2.1.0")


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

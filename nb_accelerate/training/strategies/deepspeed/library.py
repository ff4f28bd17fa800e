"""Import DeepSpeed, quietly and for the device of this process, and make it forget process groups that have ended.

DeepSpeed keeps one communication backend and one set of process groups for a process, in variables of its modules. They
outlive the default process group, and a second engine would look for the first one's groups.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from nb_accelerate.base.config.env import variables_set
from nb_accelerate.errors import ConfigError, MissingDependencyError
from nb_accelerate.training.strategies.ddp import is_alive

if TYPE_CHECKING:
    from collections.abc import Mapping

engines: WeakSet[Any] = WeakSet()
"""The engines of this process that train. As DeepSpeed itself, all strategies of the process share them."""

# An operation for inference that DeepSpeed compiles for 40 seconds when it meets a process group of CPUs.
_OPS_OF_THE_HOST = "deepspeed_shm_comm"

# Keys of a configuration with which users ask DeepSpeed to print.
_TALKATIVE = ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state")


def import_deepspeed(device_type: str) -> Any:
    """Return the module ``deepspeed``, for a type of device; it is imported for one in a process."""
    variables = {"DS_ACCELERATOR": device_type} if "DS_ACCELERATOR" not in os.environ else {}
    try:
        with variables_set(variables):
            import deepspeed
            import deepspeed.comm.comm
            import deepspeed.ops
            from deepspeed.accelerator import get_accelerator

            name = get_accelerator().device_name()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "deepspeed":
            raise
        raise MissingDependencyError("deepspeed", needed_for="DeepSpeedPlugin") from error
    if name.partition(":")[0] != device_type:
        raise ConfigError(
            f"DeepSpeed was imported for {name} devices in this process, and models are trained on {device_type}. "
            f"Leave `import deepspeed` to Accelerator(), or export DS_ACCELERATOR={device_type}."
        )
    compatible = getattr(deepspeed.ops, "__compatible_ops__", {})
    if _OPS_OF_THE_HOST in compatible:
        compatible[_OPS_OF_THE_HOST] = False
    # One for each collective of stage 3, of torch 2.13 and about DeepSpeed's own calls.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    return deepspeed


def refuse_unsupported(precision: str) -> None:
    """Raise `ConfigError` if the device lacks instructions that DeepSpeed wants for ``"bf16"`` or ``"fp16"``."""
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator()
    supported = {"fp16": device.is_fp16_supported, "bf16": device.is_bf16_supported}
    if precision in supported and not supported[precision]():
        name = "CPU, which has no instructions for it" if device.device_name() == "cpu" else device.device_name()
        other = "mixed_precision='bf16'" if precision == "fp16" else "mixed_precision='fp16' or 'no'"
        raise ConfigError(
            f"mixed_precision={precision!r} was asked for, and DeepSpeed does not train in {precision} on this {name}. "
            f"Write {other}."
        )


def set_loudness(config: Mapping[str, Any]) -> None:
    """Make DeepSpeed say errors only, on standard output, unless a configuration asks for more."""
    logger = logging.getLogger("DeepSpeed")
    level = logging.INFO if any(config.get(key) for key in _TALKATIVE) else logging.ERROR
    logger.setLevel(level)
    for handler in logger.handlers:
        handler.setLevel(level)


def path_of_programs() -> str:
    """Return ``PATH`` with the folder of this Python, where pip puts the ``ninja`` that DeepSpeed compiles with."""
    return os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))  # noqa: PTH120 - text


def forget_ended_groups() -> None:
    """Make DeepSpeed forget process groups that have ended, and the engines that used them."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    world = groups._WORLD_GROUP  # noqa: SLF001 - there is no public way to it
    if comm.cdb is None or (comm.cdb.is_initialized() and (world is None or is_alive(world))):
        return
    for engine in list(engines):
        engine.destroy()
    engines.clear()
    comm.cdb = None
    for name, value in list(vars(groups).items()):
        if not name.startswith("_") or name.startswith("__") or callable(value) or isinstance(value, ModuleType):
            continue
        if isinstance(value, dict):
            value.clear()
        elif value is not None and "ProcessGroup" in type(value).__name__:
            setattr(groups, name, None)

"""Names of ``accelerate.hooks``."""

from nb_accelerate.training.bigmodel.align_hook import AlignDevicesHook
from nb_accelerate.training.bigmodel.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from nb_accelerate.training.bigmodel.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from nb_accelerate.training.bigmodel.module_hooks import (
    CpuOffload,
    LayerwiseCastingHook,
    UserCpuOffloadHook,
)

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

"""Names of ``accelerate.hooks``."""

from nb_accelerate.training.bigmodel.align_hook import AlignDevicesHook as AlignDevicesHook
from nb_accelerate.training.bigmodel.attach import (
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_execution_device_hook as attach_execution_device_hook,
)
from nb_accelerate.training.bigmodel.hooks import (
    ModelHook as ModelHook,
    SequentialHook as SequentialHook,
    add_hook_to_module as add_hook_to_module,
    remove_hook_from_module as remove_hook_from_module,
    remove_hook_from_submodules as remove_hook_from_submodules,
)
from nb_accelerate.training.bigmodel.module_hooks import (
    CpuOffload as CpuOffload,
    LayerwiseCastingHook as LayerwiseCastingHook,
    UserCpuOffloadHook as UserCpuOffloadHook,
)

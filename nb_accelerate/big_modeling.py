"""Names of ``accelerate.big_modeling``."""

from nb_accelerate.training.bigmodel.device_map import (
    check_device_map,
    infer_auto_device_map,
)
from nb_accelerate.training.bigmodel.dispatch import (
    cpu_offload,
    disk_offload,
    dispatch_model,
)
from nb_accelerate.training.bigmodel.empty import (
    init_empty_weights,
    init_on_device,
)
from nb_accelerate.training.bigmodel.module_hooks import (
    attach_layerwise_casting_hooks,
    cpu_offload_with_hook,
)
from nb_accelerate.training.checkpoint.dispatching import load_checkpoint_and_dispatch
from nb_accelerate.training.checkpoint.model import load_checkpoint_in_model

__all__ = [
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]

"""Names of ``accelerate.big_modeling``."""

from nb_accelerate.training.bigmodel.device_map import (
    check_device_map as check_device_map,
    infer_auto_device_map as infer_auto_device_map,
)
from nb_accelerate.training.bigmodel.dispatch import (
    cpu_offload as cpu_offload,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
)
from nb_accelerate.training.bigmodel.module_hooks import (
    attach_layerwise_casting_hooks as attach_layerwise_casting_hooks,
    cpu_offload_with_hook as cpu_offload_with_hook,
)
from nb_accelerate.training.bigmodel.tensors import (
    init_empty_weights as init_empty_weights,
    init_on_device as init_on_device,
)
from nb_accelerate.training.checkpoint.model import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    load_checkpoint_in_model as load_checkpoint_in_model,
)

"""Names of ``accelerate.utils.modeling``."""

from nb_accelerate.compat.models import (
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    get_grad_scaler as get_grad_scaler,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
    get_module_size_with_ties as get_module_size_with_ties,
    get_non_persistent_buffers as get_non_persistent_buffers,
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    named_module_tensors as named_module_tensors,
)
from nb_accelerate.training.bigmodel.device_map import (
    check_device_map as check_device_map,
    clean_device_map as clean_device_map,
    infer_auto_device_map as infer_auto_device_map,
)
from nb_accelerate.training.bigmodel.device_memory import (
    get_balanced_memory as get_balanced_memory,
    get_max_memory as get_max_memory,
)
from nb_accelerate.training.bigmodel.offloaded import load_offloaded_weights as load_offloaded_weights
from nb_accelerate.training.bigmodel.sizes import (
    calculate_maximum_sizes as calculate_maximum_sizes,
    compute_module_sizes as compute_module_sizes,
    convert_file_size_to_int as convert_file_size_to_int,
    dtype_byte_size as dtype_byte_size,
    get_max_layer_size as get_max_layer_size,
)
from nb_accelerate.training.bigmodel.tensors import (
    align_module_device as align_module_device,
    has_offloaded_params as has_offloaded_params,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from nb_accelerate.training.bigmodel.ties import (
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    find_tied_parameters as find_tied_parameters,
    retie_parameters as retie_parameters,
)
from nb_accelerate.training.checkpoint.files import (
    id_tensor_storage as id_tensor_storage,
    load_state_dict as load_state_dict,
)
from nb_accelerate.training.checkpoint.model import load_checkpoint_in_model as load_checkpoint_in_model

"""Under the names of ``accelerate.utils.modeling``; what is about large models is not here yet."""

from nb_accelerate.bigmodel.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    dtype_byte_size,
    get_max_layer_size,
)
from nb_accelerate.bigmodel.ties import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from nb_accelerate.checkpoint.files import convert_file_size_to_int, id_tensor_storage, load_state_dict
from nb_accelerate.checkpoint.model import load_checkpoint_in_model
from nb_accelerate.compat.models import named_module_tensors
from nb_accelerate.compat.numbers import get_grad_scaler, get_mixed_precision_context_manager

__all__ = [
    "calculate_maximum_sizes",
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "compute_module_sizes",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_grad_scaler",
    "get_max_layer_size",
    "get_mixed_precision_context_manager",
    "id_tensor_storage",
    "load_checkpoint_in_model",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
]

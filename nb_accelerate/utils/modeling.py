"""Under the names of ``accelerate.utils.modeling``; what is about large models is not here yet."""

from nb_accelerate.compat.models import named_module_tensors
from nb_accelerate.compat.numbers import get_grad_scaler, get_mixed_precision_context_manager
from nb_accelerate.compat.saving import convert_file_size_to_int, id_tensor_storage
from nb_accelerate.compat.sizes import dtype_byte_size

__all__ = [
    "convert_file_size_to_int",
    "dtype_byte_size",
    "get_grad_scaler",
    "get_mixed_precision_context_manager",
    "id_tensor_storage",
    "named_module_tensors",
]

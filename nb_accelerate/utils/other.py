"""Under the names of ``accelerate.utils.other``, and ``tqdm``."""

from nb_accelerate.accelerator.compiling import compile_regions
from nb_accelerate.accelerator.saving import save
from nb_accelerate.checkpoint.files import clean_state_dict_for_safetensors, load
from nb_accelerate.compat.capabilities import check_os_kernel
from nb_accelerate.compat.environ import is_port_in_use, merge_dicts
from nb_accelerate.compat.exchange import wait_for_everyone
from nb_accelerate.compat.models import (
    get_pretty_name,
    has_compiled_regions,
    is_compiled_module,
    model_has_dtensor,
    recursive_getattr,
)
from nb_accelerate.compat.progress import tqdm
from nb_accelerate.compat.sizes import convert_bytes
from nb_accelerate.strategies.unwrapping import extract_model_from_parallel

__all__ = [
    "check_os_kernel",
    "clean_state_dict_for_safetensors",
    "compile_regions",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_pretty_name",
    "has_compiled_regions",
    "is_compiled_module",
    "is_port_in_use",
    "load",
    "merge_dicts",
    "model_has_dtensor",
    "recursive_getattr",
    "save",
    "tqdm",
    "wait_for_everyone",
]

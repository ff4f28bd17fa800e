"""Names of ``accelerate.utils.other``, and ``tqdm``."""

from nb_accelerate.compat.capabilities import check_os_kernel as check_os_kernel
from nb_accelerate.compat.environ import (
    is_port_in_use as is_port_in_use,
    merge_dicts as merge_dicts,
)
from nb_accelerate.compat.exchange import wait_for_everyone as wait_for_everyone
from nb_accelerate.compat.fsdp import get_module_children_bottom_up as get_module_children_bottom_up
from nb_accelerate.compat.models import (
    get_model_tp_size as get_model_tp_size,
    get_pretty_name as get_pretty_name,
    has_compiled_regions as has_compiled_regions,
    is_compiled_module as is_compiled_module,
    model_has_dtensor as model_has_dtensor,
    recursive_getattr as recursive_getattr,
)
from nb_accelerate.compat.output import convert_bytes as convert_bytes, tqdm as tqdm
from nb_accelerate.training.accelerator.checkpoint_parts import save as save
from nb_accelerate.training.accelerator.compiling import (
    compile_regions as compile_regions,
    compile_regions_deepspeed as compile_regions_deepspeed,
    compile_regions_fsdp2 as compile_regions_fsdp2,
)
from nb_accelerate.training.checkpoint.files import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    load as load,
)
from nb_accelerate.training.strategies.unwrapping import extract_model_from_parallel as extract_model_from_parallel

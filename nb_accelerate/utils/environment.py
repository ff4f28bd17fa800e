"""Names of ``accelerate.utils.environment``."""

from nb_accelerate.compat.capabilities import (
    check_cuda_fp8_capability as check_cuda_fp8_capability,
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support,
    get_cpu_distributed_information as get_cpu_distributed_information,
    get_current_device_type as get_current_device_type,
    get_gpu_info as get_gpu_info,
)
from nb_accelerate.compat.environ import (
    clear_environment as clear_environment,
    convert_dict_to_env_variables as convert_dict_to_env_variables,
    get_int_from_env as get_int_from_env,
    parse_choice_from_env as parse_choice_from_env,
    parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment,
    purge_accelerate_environment as purge_accelerate_environment,
    str_to_bool as str_to_bool,
)
from nb_accelerate.compat.packages import are_libraries_initialized as are_libraries_initialized
from nb_accelerate.training.process.devices import set_numa_affinity as set_numa_affinity

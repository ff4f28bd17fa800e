"""Names of ``accelerate.utils.launch``."""

from nb_accelerate.compat.launching import (
    PrepareForLaunch as PrepareForLaunch,
    write_basic_config as write_basic_config,
)
from nb_accelerate.compat.refused import (
    prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env as prepare_multi_gpu_env,
    prepare_sagemager_args_inputs as prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env,
    prepare_tpu as prepare_tpu,
)

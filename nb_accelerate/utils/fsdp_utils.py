"""Names of ``accelerate.utils.fsdp_utils``."""

from nb_accelerate.compat.fsdp import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
    ensure_weights_retied as ensure_weights_retied,
    fsdp2_apply_ac as fsdp2_apply_ac,
    fsdp2_canonicalize_names as fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict as fsdp2_load_full_state_dict,
    fsdp2_prepare_model as fsdp2_prepare_model,
    get_fsdp2_grad_scaler as get_fsdp2_grad_scaler,
    get_parameters_from_modules as get_parameters_from_modules,
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    merge_fsdp_weights as merge_fsdp_weights,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from nb_accelerate.compat.refused import fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters

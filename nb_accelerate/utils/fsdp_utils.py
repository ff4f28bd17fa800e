"""Names of ``accelerate.utils.fsdp_utils``."""

from nb_accelerate.compat.fsdp import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    merge_fsdp_weights as merge_fsdp_weights,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)

"""Names of ``accelerate.utils.offload``."""

from nb_accelerate.training.bigmodel.ties import extract_submodules_state_dict as extract_submodules_state_dict

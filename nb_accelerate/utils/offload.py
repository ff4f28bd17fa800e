"""Under the names of ``accelerate.utils.offload``; offloading itself is not here yet."""

from nb_accelerate.bigmodel.ties import extract_submodules_state_dict as extract_submodules_state_dict

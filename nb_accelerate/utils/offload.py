"""Names of ``accelerate.utils.offload``."""

from nb_accelerate.training.bigmodel.offloaded import (
    OffloadedWeightsLoader as OffloadedWeightsLoader,
    PrefixedDataset as PrefixedDataset,
    load_offloaded_weight as load_offloaded_weight,
    offload_state_dict as offload_state_dict,
    offload_weight as offload_weight,
    save_offload_index as save_offload_index,
)
from nb_accelerate.training.bigmodel.ties import extract_submodules_state_dict as extract_submodules_state_dict

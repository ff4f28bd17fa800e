"""Names of ``accelerate.utils.ao``."""

from nb_accelerate.compat.capabilities import (
    convert_model_to_fp8_ao as convert_model_to_fp8_ao,
    has_ao_layers as has_ao_layers,
)
from nb_accelerate.compat.refused import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers

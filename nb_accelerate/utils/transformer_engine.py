"""Names of ``accelerate.utils.transformer_engine``."""

from nb_accelerate.compat.capabilities import has_transformer_engine_layers as has_transformer_engine_layers
from nb_accelerate.compat.refused import (
    apply_fp8_autowrap as apply_fp8_autowrap,
    contextual_fp8_autocast as contextual_fp8_autocast,
    convert_model as convert_model,
)

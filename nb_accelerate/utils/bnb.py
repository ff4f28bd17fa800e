"""Names of ``accelerate.utils.bnb``."""

from nb_accelerate.training.bigmodel.quantised import has_4bit_bnb_layers as has_4bit_bnb_layers
from nb_accelerate.training.checkpoint.quantised import load_and_quantize_model as load_and_quantize_model

"""Names of ``accelerate.utils.torch_xla``."""

from nb_accelerate.compat.xla import install_xla as install_xla

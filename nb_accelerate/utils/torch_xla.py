"""Names of ``accelerate.utils.torch_xla``."""

from nb_accelerate.compat.launching import install_xla as install_xla

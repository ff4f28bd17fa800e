"""Under the names of ``accelerate.utils.torch_xla``."""

from nb_accelerate.compat.xla import install_xla

__all__ = [
    "install_xla",
]

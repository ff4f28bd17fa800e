"""Under the names of ``accelerate.utils.versions``."""

from nb_accelerate.compat.versions import compare_versions, is_torch_version

__all__ = [
    "compare_versions",
    "is_torch_version",
]

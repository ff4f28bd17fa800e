"""Names of ``accelerate.utils.versions``."""

from nb_accelerate.compat.packages import (
    compare_versions as compare_versions,
    is_torch_version as is_torch_version,
)

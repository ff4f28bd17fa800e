"""Names of ``accelerate.parallelism_config``."""

from nb_accelerate.base.config.parallelism import ParallelismConfig as ParallelismConfig

"""Under the names of ``accelerate.logging``."""

from nb_accelerate.compat.loggers import MultiProcessAdapter, get_logger

__all__ = [
    "MultiProcessAdapter",
    "get_logger",
]

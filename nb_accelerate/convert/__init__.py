"""Run a plain training cell on all ranks with the numbers of one process: ``%%distributed --convert``."""

from nb_accelerate.convert.converted import Converted

__all__ = ["Converted"]

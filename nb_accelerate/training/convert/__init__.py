"""Run a plain training cell on all ranks with the numbers of one process: ``%%distributed --convert``."""

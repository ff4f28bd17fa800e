"""One class per distributed setup, chosen once by `select_strategy`; afterwards nobody asks which one it is."""

from nb_accelerate.strategies.select import select_collectives, select_strategy
from nb_accelerate.strategies.strategy import Strategy

__all__ = ["Strategy", "select_collectives", "select_strategy"]

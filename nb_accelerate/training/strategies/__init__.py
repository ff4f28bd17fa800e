"""Distributed setups: one class each, chosen once by `select_strategy`; nobody asks afterwards which one it is."""

from nb_accelerate.training.strategies.select import select_collectives, select_strategy
from nb_accelerate.training.strategies.strategy import ModelRequest, Strategy

__all__ = ["ModelRequest", "Strategy", "select_collectives", "select_strategy"]

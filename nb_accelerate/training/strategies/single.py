"""One process, one device."""

from __future__ import annotations

from nb_accelerate.training.strategies.strategy import Strategy


class SingleStrategy(Strategy):
    """Train in one process, which is what the defaults of `Strategy` do."""

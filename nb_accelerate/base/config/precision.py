"""The choice of ``mixed_precision`` between argument and environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nb_accelerate.base.config.checks import check_choice, first_given
from nb_accelerate.base.config.distributed import PrecisionType

if TYPE_CHECKING:
    from nb_accelerate.base.config.env import Environment


def resolve_precision(argument: PrecisionType | str | None, environment: Environment) -> PrecisionType:
    """Choose the precision: the argument, else ``ACCELERATE_MIXED_PRECISION``, else none."""
    name = "mixed_precision" if argument is not None else "ACCELERATE_MIXED_PRECISION"
    chosen = first_given(argument, environment.mixed_precision, default=PrecisionType.NO)
    return PrecisionType(check_choice(name, chosen, PrecisionType.list()))

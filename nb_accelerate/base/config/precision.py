"""The values of ``mixed_precision``, and the choice between argument and environment."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from nb_accelerate.base.config.checks import check_choice, first_given

if TYPE_CHECKING:
    from nb_accelerate.base.config.env import Environment


class PrecisionType(str, Enum):
    """The values of ``mixed_precision``."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def list(cls) -> list[str]:
        """Return the values, as they are written in code and in the environment."""
        return [member.value for member in cls]


def resolve_precision(argument: PrecisionType | str | None, environment: Environment) -> PrecisionType:
    """Choose the precision: the argument, else ``ACCELERATE_MIXED_PRECISION``, else none."""
    name = "mixed_precision" if argument is not None else "ACCELERATE_MIXED_PRECISION"
    chosen = first_given(argument, environment.mixed_precision, default=PrecisionType.NO)
    return PrecisionType(check_choice(name, chosen, PrecisionType.list()))

"""Layers that compute in 8-bit numbers and stay in a model when it is prepared in another precision."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger("nb_accelerate")


def warn_of_float8_layers(model: nn.Module, precision: str) -> None:
    """Warn of layers that an earlier ``mixed_precision="fp8"`` put in a model, which is prepared without it now.

    Args:
        precision: the name of the one that was asked for.
    """
    library = sys.modules.get("torchao.float8.float8_linear")
    if library is None:  # then nothing has made such layers
        return
    number = sum(isinstance(layer, library.Float8Linear) for layer in model.modules())
    if number:
        logger.warning(
            "mixed_precision=%r: %d layers of %s were made to compute in 8 bits by mixed_precision='fp8' or torchao "
            "before, and still do. To compute all of it in %s, make the model anew and load its weights with "
            "load_state_dict.",
            precision,
            number,
            type(model).__name__,
            "its own dtype" if precision == "no" else precision,
        )

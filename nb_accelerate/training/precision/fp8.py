"""Compute linear layers in 8-bit floating point numbers, by torchao, and the rest of a model in bfloat16."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from nb_accelerate.errors import MissingDependencyError
from nb_accelerate.training.precision.precision import AutocastPrecision

if TYPE_CHECKING:
    from nb_accelerate.base.config.kwargs import AutocastKwargs
    from nb_accelerate.base.config.precision import AORecipeKwargs

logger = logging.getLogger("nb_accelerate")

_UNIT = 16  # what matrix units for 8-bit numbers need sizes to be a multiple of


class FP8Precision(AutocastPrecision):
    """Compute linear layers in 8-bit numbers and the rest in bfloat16; weights and optimizer state stay in float32.

    Layers are replaced in place by torchao's, which have the same weights under the same names.
    """

    name = "fp8"

    def __init__(self, device_type: str, options: AutocastKwargs, recipe: AORecipeKwargs) -> None:
        super().__init__(device_type, torch.bfloat16, options)
        self.recipe = recipe
        self._library = _import_torchao()

    @override
    def prepare_model(self, model: nn.Module) -> nn.Module:
        kind = self._library.float8_linear.Float8Linear
        if not any(isinstance(layer, kind) for layer in model.modules()):
            replace_layers(model, self.recipe)
        return super().prepare_model(model)


def replace_layers(model: nn.Module, recipe: AORecipeKwargs) -> None:
    """Replace the linear layers of a model that a recipe chooses by torchao's, in place.

    Raises:
        MissingDependencyError: torchao is not installed.
    """
    library = _import_torchao()
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    ends = {linear[0], linear[-1]} if linear else set()
    wanted = recipe.module_filter_func
    chosen = []

    def is_chosen(layer: nn.Module, name: str) -> bool:
        if not name or not isinstance(layer, nn.Linear):  # torchao asks for linear layers only; accelerate for all
            return False
        if wanted is None:
            answer = name not in ends and not layer.in_features % _UNIT and not layer.out_features % _UNIT
        else:
            answer = bool(wanted(layer, name))
        if answer:
            chosen.append(name)
        return answer

    config = recipe.config
    if config is None:
        config = library.Float8LinearConfig(pad_inner_dim=bool(recipe.pad_inner_dim))
    library.convert_to_float8_training(model, module_filter_fn=is_chosen, config=config)
    if not chosen:
        logger.warning(
            "mixed_precision='fp8': no layer of %s computes in 8 bits, and all of it in bfloat16. Linear layers "
            "are chosen whose sizes are multiples of %d, but the first and the last one. To choose others: "
            "kwargs_handlers=[AORecipeKwargs(module_filter_func=lambda layer, name: True)].",
            type(model).__name__,
            _UNIT,
        )


def _import_torchao() -> Any:
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # torchao warns of each device's kernels that do not load here
    try:
        import torchao.float8
        import torchao.float8.float8_linear
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchao":
            raise
        raise MissingDependencyError("torchao", needed_for="mixed_precision='fp8'") from error
    finally:
        logging.disable(disabled)
    return torchao.float8

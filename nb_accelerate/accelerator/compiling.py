"""Compile models with `torch.compile`, whole or block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.compat.regions import repeated_blocks

if TYPE_CHECKING:
    from torch import nn

    from nb_accelerate.config.dynamo import TorchDynamoPlugin


def compiled(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Return a model as the plugin wants it compiled; one that is compiled already stays as it is.

    Called last by ``prepare``, around what the strategy made, so that torch sees where gradients travel.
    """
    if not plugin.is_on or hasattr(model, "_orig_mod"):
        return model
    arguments = plugin.to_compile()
    if plugin.use_regional_compilation:
        blocks = repeated_blocks(model)
        for block in blocks:
            block.compile(**arguments)  # in place; equal blocks share the code of the first
        if blocks:
            return model
    whole: Any = torch.compile(model, **arguments)
    return whole  # type: ignore[no-any-return]  # torch calls it a callable; given a module it is one

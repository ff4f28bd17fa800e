"""Parallelize layers over the ranks that compute them together: tensor parallelism, torch's ``parallelize_module``.

A plan says which layers are parallelized, and how. The weights of such a layer become `DTensor` objects, its
inputs and outputs are those of the whole layer where the styles fit together (``"colwise"``, then ``"rowwise"``), and
all ranks of a group compute the same loss from the same rows. What no plan names is computed by each of them.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.strategies.shards import is_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class PlannedLayer:
    """A layer that is parallelized.

    Attributes:
        name: of the layer in its model.
        module: the layer.
        style: how, as one of `torch.distributed.tensor.parallel`.
    """

    name: str
    module: nn.Module
    style: Any


class TensorParallelizer:
    """Parallelizes the layers of models that a plan names.

    Args:
        mesh: of one dimension: the ranks that compute layers together.
        plan: styles by the names of layers; None for the plans that models bring.
    """

    def __init__(self, mesh: DeviceMesh, plan: Mapping[str, Any] | None) -> None:
        self._mesh = mesh
        self._plan = plan

    def parallelize(self, model: nn.Module, fill_layer: Callable[[nn.Module], object]) -> None:
        """Parallelize layers in place. Those that the user has parallelized over this mesh stay as they are.

        Args:
            fill_layer: gives a layer the weights of rank 0 before it is parallelized.

        Raises:
            ConfigError: the plan does not fit the model, or there is none.
        """
        from torch.distributed.tensor.parallel import parallelize_module

        if any(is_shard(parameter) for parameter in model.parameters()):
            self._check_mesh(model)
            return
        layers = self.plan(model)
        ties = _ties(model)
        for layer in layers:
            fill_layer(layer.module)
            parallelize_module(layer.module, self._mesh, layer.style, src_data_rank=None)  # all ranks have them whole
        names = {layer.name for layer in layers}
        for tied in ties:
            if tied[0][0] in names:
                _tie_again(model, tied)

    def plan(self, model: nn.Module) -> list[PlannedLayer]:
        """Return the layers of a model that are to be parallelized.

        Raises:
            ConfigError: the plan does not fit the model, or there is none.
        """
        brought = getattr(model, "_tp_plan", None)
        plan = self._plan or brought
        if not plan:
            raise ConfigError(
                f"tp_size={self._mesh.size()} was asked for, and {type(model).__name__} brings no plan that says which "
                "layers are parallelized (_tp_plan). Write one: ParallelismConfig(tp_size=..., tp_handler="
                'TorchTensorParallelConfig(plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})).'
            )
        modules = dict(model.named_modules())
        found: dict[str, PlannedLayer] = {}
        for pattern, style in plan.items():
            matching = [name for name in modules if _matches(name, pattern)]
            if not matching and plan is self._plan:
                raise _not_there(model, pattern)
            for name in matching:
                layer = self._layer(name, modules[name], style)
                if layer is not None:
                    found[name] = layer
        layers = list(found.values())
        for tied in _ties(model):
            inside = [name for name, _ in tied if name in found]
            if not inside or len(inside) == len(tied):
                continue
            outside = next(name for name, _ in tied if name not in found)
            if plan is self._plan:
                raise ConfigError(
                    f"{inside[0]} and {outside} share a weight (tied weights), and the plan shards {inside[0]} only. "
                    "Name both or neither in the plan; an embedding is sharded by 'embedding_rowwise', and the layer "
                    "that is tied to it by 'colwise_gather_output'."
                )
            layers = [layer for layer in layers if layer.name not in inside]
        if not layers:
            raise ConfigError(f"The plan that {type(model).__name__} brings names none of its layers: {dict(plan)!r}.")
        return layers

    def _layer(self, name: str, module: nn.Module, style: Any) -> PlannedLayer | None:
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

        if isinstance(style, str):
            made = _style_named(style, name)
            if made is None:
                return None
            style = made
        if not isinstance(style, ParallelStyle):
            raise ConfigError(
                f"The plan has {style!r} for {name}, which is neither a style of torch.distributed.tensor.parallel nor "
                "the name of one. Write 'colwise' or 'rowwise', say."
            )
        if isinstance(style, (ColwiseParallel, RowwiseParallel)) and not isinstance(module, (nn.Linear, nn.Embedding)):
            raise ConfigError(
                f"The plan has {type(style).__name__} for {name}, which is a {type(module).__name__}; only Linear and "
                "Embedding layers are parallelized so. Name the layers inside of it."
            )
        size = self._mesh.size()
        uneven = None
        if isinstance(module, nn.Linear):
            if isinstance(style, ColwiseParallel) and style.use_local_output and style.output_layouts == (Shard(-1),):
                uneven = ("out_features", module.out_features)
            elif isinstance(style, RowwiseParallel) and style.input_layouts != (Replicate(),):
                uneven = ("in_features", module.in_features)
        if uneven is not None and uneven[1] % size:
            raise ConfigError(
                f"{name} has {uneven[0]}={uneven[1]}, which cannot be split into {size} equal parts. Leave it out of "
                f"the plan together with the layers that take its parts, or choose a tp_size that divides {uneven[1]}."
            )
        return PlannedLayer(name, module, style)

    def _check_mesh(self, model: nn.Module) -> None:
        """Refuse a model that was parallelized over other ranks.

        Raises:
            ConfigError: it was.
        """
        for name, parameter in model.named_parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.mesh.tolist() != self._mesh.mesh.tolist():
                raise ConfigError(
                    f"{name} of this {type(model).__name__} was parallelized over the ranks {mesh.mesh.tolist()}, and "
                    f"parallelism_config lays out {self._mesh.mesh.tolist()}. Parallelize it over "
                    "accelerator.torch_device_mesh['tp'], or give prepare the whole model, which applies its plan."
                )


_NAMED = ("colwise", "colwise_rep", "colwise_gather_output", "rowwise", "rowwise_rep", "rowwise_split_input")
_NAMED_OTHERS = ("embedding_rowwise", "embedding_colwise", "sequence_parallel", "replicate")


def _style_named(style: str, layer: str) -> Any:
    """Return torch's style for one of the names that plans of transformers have; None for ``replicate``.

    Raises:
        ConfigError: there is none.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if style == "replicate":
        return None
    if style in {"colwise", "rowwise"}:
        return ColwiseParallel() if style == "colwise" else RowwiseParallel()
    if style in {"colwise_rep", "colwise_gather_output", "embedding_colwise"}:
        return ColwiseParallel(output_layouts=Replicate())
    if style in {"rowwise_rep", "rowwise_split_input", "embedding_rowwise"}:
        return RowwiseParallel(input_layouts=Replicate())
    if style == "sequence_parallel":
        return SequenceParallel(use_local_output=True)
    known = (*_NAMED, *_NAMED_OTHERS)
    raise ConfigError(
        f"The plan has {style!r} for {layer}, which is not a style that is known here.{suggest(style, known)} Write "
        f"one of {', '.join(map(repr, known))}, or an object of torch.distributed.tensor.parallel."
    )


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _not_there(model: nn.Module, pattern: str) -> ConfigError:
    names = [name for name, part in model.named_modules() if name and not any(True for _ in part.children())]
    parameters = [name for name, _ in model.named_parameters() if _matches(name, pattern)]
    if parameters:
        return ConfigError(
            f"The plan names {pattern!r}, which is a parameter of {type(model).__name__}. Layers are parallelized as a "
            f"whole: write {pattern.rpartition('.')[0]!r}."
        )
    shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    return ConfigError(
        f"The plan names {pattern!r}, and {type(model).__name__} has no such layer.{suggest(pattern, names)} Its "
        f"layers are {shown}."
    )


def _ties(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Return, for each parameter that several layers share, the names of these and what each calls it."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append((name, key))
    return [tied for tied in holders.values() if len(tied) > 1]


def _tie_again(model: nn.Module, tied: Sequence[tuple[str, str]]) -> None:
    """Make layers share again a weight that each has sharded for itself.

    Raises:
        ConfigError: they have sharded it in different ways.
    """
    (first, key), *others = tied
    shared: Any = model.get_submodule(first).get_parameter(key)
    for other, name in others:
        own: Any = model.get_submodule(other).get_parameter(name)
        if own.placements != shared.placements:
            raise ConfigError(
                f"{first} and {other} share a weight (tied weights), and the plan shards it in two ways: "
                f"{shared.placements} and {own.placements}. An embedding is sharded by 'embedding_rowwise', and the "
                "layer tied to it by 'colwise_gather_output'."
            )
        model.get_submodule(other).register_parameter(name, shared)

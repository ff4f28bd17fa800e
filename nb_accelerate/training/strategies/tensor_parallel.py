"""Parallelize layers over the ranks that compute them together: tensor parallelism, torch's ``parallelize_module``.

A plan says which layers are parallelized, and how. The weights of such a layer become `DTensor` objects, its
inputs and outputs are those of the whole layer where the styles fit together (``"colwise"``, then ``"rowwise"``), and
all ranks of a group compute the same loss from the same rows. What no plan names is computed by each of them.
"""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

from torch import nn
from typing_extensions import override

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.bigmodel.ties import find_tied_parameters
from nb_accelerate.training.comm import TorchCollectives
from nb_accelerate.training.comm.data_parallel import between_groups, share_random_numbers
from nb_accelerate.training.process.setup import setup_process
from nb_accelerate.training.strategies.averaging import AveragesGradients, GradientAverage
from nb_accelerate.training.strategies.dtensors import DTensorStrategy, MeshLayout, use_shards
from nb_accelerate.training.strategies.sharding import Filler, check_weights, is_shard, note_replaced
from nb_accelerate.training.strategies.unwrapping import innermost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from nb_accelerate.base.config.distributed import DistributedType
    from nb_accelerate.training.comm import Collectives


class TensorParallelizer:
    """Parallelizes the layers of models that a plan names, over the ranks of a mesh of one dimension.

    A plan has styles by the names of layers; None stands for the plans that models bring. Without training, gradients
    need no care.
    """

    def __init__(self, mesh: DeviceMesh, plan: Mapping[str, Any] | None, *, trains: bool = True) -> None:
        self._mesh = mesh
        self._plan = plan
        self._trains = trains

    def parallelize(self, model: nn.Module, fill_layer: Callable[[nn.Module], object]) -> None:
        """Parallelize layers in place. A model whose layers the user has parallelized stays as it is.

        ``fill_layer`` gives a layer the weights of rank 0 before.
        """
        from torch.distributed.tensor.parallel import parallelize_module

        if any(is_shard(parameter) for parameter in model.parameters()):
            return
        # Of each parameter that several layers share, the names of these and what each calls it.
        ties = [[name.rpartition(".")[::2] for name in group] for group in find_tied_parameters(model)]
        styles = self._without_split_ties(model, self._styles(model), ties)
        for name, style in styles.items():
            layer = model.get_submodule(name)
            fill_layer(layer)
            parallelize_module(layer, self._mesh, style, src_data_rank=None)  # all ranks have it whole
        for tied in ties:
            if tied[0][0] in styles:
                _tie_again(model, tied)

    def _styles(self, model: nn.Module) -> dict[str, Any]:
        """Return the styles of the layers that are to be parallelized, by name."""
        plan = self._plan or getattr(model, "_tp_plan", None)
        if not plan:
            asked, write = _ASKED[self._trains]
            raise ConfigError(
                f"{asked.format(self._mesh.size())} was asked for, and {type(model).__name__} brings no plan that says "
                f"which layers are parallelized (_tp_plan). {write}"
            )
        modules = dict(model.named_modules())
        styles: dict[str, Any] = {}
        for pattern, rule in plan.items():
            wanted = pattern.split(".")
            matching = [
                name
                for name in modules
                if len(parts := name.split(".")) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
            ]
            if not matching and plan is self._plan:
                layers = [name for name, part in modules.items() if name and not any(True for _ in part.children())]
                raise ConfigError(
                    f"The plan names {pattern!r}, and {type(model).__name__} has no such layer."
                    f"{suggest(pattern, layers)} Its layers are {', '.join(map(repr, layers[:8]))} ..."
                )
            for name in matching:
                if rule == "replicated_with_grad_allreduce" and not self._trains:
                    continue
                style = _style_named(rule, name) if isinstance(rule, str) else rule
                if style is not None:
                    self._check_size(name, modules, style)
                    styles[name] = style
        return styles

    def _check_size(self, name: str, modules: Mapping[str, nn.Module], style: Any) -> None:
        """Raise `ConfigError` for a layer whose parts would not be equal, and whose parts other layers take."""
        # Where a module says what size heads of attention have (`head_dim`), they are not cut apart.
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        layer, ranks = modules[name], self._mesh.size()
        if not isinstance(layer, nn.Linear):
            return
        if isinstance(style, ColwiseParallel) and style.use_local_output and style.output_layouts == (Shard(-1),):
            what, size = "out_features", layer.out_features
        elif isinstance(style, RowwiseParallel) and style.input_layouts != (Replicate(),):
            what, size = "in_features", layer.in_features
        else:
            return
        head_dim = getattr(modules[name.rpartition(".")[0]], "head_dim", None)
        if isinstance(head_dim, int) and size % head_dim == 0 and (heads := size // head_dim) % ranks:
            raise ConfigError(
                f"{name} has {heads} heads, which cannot be divided among {ranks} ranks. The number of ranks has to "
                f"divide {heads}: {_divisors(heads)}."
            )
        if size % ranks:
            raise ConfigError(
                f"{name} has {what}={size}, which cannot be split into {ranks} equal parts. Leave it out of the plan "
                "together with the layers that take its parts, or choose a number of ranks (tp_size) that divides "
                f"{size}: {_divisors(size)}."
            )

    def _without_split_ties(
        self, model: nn.Module, styles: dict[str, Any], ties: Sequence[Sequence[tuple[str, str]]]
    ) -> dict[str, Any]:
        """Leave out layers that share a weight with one that is not parallelized, where the model brings the plan."""
        for tied in ties:
            inside = [name for name, _ in tied if name in styles]
            if not inside or len(inside) == len(tied):
                continue
            if self._plan:
                outside = next(name for name, _ in tied if name not in styles)
                raise ConfigError(
                    f"{inside[0]} and {outside} share a weight (tied weights), and the plan shards {inside[0]} only. "
                    "Name both or neither in the plan; an embedding is sharded by 'embedding_rowwise', and the layer "
                    "that is tied to it by 'colwise_gather_output'."
                )
            styles = {name: style for name, style in styles.items() if name not in inside}
        if not styles:
            raise ConfigError(f"The plan of {type(model).__name__} (_tp_plan) names none of its layers.")
        return styles


# How users ask to train, and not to; and how they write a plan.
_ASKED = {
    True: (
        "tp_size={}",
        "Write one: ParallelismConfig(tp_size=..., tp_handler=TorchTensorParallelConfig("
        'plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})).',
    ),
    False: (
        'device_map="ranks" on {} ranks',
        'Write one: model._tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}. Or write '
        'device_map="auto" on one rank, which needs none.',
    ),
}


def _divisors(number: int) -> str:
    return ", ".join(str(one) for one in range(1, number + 1) if number % one == 0)


# What plans of transformers call styles.
_STYLES = (
    *("colwise", "colwise_rep", "colwise_gather_output", "embedding_colwise"),
    *("rowwise", "rowwise_rep", "rowwise_split_input", "embedding_rowwise"),
    *("sequence_parallel", "replicate"),
)


def _style_named(style: str, layer: str) -> Any:
    """Return torch's style for one of `_STYLES`; None for ``replicate``."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if style not in _STYLES:
        raise ConfigError(
            f"The plan has {style!r} for {layer}, which is not a style that is known here.{suggest(style, _STYLES)} "
            f"Write one of {', '.join(map(repr, _STYLES))}, or an object of torch.distributed.tensor.parallel. What is "
            "to be whole on each rank is 'replicate'."
        )
    if style == "replicate":
        return None
    if style == "sequence_parallel":
        return SequenceParallel(use_local_output=True)
    if style in {"colwise", "rowwise"}:
        return ColwiseParallel() if style == "colwise" else RowwiseParallel()
    if "colwise" in style:
        return ColwiseParallel(output_layouts=Replicate())
    return RowwiseParallel(input_layouts=Replicate())


def _tie_again(model: nn.Module, tied: Sequence[tuple[str, str]]) -> None:
    """Make layers share again a weight that each has sharded for itself, in one way."""
    (first, key), *others = tied
    shared: Any = model.get_submodule(first).get_parameter(key)
    for other, name in others:
        parameter: Any = model.get_submodule(other).get_parameter(name)
        if parameter.placements != shared.placements:
            raise ConfigError(
                f"{first} and {other} share a weight (tied weights), and the plan shards it in two ways: "
                f"{shared.placements} and {parameter.placements}. An embedding is sharded by 'embedding_rowwise', and "
                "the layer tied to it by 'colwise_gather_output'."
            )
        model.get_submodule(other).register_parameter(name, shared)


class TensorParallelStrategy(DTensorStrategy):
    """Train one model on all ranks together: each computes a part of every layer of a plan."""

    def __init__(
        self,
        device: torch.device,
        collectives: Collectives,
        distributed_type: DistributedType,
        *,
        layout: MeshLayout,
        plan: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(device, collectives, distributed_type, layout=layout)
        self._plan = plan

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        inner = innermost(model)
        check_weights(inner, self.collectives)
        fill = Filler(self.collectives, self.device)
        with note_replaced(inner):
            TensorParallelizer(self.mesh, self._plan).parallelize(inner, fill)
            fill(inner)
        share_random_numbers(self.data_collectives)
        return model

    @override
    def average_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[bool], None] | None:
        def equal() -> list[AveragesGradients]:  # ranks read the same rows, so that their gradients are equal
            return [AveragesGradients(model.parameters()) for model in models]

        return GradientAverage(optimizer, self.collectives, equal, renew=use_shards)


def take_slices(
    model: nn.Module, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype] | None = None
) -> None:
    """Give a model this rank's slices of the weights, on the device of this rank. All ranks call it together.

    Nothing is sent: the model is parallelized on ``meta``, and a rank cuts its own slices out of the files, which all
    ranks of a machine map::

        meta model --parallelize_module--> DTensors on meta --slice of the map--> DTensors whose local parts are views
                                           plain parameters --whole weight------> views of the map

    The plan is ``model._tp_plan``; what it does not name is whole on each rank. A process that is alone takes
    everything, and needs no plan. From then on every rank has to call the model with the same inputs. Random numbers
    of rank 0 are those of all ranks, so that sampled tokens are the same.

    Weights take no gradients: models to train are prepared with ``ParallelismConfig(tp_size=...)``.

    Args:
        model: changed in place; on ``meta``, as `init_empty_weights` makes it.
        tensors: whole weights by the names of the model, on the CPU. Only slices of them are read, and on the CPU they
            stay views of them. Of tied weights one is enough.
        dtypes: of the numbers that weights are to have, by name; by default those of the model. A weight that is read
            in another one is converted: this rank's slice of it is a copy then.

    Raises:
        CheckpointError: a weight is missing, or has another shape. Nothing is changed then.
        ConfigError: the model has no plan, or one that cannot be split over as many ranks.

    Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
    """
    _check(model, tensors)
    process = setup_process()
    if process.topology.world_size > 1 and process.group is not None:
        mesh = MeshLayout(tp=process.topology.world_size).make(process.device.type)
        TensorParallelizer(mesh, None, trains=False).parallelize(model, lambda _: None)
        share_random_numbers(between_groups(TorchCollectives(process.device), process.topology.world_size))
    for names, owners, now in _tied(model):
        saved = next((name for name in names if name in tensors), None)
        if saved is None:  # a buffer, say, that the code of the model fills
            value: Any = now.detach().to(process.device)
        else:
            value = _slice_of(tensors[saved], now, process.device, (dtypes or {}).get(saved, now.dtype))
        if isinstance(now, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        for owner, key in owners:
            setattr(owner, key, value)


def _check(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for names, _, now in _tied(model):
        saved = next((name for name in names if name in tensors), None)
        if saved is None and now.is_meta:
            raise CheckpointError(
                f"The checkpoint has no {' or '.join(names)}, and this {type(model).__name__} was made without weights."
            )
        if saved is not None and tensors[saved].shape != now.shape:
            raise CheckpointError(
                f"{saved} is of shape {tuple(tensors[saved].shape)} in the checkpoint and {tuple(now.shape)} here."
            )


def _tied(model: nn.Module) -> list[tuple[list[str], list[tuple[nn.Module, str]], Tensor]]:
    """Return each parameter and buffer once, with all of its names, and with those who hold it."""
    groups: dict[int, tuple[list[str], list[tuple[nn.Module, str]], Tensor]] = {}
    for prefix, module in model.named_modules():
        for key, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            names, owners, _ = groups.setdefault(id(tensor), ([], [], tensor))
            names.append(f"{prefix}.{key}" if prefix else key)
            owners.append((module, key))
    return list(groups.values())


def _slice_of(whole: Tensor, now: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return this rank's slice of a weight, sharded as ``now`` is; the weight itself where ``now`` is not sharded."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(now, DTensor):
        return whole.to(device, dtype)
    mesh, (placement,) = now.device_mesh, now.placements
    part = whole
    if isinstance(placement, Shard):
        # As torch cuts: the last parts are smaller, or empty, where the size is not a multiple of the number of ranks.
        parts, rank = whole.chunk(mesh.size(), placement.dim), mesh.get_local_rank()
        part = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    local = part.detach().to(device, dtype)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())

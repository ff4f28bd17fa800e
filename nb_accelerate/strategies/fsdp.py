"""Train with shards of the model on every rank: FSDP2, torch's ``fully_shard``.

Sharding changes a model in place: its class becomes one of torch's, and every parameter is replaced by a DTensor that
holds a part of it. Who held the parameters before (an optimizer, a list of the user's) is told by an attribute on the
old ones, whichever was prepared first::

    prepare(model)      old parameter --_sharded_as--> new parameter
    prepare(optimizer)  old parameters in its groups are replaced by the new ones, and its state is sharded likewise

Whole weights and states are collected tensor by tensor into host memory, and have the form that an unsharded model
would save. Checkpoints are made of shards unless whole states are asked for (`nb_accelerate.checkpoint.sharded`).
Either kind can be loaded with any strategy, on any number of ranks.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_map
from typing_extensions import override

from nb_accelerate.config.distributed import DistributedType
from nb_accelerate.config.env import Environment
from nb_accelerate.config.options import note_use
from nb_accelerate.errors import ConfigError, NotPreparedError
from nb_accelerate.strategies.averaging import GradientAverage
from nb_accelerate.strategies.ddp import is_alive
from nb_accelerate.strategies.holdings import measure
from nb_accelerate.strategies.mesh import axes, make_mesh
from nb_accelerate.strategies.sharding import SHARDED_AS, is_shard, is_sharded, shard_model
from nb_accelerate.strategies.shards import gather_whole, local_part, shard_like, shard_state
from nb_accelerate.strategies.strategy import Strategy
from nb_accelerate.strategies.unwrapping import innermost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from nb_accelerate.comm import Collectives
    from nb_accelerate.config.fsdp import FullyShardedDataParallelPlugin
    from nb_accelerate.precision import Precision
    from nb_accelerate.strategies.holdings import Holdings
    from nb_accelerate.strategies.strategy import ModelRequest


class ShardedModel:
    """The `AveragesGradients` of a sharded model: backward averages the gradients of shards."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def averaged(self) -> Iterable[Tensor]:
        """See `AveragesGradients.averaged`."""
        return [parameter for parameter in self._model.parameters() if is_shard(parameter)]

    def left_out(self) -> Iterable[Tensor]:
        """See `AveragesGradients.left_out`."""
        return [parameter for parameter in self._model.parameters() if not is_shard(parameter)]

    def check_averaged(self) -> None:
        """See `AveragesGradients.check_averaged`; a parameter without a gradient is no fault here."""


class FSDPStrategy(Strategy):
    """Train with FSDP2.

    Args:
        device: where models are trained.
        collectives: how ranks exchange data.
        options: how.
        copies: of each model; as many groups of ranks each hold one of them.
    """

    is_replicated = False
    refusals: ClassVar[Mapping[str, str]] = {
        "LocalSGD": (
            "LocalSGD lets every rank train a whole model for a while, and with FSDP a rank has a part only. Leave "
            "LocalSGD out, or fsdp_plugin."
        ),
        "join_uneven_inputs": (
            "join_uneven_inputs lets ranks end before the others, but with FSDP every forward and backward needs the "
            "shards of all ranks. Write DataLoaderConfiguration(even_batches=True), the default, instead."
        ),
    }

    def __init__(
        self,
        device: torch.device,
        collectives: Collectives,
        *,
        options: FullyShardedDataParallelPlugin,
        copies: int = 1,
    ) -> None:
        super().__init__(device, collectives, DistributedType.FSDP)
        self._copies = copies
        self._mesh = make_mesh(device.type, copies)
        self._options = options
        self._dtype: torch.dtype | None = None
        if options.cpu_ram_efficient_loading:
            Environment.set_rank_0_loading()
        self._unsharded: WeakSet[nn.Module] = WeakSet()  # prepared for evaluation only
        self._no_sync_depth: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._holding: WeakSet[nn.Module] = WeakSet()  # may hold gradients that were not exchanged

    @property
    @override
    def mesh(self) -> DeviceMesh:
        try:
            is_there = is_alive(self._mesh.get_group(0))
        except (KeyError, ValueError, RuntimeError):  # torch has forgotten the group
            is_there = False
        if not is_there:
            self._mesh = make_mesh(self.device.type, self._copies)
        return self._mesh

    @property
    @override
    def sharding(self) -> str:
        return f"FSDP, {axes(self._mesh)}"

    @override
    def holdings(self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> Holdings:
        models = list(models)
        # While a block is gathered, its parameters are the whole ones, and the shards are held besides.
        shards = [one.sharded_param for model in map(innermost, models) for one in _fsdp_parameters(model)]
        return measure(models, optimizers, parameters=shards)

    # -- preparation

    @override
    def adapt_precision(self, precision: Precision) -> Precision:
        self._dtype = precision.dtype
        return precision

    @override
    def prepare(
        self,
        models: Sequence[ModelRequest],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        earlier: Iterable[torch.optim.Optimizer] = (),
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        prepared = [self.prepare_model(request) for request in models]
        for optimizer in (*earlier, *optimizers):
            _use_shards(optimizer)
        return prepared, list(optimizers)

    @override
    def prepare_model(self, request: ModelRequest) -> nn.Module:
        if request.training:
            return self.wrap(request.model)  # which moves it, a block at a time
        self._unsharded.add(request.model)
        return super().prepare_model(request)

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        inner = innermost(model)
        if is_sharded(inner):
            _check_group(inner)
            return model
        shard_model(
            inner,
            mesh=self.mesh,
            options=self._options,
            dtype=self._dtype,
            collectives=self.collectives,
            device=self.device,
        )
        note_use(self._options, "the model that was prepared", advice="Set it before accelerator.prepare(model).")
        return model

    # -- gradients

    @override
    def no_sync(self, models: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any]:
        block = contextlib.ExitStack()
        for model in models:
            inner = innermost(model)
            if is_sharded(inner):
                block.enter_context(self._without_sync(inner))
            elif inner not in self._unsharded:
                raise NotPreparedError(
                    f"accumulate or no_sync was given a {type(model).__name__} that prepare did not return, so the "
                    "exchange of its gradients cannot be held back. Give it what prepare returned: "
                    "model = accelerator.prepare(model)."
                )
        return block

    @contextlib.contextmanager
    def _without_sync(self, model: Any) -> Iterator[None]:
        self._no_sync_depth[model] = self._no_sync_depth.get(model, 0) + 1
        self._holding.add(model)
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._no_sync_depth[model] -= 1
            model.set_requires_gradient_sync(not self._no_sync_depth[model])

    @override
    @contextlib.contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        inner: Any = innermost(model)
        if not is_sharded(inner):
            yield
            return
        inner.set_requires_gradient_sync(True)
        try:
            yield
        finally:
            inner.set_requires_gradient_sync(not self._no_sync_depth.get(inner, 0))

    @override
    def join(self, models: Sequence[nn.Module]) -> contextlib.AbstractContextManager[Any]:
        self.check_supports("join_uneven_inputs")
        return super().join(models)

    @override
    def complete_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[], None] | None:
        def sharded() -> list[ShardedModel]:
            return [ShardedModel(model) for model in models if is_sharded(innermost(model))]

        return GradientAverage(optimizer, self.collectives, sharded)

    @override
    def drop_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[], None] | None:
        """Drop the whole gradients of an accumulation window that was left in its middle, by an interrupt say.

        torch keeps gradients whole until they are exchanged, and ``zero_grad`` does not reach them. Those of other
        optimizers stay: their window may close after this one's.
        """

        def drop() -> None:
            if not self._holding:
                return
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for model in list(self._holding):
                held = [parameter for parameter in _fsdp_parameters(model) if _holds_gradient(parameter)]
                for parameter in held:
                    if id(parameter.sharded_param) in own:
                        parameter.unsharded_accumulated_grad = None
                        if _holds_gradient(parameter):
                            parameter._unsharded_param.grad = None  # noqa: SLF001 - torch's
                if not any(map(_holds_gradient, held)):
                    self._holding.discard(model)

        return drop

    @override
    def current_parameters(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [getattr(parameter, SHARDED_AS, parameter) for parameter in parameters]

    @override
    def grad_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        # torch's own norm of DTensors fails on ranks whose shard is empty (norm_type=inf), and for DTensors beside
        # plain tensors.
        shards: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            gradient: Any = parameter.grad
            if gradient is not None:
                place = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
                shards.setdefault(place, []).append(local_part(gradient))
        is_max = norm_type == float("inf")
        norms = []
        for place, gradients in shards.items():
            norm = nn.utils.get_total_norm([one for one in gradients if one.numel()], norm_type).to(self.device)
            if place is not None:
                mesh, placements = place
                partial = Partial("max" if is_max else "sum")
                layout = [partial if one.is_shard() else Replicate() for one in placements]
                part = norm if is_max else norm**norm_type
                whole = DTensor.from_local(part, mesh, layout, run_check=False).full_tensor()
                norm = whole if is_max else whole ** (1 / norm_type)
            norms.append(norm)
        return nn.utils.get_total_norm(norms, norm_type)

    @override
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        norm = self.grad_norm(parameters, norm_type)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_ computes it
        for parameter in parameters:
            if parameter.grad is not None:
                local = local_part(parameter.grad)
                local.mul_(factor.to(local.device))
        return norm

    @override
    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).clamp_(-clip_value, clip_value)

    # -- state

    @property
    @override
    def saves_shards(self) -> bool:  # type: ignore[override]
        return self._options.saves_shards

    @override
    def model_state(self, model: nn.Module, *, keep: bool = True) -> dict[str, Any]:
        known: dict[int, Any] = {}  # tied weights stay one tensor
        state = model.state_dict(keep_vars=True)
        for value in state.values():
            if id(value) not in known:
                known[id(value)] = gather_whole(value, keep=keep)
        return {name: known[id(value)] for name, value in state.items()} if keep else {}

    @override
    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], **kwargs: Any) -> None:
        now = model.state_dict()
        model.load_state_dict({name: shard_like(value, now.get(name)) for name, value in state.items()}, **kwargs)

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> dict[str, Any]:
        whole: dict[str, Any] = tree_map(lambda value: gather_whole(value, keep=keep), optimizer.state_dict())
        return whole if keep else {}

    @override
    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        sharded = dict(state["state"])
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in sharded:
                sharded[number] = shard_state(sharded[number], parameter)
        optimizer.load_state_dict({**state, "state": sharded})


def _check_group(model: nn.Module) -> None:
    """Refuse a model whose process group has ended: shards of ranks that are gone are lost.

    Raises:
        ConfigError: it has.
    """
    meshes = [mesh for one in model.parameters() if (mesh := getattr(one, "device_mesh", None)) is not None]
    if meshes and not is_alive(meshes[0].get_group()):
        raise ConfigError(
            f"This {type(model).__name__} was sharded over a process group that has ended, so its shards cannot be "
            "gathered. Make the model anew and load a checkpoint: model = accelerator.prepare(Model()), "
            "accelerator.load_state(...)."
        )


def _fsdp_parameters(model: nn.Module) -> list[Any]:
    """Return torch's records of the parameters of a sharded model. There is no public way to them."""
    parts: list[Any] = [part for part in model.modules() if is_sharded(part)]
    groups = [part._get_fsdp_state()._fsdp_param_group for part in parts]  # noqa: SLF001
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]


def _holds_gradient(parameter: Any) -> bool:
    """Return whether torch's record of a parameter has a whole gradient that was not exchanged."""
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def _use_shards(optimizer: torch.optim.Optimizer) -> None:
    """Replace, in the groups and in the state of an optimizer, parameters that were sharded since it was made."""
    for group in optimizer.param_groups:
        for number, old in enumerate(group["params"]):
            new = getattr(old, SHARDED_AS, None)
            if new is not None:
                group["params"][number] = new
                if old in optimizer.state:
                    optimizer.state[new] = shard_state(optimizer.state.pop(old), new)

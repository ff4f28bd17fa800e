"""Train with the whole model on every rank; average gradients while backward runs (DistributedDataParallel)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn import parallel
from typing_extensions import override

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process import context
from nb_accelerate.training.strategies.averaging import AveragesGradients, GradientAverage, average
from nb_accelerate.training.strategies.strategy import Strategy
from nb_accelerate.training.strategies.unwrapping import flattened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor, nn

    from nb_accelerate.base.config.distributed import DistributedType
    from nb_accelerate.base.config.kwargs import DistributedDataParallelKwargs
    from nb_accelerate.training.comm import Collectives


class _Prepared:
    """Whether forwards have prepared backward to average gradients."""

    is_new = False  # one has since the number was read
    number = 0  # how often it was read and one had
    at_window = False  # gradients are held back only until the accumulation window closes


class DistributedDataParallel(parallel.DistributedDataParallel, AveragesGradients):
    """torch's wrapper, with errors that say what to write, which knows whether its backward averages gradients.

    With ``static_graph=True``, `needs_first_sync` is whether torch has yet to see a backward that exchanges gradients.
    """

    averages_always = False
    close_window: Callable[[], object] | None = None  # while ranks may have different numbers of batches

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self.needs_first_sync = bool(self.static_graph)
        # torch registers hooks now, so a layer that is made trainable later is not averaged.
        self.averaged: list[Tensor] = []
        self.ignored: list[Tensor] = []
        for name, parameter in self.module.named_parameters():
            if name in self.parameters_to_ignore:
                self.ignored.append(parameter)
            elif parameter.requires_grad:
                self.averaged.append(parameter)
        self._prepared = _Prepared()

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            self.note_prepared()
        return outputs

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        """Average the gradients of this batch on all ranks that have one, if one of them closes its window with it."""
        # torch calls it in the forward, inside of `torch.distributed.algorithms.Join`, so that ranks without a batch
        # learn whether to take part in the average. It does not compare the ranks that have one: where one is at the
        # end of its data, and another amid a window, only the first would average.
        if is_joined_rank or self.close_window is None or not self._prepared.at_window:
            return super()._check_global_requires_backward_grad_sync(is_joined_rank)  # type: ignore[no-any-return, no-untyped-call]
        closes = torch.full((1,), float(self.require_backward_grad_sync), device=self.device)
        dist.all_reduce(closes, group=self.process_group)
        if closes.item() and not self.require_backward_grad_sync:
            self.require_backward_grad_sync = True  # until the block of `accumulate` ends
            self.close_window()
        return None

    def note_prepared(self) -> None:
        """Note that the next backward averages gradients."""
        self._prepared.is_new = True  # a flag and no number, so that torch.compile has nothing to guard

    @override
    def __reduce__(self) -> tuple[Callable[..., nn.Module], tuple[Any, ...]]:
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        return _rebuild, (type(self), self.module, state)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.needs_first_sync = bool(self.static_graph)  # the reducer is a new one

    @property
    @override
    def compares(self) -> bool:  # type: ignore[override]
        return not self._comm_hooks  # a user's hook may mean to average less

    @override
    def num_exchanges(self) -> int | None:
        prepared = self._prepared
        if self._join_config.enable or not (self.require_backward_grad_sync or prepared.at_window):
            return None
        if prepared.is_new:
            prepared.is_new = False
            prepared.number += 1
        return prepared.number

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Hold gradients back until the accumulation window closes, in a block."""
        prepared = self._prepared
        before, prepared.at_window = prepared.at_window, prepared.at_window or self.require_backward_grad_sync
        try:
            with self.no_sync():
                yield
        finally:
            prepared.at_window = before

    @override
    def check_averaged(self) -> None:
        self.needs_first_sync = False
        try:
            self._check_reducer_finalized()  # type: ignore[no-untyped-call]  # what the next forward would find out, one step too late
        except RuntimeError as error:
            named = self.module.named_parameters()
            unused = [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]
            raise ConfigError(
                f"{len(unused)} parameters of {type(self.module).__name__} got no gradient in this backward: "
                f"{', '.join(unused[:8])}{' ...' if len(unused) > 8 else ''}. Ranks wait for all gradients before they "
                "average any. If they are not meant to be used in every step, write Accelerator(kwargs_handlers=["
                "DistributedDataParallelKwargs(find_unused_parameters=True)]); if never, set requires_grad=False "
                "before prepare."
            ) from error

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if name.startswith("__") or not hasattr(module, name):
                raise
            raise AttributeError(
                f"The prepared model has no attribute {name!r}: on several ranks it is a wrapper around your "
                f"{type(module).__name__}. Write accelerator.unwrap_model(model).{name}.",
                name=name,
                obj=self,
            ) from None


def _rebuild(kind: type[DistributedDataParallel], module: nn.Module, state: dict[str, Any]) -> nn.Module:
    """Return the wrapper that was pickled, or the model in it where there is no process group, as in a notebook."""
    if not dist.is_initialized():
        return module
    wrapper = kind.__new__(kind)
    wrapper.__setstate__(state)
    return wrapper


class DDPStrategy(Strategy):
    """Train with DistributedDataParallel, which on a CPU takes no index of the device."""

    def __init__(
        self,
        device: torch.device,
        collectives: Collectives,
        distributed_type: DistributedType,
        *,
        options: DistributedDataParallelKwargs,
        pass_device_ids: bool,
    ) -> None:
        super().__init__(device, collectives, distributed_type)
        self._rehearsal = context.rehearsal()
        self._options = options
        self._device_ids = [device] if pass_device_ids else None

    @override
    def use_ddp_options(self, options: DistributedDataParallelKwargs) -> None:
        self._options = options

    @override
    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = _wrapped(model)
        if wrapped is not None and is_alive(wrapped.process_group):
            return model
        model = model if wrapped is None else wrapped.module  # wrapped for a process group that has ended
        if not any(p.requires_grad for p in model.parameters()):
            return model  # torch refuses to wrap a model without anything to train
        mesh: Any = next((weight.device_mesh for weight in model.parameters() if hasattr(weight, "device_mesh")), None)
        if mesh is not None:
            raise ConfigError(
                f"Layers of this {type(model).__name__} are parallelized over ranks (tensor parallelism), and each "
                "rank would read other rows. Say how ranks are laid out: "
                f"Accelerator(parallelism_config=ParallelismConfig(tp_size={mesh.size()}))."
            )
        wrapped = DistributedDataParallel(
            model,
            device_ids=self._device_ids,
            output_device=self._device_ids and self.device,
            **self._options.to_ddp(),
        )
        self._options.register_comm_hook(wrapped)
        return wrapped

    @override
    @contextlib.contextmanager
    def sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        wrapped = _wrapped(model)
        if wrapped is None:
            yield
            return
        # torch's buckets take one gradient of each parameter and wait for all of them: a backward that reaches a part
        # of the model would never be averaged, nor would what the backwards before gave other parts.
        with wrapped.no_sync():
            yield
        if isinstance(wrapped, DistributedDataParallel):
            average(self.collectives, wrapped.averaged)
            wrapped.note_prepared()
        else:
            average(self.collectives, [weight for weight in wrapped.parameters() if weight.requires_grad])

    @override
    @contextlib.contextmanager
    def join(self, models: Sequence[nn.Module], close_window: Callable[[], object]) -> Iterator[None]:
        wrappers: list[Any] = [wrapped for model in models if (wrapped := _wrapped(model)) is not None]
        with Join(wrappers) if self._rehearsal is None else self._rehearsal.apart():
            try:
                for wrapped in wrappers:
                    wrapped.close_window = close_window
                yield
            finally:
                for wrapped in wrappers:
                    wrapped.close_window = None

    @override
    def copy_rank_0(self, models: Iterable[nn.Module]) -> None:
        for model in models:
            for state in (*model.parameters(), *model.buffers()):
                state.data.copy_(self.collectives.broadcast(state.data, 0))

    @override
    def no_sync(self, models: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any]:
        block = contextlib.ExitStack()
        for wrapped in _wrappers(models):
            if getattr(wrapped, "needs_first_sync", False):
                raise ConfigError(
                    "DistributedDataParallelKwargs(static_graph=True) needs a first backward that exchanges gradients, "
                    "and no_sync exchanges none. Leave static_graph out, or run one batch before."
                )
            block.enter_context(wrapped.no_sync())
        return block

    @override
    def accumulate(self, models: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any]:
        block = contextlib.ExitStack()
        for wrapped in _wrappers(models):
            if getattr(wrapped, "needs_first_sync", False):
                vars(wrapped)["needs_first_sync"] = False  # averaging a part of the sum gives the same gradients
            elif isinstance(wrapped, DistributedDataParallel):
                block.enter_context(wrapped.accumulate())
            else:
                block.enter_context(wrapped.no_sync())
        return block

    @override
    def average_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[bool], None] | None:
        def wrappers() -> list[DistributedDataParallel]:
            ours = [wrapper for wrapper in map(_wrapped, models) if isinstance(wrapper, DistributedDataParallel)]
            return [wrapper for wrapper in ours if is_alive(wrapper.process_group)]  # others were wrapped again

        return GradientAverage(optimizer, self.collectives, wrappers)


def _wrappers(models: Iterable[Any]) -> Iterator[parallel.DistributedDataParallel]:
    """Yield the wrappers in what a user gives; a model without one exchanges no gradients."""
    for model in flattened(models):
        wrapped = _wrapped(model)
        if wrapped is not None:
            yield wrapped
        else:
            yield from (part for part in model.modules() if isinstance(part, parallel.DistributedDataParallel))


def _wrapped(model: nn.Module) -> parallel.DistributedDataParallel | None:
    """Return the DistributedDataParallel of a prepared model, which may be compiled; None if it has none."""
    model = getattr(model, "_orig_mod", model)
    return model if isinstance(model, parallel.DistributedDataParallel) else None


def is_alive(group: dist.ProcessGroup) -> bool:
    """Return whether a process group can still be used."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # torch has forgotten the group
        return False

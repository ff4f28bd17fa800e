"""`Strategy`: the interface of all distributed setups. Its defaults train in one process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.bigmodel.mapped import check_files
from nb_accelerate.training.strategies.model_memory import describe_sharding, measure
from nb_accelerate.training.strategies.unwrapping import extract_model_from_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from nb_accelerate.base.config.kwargs import DistributedDataParallelKwargs
    from nb_accelerate.base.progress_page import RankMemory
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.precision import Precision


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A model that is to be prepared, and how."""

    model: nn.Module
    place: bool = True  # move it to the device of this rank
    training: bool = True  # False for a model that is only evaluated, so that no gradients need to be exchanged
    schedulers: tuple[Any, ...] = ()  # those of the same call of ``prepare``, not prepared yet
    batch_sizes: tuple[int, ...] = ()  # rows of a batch on this rank, of each loader of that call
    accumulation_steps: int = 1
    scheduler_steps: int = 1  # how often a scheduler advances for one optimizer step


class Strategy:
    """Train models on the ranks of a run: prepare, synchronise and clip gradients, save and load state.

    An `Accelerator` chooses one with `select_strategy` and calls its methods without asking which one it is. Methods
    that are marked *collective* exchange data: all ranks call them, in the same order. `data_collectives` are those
    between ranks, or groups of ranks, that read rows of their own.
    """

    # what cannot be done: its name in the API, why, and what to write instead
    refusals: ClassVar[Mapping[str, str]] = {}
    # every rank holds all weights and all optimizer state, so that one rank can save alone
    is_replicated: ClassVar[bool] = True
    saves_shards: bool = False  # each rank saves the part that it holds; else one saves all of it
    # `drop_gradients` drops all gradients, in place of an optimizer's own ``zero_grad``
    owns_gradients: ClassVar[bool] = False

    def __init__(
        self,
        device: torch.device,
        collectives: Collectives,
        distributed_type: DistributedType = DistributedType.NO,
    ) -> None:
        self.device = device
        self.collectives = collectives
        self.data_collectives = collectives
        self.distributed_type = distributed_type

    def check_supports(self, feature: str) -> None:
        """Raise `ConfigError` if a feature is one of `refusals`."""
        if feature in self.refusals:
            raise ConfigError(f"{feature} cannot be used with {self.distributed_type}: {self.refusals[feature]}")

    @property
    def mesh(self) -> DeviceMesh | None:
        """How ranks are laid out, over which models are sharded; None if they are not. May be collective."""
        return None

    def sharding(self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> str:
        """Return how models are spread over ranks, in a few words; "" if every rank has all. Exchanges nothing."""
        return describe_sharding(models, optimizers)

    def model_memory(self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> RankMemory:
        """Return how many bytes this rank holds for prepared models, perhaps compiled. Exchanges nothing."""
        return measure(models, optimizers)

    # -- preparation

    def adapt_precision(self, precision: Precision) -> Precision:
        """Return the precision as this strategy computes in it. Called once, when the `Accelerator` is made."""
        return precision

    def prepare(
        self,
        models: Sequence[ModelRequest],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        earlier: Iterable[torch.optim.Optimizer] = (),
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        """Prepare the models and optimizers of one call of ``Accelerator.prepare``. Collective.

        They come together because an engine may replace the parameters that an optimizer holds, or take over the
        optimizer altogether. Either list may be empty: users may prepare a model and its optimizer in two calls, in
        either order; ``earlier`` has optimizers of earlier calls. Return what takes the place of each model, and of
        each optimizer.
        """
        prepared = [self.prepare_model(request) for request in models]
        for optimizer in (*earlier, *optimizers):
            self.adopt_parameters(optimizer)
        return prepared, list(optimizers)

    def adopt_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of an optimizer by the parameters that are trained now."""

    def prepare_model(self, request: ModelRequest) -> nn.Module:
        """Move one model to the device, and wrap it unless it is only evaluated. Collective."""
        if request.place:
            request.model.to(self.device)
        return self.wrap(request.model) if request.training else request.model

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return a model whose backward averages gradients over all ranks. Collective."""
        return model

    def unwrap(self, model: nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        """Return the user's model inside a prepared one; see `extract_model_from_parallel`."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def engine_scheduler(self, scheduler: Any) -> Any | None:  # noqa: ARG002
        """Return the scheduler that an engine has made in place of one, and advances by itself; None if none has.

        Called by ``prepare``, after `prepare` of the optimizer.
        """
        return None

    def use_ddp_options(self, options: DistributedDataParallelKwargs) -> None:
        """Set the options for models that are wrapped in DistributedDataParallel from now on."""

    # -- gradients

    def copy_rank_0(self, models: Iterable[nn.Module]) -> None:
        """Give models that are prepared again the weights of rank 0, where each rank has whole ones. Collective."""

    def no_sync(self, models: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any] | None:
        """Return a block in which gradients are not exchanged, or None if they never are."""
        del models
        return None

    def accumulate(self, models: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any] | None:
        """Return a block for a batch that does not close an accumulation window; None if there is nothing to do."""
        return self.no_sync(models)

    def sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Return a block at whose end gradients are averaged, although the forward ran in a `no_sync` block."""
        return contextlib.nullcontext()

    def explain_backward(self, error: RuntimeError) -> None:
        """Raise what says more about an error of backward than torch does; return if it says enough."""

    def join(
        self,
        models: Sequence[nn.Module],  # noqa: ARG002
        close_window: Callable[[], object],  # noqa: ARG002
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a block in which ranks may have different numbers of batches.

        Args:
            close_window: is called in the forward of a batch that closes the accumulation window of another rank.
        """
        self.check_supports("join_uneven_inputs")
        return contextlib.nullcontext()

    def average_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[bool], None] | None:
        """Return what averages the gradients that backward left alone; None if it leaves none.

        Called by ``prepare``; the result is called before each step of the optimizer with True, and before clipping
        with False. ``models`` has all prepared ones, also models prepared later.
        """
        del optimizer, models
        return None

    def drop_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[], None] | None:
        """Return what drops gradients that are kept elsewhere than in ``parameter.grad``; None if there are none.

        The result is called after each ``zero_grad`` of the prepared optimizer, and drops those of its parameters.
        """
        del optimizer, models
        return None

    def current_parameters(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters that are trained now, for each parameter that a model had before it was prepared."""
        return list(parameters)

    def grad_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm of all gradients together, over all ranks. Collective where gradients are sharded."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return nn.utils.get_total_norm(gradients, norm_type)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients so that their norm is at most ``max_norm``; return the norm before. Collective as above."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """Limit every element of the gradients to between ``-clip_value`` and ``clip_value``."""
        nn.utils.clip_grad_value_(parameters, clip_value)

    # -- state

    def model_state(self, model: nn.Module, *, keep: bool = True) -> dict[str, Any]:
        """Return all weights of a model by name, each whole. Collective where weights are sharded.

        Without ``keep``, ranks only take part: they return an empty dict where weights are sharded.
        """
        del keep
        state = model.state_dict()
        check_files(state.values())
        return state

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], **kwargs: Any) -> None:
        """Load whole weights, the same on all ranks, with arguments of `torch.nn.Module.load_state_dict`."""
        model.load_state_dict(state, **kwargs)

    def optimizer_state(self, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> dict[str, Any]:
        """Return the whole state of an optimizer; ``keep`` as in `model_state`. Collective where it is sharded."""
        del keep
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load a whole state, the same on all ranks."""
        optimizer.load_state_dict(state)

    # -- engines that save by themselves

    def saves_itself(self, model: nn.Module) -> bool:  # noqa: ARG002
        """Return whether an engine writes and reads the state of a prepared model, with its optimizer."""
        return False

    def owner_of(self, optimizer: torch.optim.Optimizer) -> nn.Module | None:  # noqa: ARG002
        """Return the prepared model whose engine writes and reads the state of an optimizer; None if none does."""
        return None

    # The arguments of these are described where they are done, in `training.strategies.deepspeed.checkpoint`.

    def save_engine(self, model: nn.Module, folder: Path, tag: str, **kwargs: Any) -> None:
        """Write this rank's part of the state of a model for which `saves_itself`. Collective."""
        raise NotImplementedError

    def check_engine(
        self, model: nn.Module, folder: Path, tag: str, files: Collection[str], *, weights_only: bool, strict: bool
    ) -> None:
        """Raise `CheckpointError` if a checkpoint does not fit a model for which `saves_itself`. Changes nothing."""
        raise NotImplementedError

    def load_engine(self, model: nn.Module, folder: Path, tag: str, **kwargs: Any) -> None:
        """Read the state of a model for which `saves_itself`. Collective."""
        raise NotImplementedError

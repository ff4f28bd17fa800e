"""`TrainingMixin`: the steps of a training loop: batches, accumulate, backward, clip, autocast."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.base.config.checks import check_flag, check_whole
from nb_accelerate.base.progress_page import Phase
from nb_accelerate.errors import NotPreparedError
from nb_accelerate.training.accelerator.core import CoreMixin
from nb_accelerate.training.accelerator.losses import time_exchange
from nb_accelerate.training.data import skip_first_batches
from nb_accelerate.training.optim import AcceleratedOptimizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn
    from torch.utils.data import DataLoader

    from nb_accelerate.base.config.kwargs import AutocastKwargs
    from nb_accelerate.training.accelerator.core import Core
    from nb_accelerate.training.data import DataLoaderShard

_BACKWARD, _RUNNING = Phase.BACKWARD, Phase.RUNNING  # Python 3.11 looks members of an enum up slowly

MAKE_IT_INSIDE = (
    "It knows only the process it was made in. Make it, and what it prepares, inside of the function that you launch: "
    "def train(): accelerator = Accelerator(); model, optimizer, loader = accelerator.prepare(...)."
)


class TrainingMixin(CoreMixin):
    """Methods that a training loop calls for each batch."""

    _is_triggered = False  # this rank called `set_trigger`

    @property
    def mixed_precision(self) -> str:
        """The precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``."""
        return self.core.precision.name

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch closes an accumulation window, so that optimizers step."""
        return self.core.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.core.accumulation.sync_gradients = check_flag("sync_gradients", value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """How many batches make one optimizer step."""
        return self.core.accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.core.accumulation.num_steps = check_whole("gradient_accumulation_steps", steps, at_least=1)
        self.core.page.note_choices(precision=self.mixed_precision, accumulation=steps)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was not taken, because fp16 gradients were infinite."""
        return any(optimizer.step_was_skipped for optimizer in self._own_or_all_optimizers())

    def accumulate(self, *models: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a block for one batch of an accumulation window.

        Inside, optimizers step and gradients are averaged over ranks only if the batch closes the window: after
        ``gradient_accumulation_steps`` batches, and at the last batch of a loader.

        Examples:
            ```python
            accelerator.gradient_accumulation_steps = 4
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
            ```

        Args:
            *models: the models whose backward runs in the block; what ``prepare`` returned, or what holds it.
        """
        return _accumulating(self.core, models)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return a block in which the gradients of a model are not averaged over ranks.

        Examples:
            ```python
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            first, *others = loader
            with accelerator.no_sync(model):
                accelerator.backward(loss_function(model(first[0]), first[1]))  # gradients stay on their rank
            for inputs, targets in others:
                accelerator.backward(loss_function(model(inputs), targets))
            optimizer.step()
            ```

        Args:
            model: what ``prepare`` returned, or what holds it.
        """
        return self.core.strategy.no_sync((model,)) or contextlib.nullcontext()

    def trigger_sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Return a block at whose end gradients are averaged over ranks, although the forward ran in `no_sync`.

        Examples:
            ```python
            with accelerator.no_sync(model):
                first, second = [loss_function(model(inputs), targets) for inputs, targets in list(loader)[:2]]
            accelerator.backward(first)  # gradients stay on their rank
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(second)
            optimizer.step()
            ```

        Args:
            model: what ``prepare`` returned.
        """
        return self.core.strategy.sync_in_backward(model)

    def set_trigger(self) -> None:
        """Make the next `check_trigger` return True on all processes: to stop early, say.

        Examples:
            ```python
            loader = accelerator.prepare(loader)
            for inputs, targets in loader:
                if torch.isnan(inputs).any():  # on one process only, perhaps
                    accelerator.set_trigger()
                if accelerator.check_trigger():  # True on all processes
                    break
            ```
        """
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any process called `set_trigger` since the last time. All processes call it together."""
        mine, self._is_triggered = self._is_triggered, False
        collectives = self.core.collectives
        return bool(collectives.all_reduce(torch.tensor(int(mine), device=collectives.device)).item())

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients, in place of ``loss.backward()``.

        The loss is divided by ``gradient_accumulation_steps``, and with fp16 multiplied by the loss scale.

        Examples:
            ```python
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for inputs, targets in loader:
                loss = loss_function(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            ```

        Args:
            loss: of shape ``()``.
            **kwargs: those of `torch.Tensor.backward`.

        Raises:
            NotPreparedError: there are several processes, and nothing was prepared; or the `Accelerator` was made in
                another process than this one.
            TypeError: the loss is no tensor.
            ConfigError: gradients of gradients are asked for, which shards do not have.
        """
        core, page = self.core, self.core.page
        if not core.process.is_here:
            raise NotPreparedError(
                "accelerator.backward was called on an Accelerator that was made in another process, before this one "
                f"was started from it. {MAKE_IT_INSIDE}"
            )
        is_distributed = core.collectives.world_size > 1
        if is_distributed and not core.process_wide.models and not core.process_wide.optimizers:
            raise NotPreparedError(
                f"accelerator.backward was called on {core.collectives.world_size} ranks, but no model and no "
                "optimizer went through prepare. Each rank would train a copy of its own, on its part of the data. "
                "Write model, optimizer, loader = accelerator.prepare(model, optimizer, loader). A model that you "
                "wrapped yourself may be handed to prepare too; it stays as it is."
            )
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"accelerator.backward takes the loss as a tensor, not as {type(loss).__name__}. Pass it as the loss "
                "function returns it; .item() comes afterwards"
            )
        steps = core.accumulation.num_steps
        page.enter(_BACKWARD)
        page.trains()
        if is_distributed and core.process.kind.is_host and core.accumulation.sync_gradients:
            time_exchange(loss, page)
        if kwargs.get("create_graph"):
            core.strategy.check_supports("create_graph")
        try:
            core.precision.backward(loss if steps == 1 else loss / steps, **kwargs)
        except RuntimeError as error:
            core.strategy.explain_backward(error)
            raise
        page.enter(_RUNNING)
        core.losses.report(loss)

    def unscale_gradients(self, optimizer: AcceleratedOptimizer | Iterable[AcceleratedOptimizer] | None = None) -> None:
        """Divide fp16 gradients by the loss scale. `clip_grad_norm_` and `clip_grad_value_` do it by themselves.

        May be called several times in a window: what later backwards add is divided as well.

        Args:
            optimizer: whose gradients; those of all prepared optimizers by default.

        Raises:
            NotPreparedError: one of them did not go through ``prepare``.
        """
        if optimizer is None:
            chosen: list[Any] = self._own_or_all_optimizers()
        else:
            chosen = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        for item in chosen:
            if not isinstance(item, AcceleratedOptimizer):
                raise NotPreparedError(
                    f"unscale_gradients was given a {type(item).__name__} that did not go through prepare, so its "
                    "gradients were never scaled. Write optimizer = accelerator.prepare(optimizer) first."
                )
            item.average_and_unscale()

    def _own_or_all_optimizers(self) -> list[AcceleratedOptimizer]:
        """Return the optimizers that this `Accelerator` prepared, or if there are none those of others."""
        return list(self.core.prepared.optimizers) or self.core.process_wide.optimizers

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients down so that their norm is at most ``max_norm``, when the window closes.

        Examples:
            ```python
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for inputs, targets in loader:
                accelerator.backward(loss_function(model(inputs), targets))
                norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            ```

        Args:
            parameters: usually ``model.parameters()``.
            norm_type: 2 for the Euclidean norm, ``inf`` for the greatest absolute value.

        Returns:
            The norm before clipping, of unscaled gradients: a tensor of shape ``()``.
        """
        core = self.core
        items = core.strategy.current_parameters(_as_iterable(parameters))
        if not core.accumulation.sync_gradients:  # they are not complete: their norm is returned, and that is all
            return core.precision.without_scale(core.strategy.grad_norm(items, norm_type), items)
        self._average_and_unscale(items)
        return core.strategy.clip_grad_norm(items, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Limit every element of the gradients to between ``-clip_value`` and ``clip_value``, when the window closes.

        Args:
            parameters: usually ``model.parameters()``.
        """
        core = self.core
        if core.accumulation.sync_gradients:
            items = core.strategy.current_parameters(_as_iterable(parameters))
            self._average_and_unscale(items)
            core.strategy.clip_grad_value(items, clip_value)

    def _average_and_unscale(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients over all ranks and divide them by the loss scale, in all optimizers of these parameters."""
        optimizers = [each for each in self.core.process_wide.optimizers if each.averages_or_unscales]
        wanted = {id(parameter) for parameter in parameters} if optimizers else set()
        for optimizer in optimizers:
            if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"]):
                optimizer.average_and_unscale()

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoaderShard:
        """Return a loader that leaves out the first batches of every epoch; use it for the one that is resumed.

        Examples:
            ```python
            rest = accelerator.skip_first_batches(loader, num_batches=step)
            for batch in rest if epoch == first_epoch else loader:
                ...
            ```

        Rows of a dataset that is read by number are left out without being read.

        Args:
            dataloader: prepared or not. It stays as it is; an epoch of the new loader is one of this loader too.
            num_batches: how many of this process's batches to leave out.

        Raises:
            ConfigError: ``num_batches`` is not a whole number, or negative.
        """
        return skip_first_batches(dataloader, num_batches)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        """Run a block in which processes may have different numbers of batches.

        A process that has no batch left takes part in what the gradients of the others need, and waits. The last batch
        of a process closes the accumulation window of all.

        Examples:
            ```python
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            with accelerator.join_uneven_inputs([model], even_batches=False):
                for inputs, targets in loader:
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
            ```

        Args:
            joinables: prepared models that are trained in the block.
            even_batches: what prepared loaders do in the block, instead of what `DataLoaderConfiguration` says.

        Raises:
            ConfigError: ``even_batches`` is not True, False or None, or models are sharded.
        """
        loaders = [] if even_batches is None else list(self.core.prepared.loaders)
        if even_batches is not None:
            check_flag("even_batches", even_batches)
        before = [(loader, loader.even) for loader in loaders]
        try:
            for loader in loaders:
                loader.even = bool(even_batches)
            close_window = self.core.accumulation.close
            with self.core.steering.uneven_batches(), self.core.strategy.join(joinables, close_window):
                yield
        finally:
            for loader, even in before:
                loader.even = even

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which sequences would be split over ranks: one that does nothing.

        `ParallelismConfig` refuses ``cp_size`` above 1, so there is nothing to split. It is here for scripts that are
        written for both.

        Args:
            buffers: tensors with a dimension for positions in the sequence.
            no_restore_buffers: which of them may stay split.
        """
        del buffers, buffer_seq_dims, no_restore_buffers
        return contextlib.nullcontext()

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """Return a block that computes in the mixed precision, for a loss outside of the model, say.

        Examples:
            ```python
            model, loader = accelerator.prepare(model, loader)
            for inputs, targets in loader:
                with accelerator.autocast():
                    loss = loss_function(model(inputs), targets)
            ```

        Args:
            autocast_handler: arguments for this block; by default those given to the `Accelerator`.
        """
        return self.core.precision.autocast(autocast_handler)


@contextlib.contextmanager
def _accumulating(core: Core, models: tuple[nn.Module, ...]) -> Iterator[None]:
    accumulation = core.accumulation
    syncs = accumulation.advance()
    without_exchange = None if syncs else core.strategy.accumulate(models)
    with without_exchange or contextlib.nullcontext():
        accumulation.window.num_open += 1
        try:
            yield
        finally:
            accumulation.window.num_open -= 1


def _as_iterable(parameters: Tensor | Iterable[Tensor]) -> Iterable[Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else parameters

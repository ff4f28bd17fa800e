"""`LoadersMixin`: leave out the first batches of a loader, and train where ranks have different numbers of batches."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import check_flag
from nb_accelerate.training.accelerator.core import CoreMixin
from nb_accelerate.training.data import skip_first_batches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.utils.data import DataLoader

    from nb_accelerate.training.data import DataLoaderShard


class LoadersMixin(CoreMixin):
    """The methods of `Accelerator` about prepared loaders."""

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoaderShard:
        """Return a loader that leaves out the first batches of every epoch; use it for the one that is resumed.

        Example::

            rest = accelerator.skip_first_batches(loader, num_batches=step)
            for batch in rest if epoch == first_epoch else loader:
                ...

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

        A process that has no batch left takes part in what the gradients of the others need, and waits.

        Example::

            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            with accelerator.join_uneven_inputs([model], even_batches=False):
                for inputs, targets in loader:
                    accelerator.backward(loss_function(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()

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
            with self.core.strategy.join(joinables):
                yield
        finally:
            for loader, even in before:
                loader.even = even

"""`CommunicationSlice`: gather, reduce and pad tensors over processes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from nb_accelerate.accelerator.core import Slice
from nb_accelerate.comm import operations
from nb_accelerate.data.plan import real_rows_of_padded
from nb_accelerate.pytree import map_tensors, tensors_in

if TYPE_CHECKING:
    from torch import Tensor

    from nb_accelerate.data.tracker import TrackedLoader


class CommunicationSlice(Slice):
    """Exchange tensors and objects between processes.

    Processes of one tensor-parallel group, which read the same rows, count as one.
    """

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all processes, one after the other along dimension 0.

        Example::

            correct = torch.tensor([3], device=accelerator.device)  # of each process
            accelerator.print(accelerator.gather(correct).sum())

        Args:
            tensor: a tensor, or a structure of tensors, of the same shapes on all processes.
        """
        return operations.gather(self.core.data_collectives, tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean or largest of tensors over all processes.

        Example::

            loss = torch.tensor(0.25, device=accelerator.device)  # of each process
            mean = accelerator.reduce(loss, reduction="mean")

        Args:
            tensor: a tensor, or a structure of tensors, of the same shapes on all processes. It is not changed.
            reduction: ``"sum"``, ``"mean"``, ``"max"`` (of each element) or ``"none"``.
            scale: what the result is multiplied with.
        """
        return operations.reduce(self.core.data_collectives, tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return tensors padded to their greatest size on any process, ready for `gather`.

        Example::

            tokens = torch.ones(2, 5 + accelerator.process_index, dtype=torch.long, device=accelerator.device)
            padded = accelerator.pad_across_processes(tokens, dim=1, pad_index=0)
            everything = accelerator.gather(padded)

        Args:
            tensor: a tensor, or a structure of tensors, alike on all processes except in the size of ``dim``.
            dim: which dimension.
            pad_index: what to pad with.
            pad_first: pad at the beginning.
        """
        return operations.pad_across_processes(self.core.data_collectives, tensor, dim, pad_index, pad_first)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return what all processes computed for a batch, in the order of the data and without copies of rows.

        Call it inside the loop over a prepared loader, with something that has one entry for each row of the batch.
        At the end of the data, rows that were repeated to give all processes equal batches are left out. In one
        process, what has an entry for each row of a full batch (``loss.repeat(batch_size)``) is cut to the rows of the
        last one. Of a single value, such as a mean loss, that of each process is returned, with a warning if rows were
        repeated. Where batches have no fixed size, use `pad_across_processes` before, or objects; rows of padding are
        kept. Outside a loop everything is gathered: there is no last batch then.

        Example::

            model, loader = accelerator.prepare(model, loader)
            correct = total = 0
            for inputs, targets in loader:
                predictions = model(inputs).argmax(dim=1)
                predictions, targets = accelerator.gather_for_metrics((predictions, targets))
                correct += (predictions == targets).sum().item()
                total += len(targets)  # in the end the number of rows of the dataset

        Args:
            input_data: a tensor or a structure of tensors with the rows along dimension 0; or a list of objects,
                one for each row.
            use_gather_object: pickle ``input_data``, a list, even if it holds tensors (of unequal shapes, say).

        Raises:
            ValueError: at the end of the data, ``input_data`` does not have one entry for each row of the batch, or
                processes have different numbers of rows.
        """
        collectives = self.core.data_collectives
        loader = self.core.tracker.active
        if collectives.world_size == 1:
            return input_data if loader is None else _real_rows(input_data, loader)
        as_objects = use_gather_object or not _only_tensors(input_data)
        if loader is None and collectives.rank == 0:
            warnings.warn(
                "gather_for_metrics was called outside a loop over a prepared loader. It returns what all processes "
                "gave, and cannot tell which rows are copies. Call it inside the loop, over loader = "
                "accelerator.prepare(loader): there it leaves them out.",
                stacklevel=2,
            )
        if loader is None or loader.batch_remainder is None:
            return operations.gather_object(collectives, input_data) if as_objects else self.gather(input_data)
        _check_rows(input_data, loader, as_objects=as_objects)
        real = loader.batch_remainder
        if as_objects:
            return operations.gather_object(collectives, input_data)[:real]
        if loader.rows_of_ranks is not None:  # tensors of different sizes are gathered padded, or refused by gather
            real = real_rows_of_padded(loader.rows_of_ranks, real)
        is_single = [not tensor.dim() for tensor in tensors_in(input_data)]
        gathered = self.gather(input_data)
        if any(is_single) and collectives.rank == 0:  # later than the exchange: a warning may be an error
            warnings.warn(
                "gather_for_metrics was given a single value, such as a mean loss, and returns that of each process. "
                f"Rows that are repeated in the last batch (only {loader.batch_remainder} of all are real) count in "
                "it. For exact figures, give it one entry for each row.",
                stacklevel=2,
            )
        singles = iter(is_single)
        return map_tensors(lambda tensor: tensor if next(singles) else tensor[:real], gathered)


def _real_rows(data: Any, loader: TrackedLoader) -> Any:
    """Cut what a single process computed for a full batch to the rows of a smaller last one."""
    full = _rows_of_full_batch(loader)
    real = loader.batch_remainder or loader.rows_on_rank
    if not loader.end_of_dataloader or full is None or not real or real >= full:
        return data
    if isinstance(data, (list, tuple)) and not _only_tensors(data):
        return data[:real] if len(data) == full else data
    if not _only_tensors(data):
        return data
    return map_tensors(lambda tensor: tensor[:real] if _rows(tensor) == full else tensor, data)


def _rows_of_full_batch(loader: TrackedLoader) -> int | None:
    try:
        return getattr(loader, "total_batch_size", None)
    except TypeError:  # batches have no fixed size
        return None


def _only_tensors(data: Any) -> bool:
    try:
        return bool(tensors_in(data, strict=True))
    except TypeError:
        return False


def _check_rows(data: Any, loader: TrackedLoader, *, as_objects: bool) -> None:
    """Refuse data without one entry per row, of which none can be dropped. Called before any exchange, on all ranks."""
    if not loader.even:
        raise ValueError(
            "gather_for_metrics cannot be used for the last batches of a loader with even_batches=False: some "
            "processes have fewer rows, or no batch at all. Write even_batches=True in DataLoaderConfiguration; the "
            "rows it repeats are left out here."
        )
    if as_objects and not isinstance(data, (list, tuple)):
        return  # gather_object says what is wrong with it
    if loader.rows_on_rank is None:
        return  # a loader of the user's, which does not say
    given = [len(data)] if as_objects else [_rows(tensor) for tensor in tensors_in(data) if tensor.dim()]
    right = {loader.rows_on_rank}
    if loader.rows_of_ranks is not None and not as_objects:
        right.add(max(loader.rows_of_ranks))  # padded to gather them
    wrong = next((rows for rows in given if rows not in right), None)
    if wrong is None:
        return
    raise ValueError(
        f"gather_for_metrics was given something with {wrong} entries for a batch of {loader.rows_on_rank} rows. In "
        f"this last batch only {loader.batch_remainder} rows of all processes are real, and which entries belong to "
        "them cannot be known. Give it one entry for each row, or use gather for values that are not about rows."
    )


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else -1

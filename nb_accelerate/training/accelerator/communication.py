"""`CommunicationMixin`: gather, reduce and pad tensors over processes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.training.accelerator.core import CoreMixin
from nb_accelerate.training.comm import operations
from nb_accelerate.training.pytree import find_batch_size, map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.training.data.loops import RunningLoop
    from nb_accelerate.training.data.plan.plan import GroupRows


class CommunicationMixin(CoreMixin):
    """Exchange tensors and objects between processes.

    Processes of one tensor-parallel group, which read the same rows, count as one.
    """

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all processes, one after the other along dimension 0.

        Examples:
            ```python
            correct = torch.tensor([3], device=accelerator.device)  # of each process
            accelerator.print(accelerator.gather(correct).sum())
            ```

        Args:
            tensor: a tensor, or a structure of tensors, of the same shapes on all processes. Gradients do not pass
                between processes.
        """
        return operations.gather(self.core.data_collectives, tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean or largest of tensors over all processes.

        Examples:
            ```python
            loss = torch.tensor(0.25, device=accelerator.device)  # of each process
            mean = accelerator.reduce(loss, reduction="mean")
            ```

        Args:
            tensor: a tensor, or a structure of tensors, of the same shapes on all processes. It is not changed.
            reduction: ``"sum"``, ``"mean"``, ``"max"`` (of each element) or ``"none"``.
        """
        return operations.reduce(self.core.data_collectives, tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return tensors padded to their greatest size on any process, ready for `gather`.

        Examples:
            ```python
            tokens = torch.ones(2, 5 + accelerator.process_index, dtype=torch.long, device=accelerator.device)
            padded = accelerator.pad_across_processes(tokens, dim=1, pad_index=0)
            everything = accelerator.gather(padded)
            ```

        Args:
            tensor: a tensor, or a structure of tensors, alike on all processes except in the size of ``dim``.
        """
        return operations.pad_across_processes(self.core.data_collectives, tensor, dim, pad_index, pad_first)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return what all processes computed for a batch, in the order of the data and without copies of rows.

        Call it inside the loop over a prepared loader, with something that has one entry for each row of the batch, or
        equally many for each. At the end of the data, entries of rows that were repeated to give all processes equal
        batches are left out. In one process, what has an entry for each row of a full batch
        (``loss.repeat(batch_size)``) is cut to the rows of the last one. What has no entries for rows, such as a mean
        loss, is returned as all processes gave it, with a warning if rows were repeated. Where batches have no fixed
        size, use `pad_across_processes` before, or objects; rows of padding are kept. Of loaders that advance together
        (``zip``), the one whose batches have as many rows counts. Outside a loop everything is gathered: there is no
        last batch then.

        Examples:
            ```python
            model, loader = accelerator.prepare(model, loader)
            correct = total = 0
            for inputs, targets in loader:
                predictions = model(inputs).argmax(dim=1)
                predictions, targets = accelerator.gather_for_metrics((predictions, targets))
                correct += (predictions == targets).sum().item()
                total += len(targets)  # in the end the number of rows of the dataset
            ```

        Args:
            input_data: a tensor or a structure of tensors with the rows along dimension 0; or a list of objects,
                one for each row; or a tuple of such lists, as of texts and their references: each list is
                gathered by itself.
            use_gather_object: pickle ``input_data``, a list, even if it holds tensors (of unequal shapes, say).

        Raises:
            ValueError: the loader has ``even_batches=False``, and processes have, or may have, different numbers of
                rows at the end of the data. It is raised at the first batch.
        """
        if type(input_data) is tuple:  # of lists of objects, with an entry for each row, perhaps beside tensors
            lists = [part for part in input_data if type(part) is list and not _only_tensors(part)]
            others = [part for part in input_data if type(part) is not list or _only_tensors(part)]
            if len({len(part) for part in lists}) == 1 and all(map(_only_tensors, others)):
                return tuple(self.gather_for_metrics(column, use_gather_object) for column in input_data)
        collectives = self.core.data_collectives
        ranks = collectives.world_size
        loops = self.core.loops.together
        if ranks == 1:
            return _rows_of_smaller_batch(input_data, loops)
        as_objects = use_gather_object or not _only_tensors(input_data)
        if not loops and collectives.rank == 0:
            warnings.warn(
                "gather_for_metrics was called outside a loop over a prepared loader. It returns what all processes "
                "gave, and cannot tell which rows are copies. Call it inside the loop, over loader = "
                "accelerator.prepare(loader): there it leaves them out.",
                stacklevel=2,
            )
        # At the first batch of any pass, and not at the last one: after the epoch would be too late to say so.
        if any(loop.is_uneven for loop in loops):
            raise ValueError(
                "gather_for_metrics cannot be used with a loader that has even_batches=False: at the end of its data "
                "some processes have fewer rows, or no batch at all. Write even_batches=True in "
                "DataLoaderConfiguration; the rows it repeats are left out here."
            )
        rows = _rows_of_group(input_data, loops, ranks)
        if rows is None or rows.real is None:  # no row of this batch is a copy
            with torch.no_grad():
                return operations.gather_object(collectives, input_data) if as_objects else self.gather(input_data)
        # Copies stand at the end of what is gathered, behind all real rows.
        if as_objects:
            parts = operations.gather_lists(collectives, input_data)
            kept = [rows.real_entries([len(part) for part in parts])]
            gathered = [entry for part in parts for entry in part][: kept[0]]
        else:
            tensors = tensors_in(input_data)
            kept = [rows.real_entries([len(tensor)] * ranks) if tensor.dim() else None for tensor in tensors]
            each = iter(kept)
            with torch.no_grad():
                gathered = map_tensors(lambda tensor: tensor[: next(each)], self.gather(input_data))
        if None in kept and collectives.rank == 0:  # later than the exchange: a warning may be an error
            warnings.warn(
                "gather_for_metrics was given something that has not one entry for each row, such as a mean loss, and "
                f"returns it as all processes gave it. Rows that are repeated in this last batch (only {rows.real} of "
                "all are real) count in it. For exact figures, give it one entry for each row.",
                stacklevel=2,
            )
        return gathered


def _rows_of_group(data: Any, loops: Sequence[RunningLoop], ranks: int) -> GroupRows | None:
    """Return the numbers of rows of the group that data were computed for. Outer loops come first."""
    if len({loop.rows for loop in loops}) == 1:
        return loops[0].rows
    entries = find_batch_size(data) if _only_tensors(data) else len(data) if isinstance(data, (list, tuple)) else None
    fitting = []
    for loop in loops:
        on_rank = None if loop.rows is None else loop.rows.on_rank
        if on_rank is None and (full := _rows_of_full_group(loop)) is not None:
            on_rank = full // ranks
        if entries == on_rank:
            fitting.append(loop)
    if len({loop.rows for loop in fitting}) > 1:
        warnings.warn(
            "gather_for_metrics was called in a loop over several prepared loaders whose batches have equally many "
            "rows, of which not all are at their end. Rows are left out as if what it was given belonged to the first "
            "of them. Iterate each loader in a loop of its own, or give them different batch sizes.",
            stacklevel=3,
        )
    return next((loop.rows for loop in [*fitting, *loops]), None)


def _rows_of_full_group(loop: RunningLoop) -> int | None:
    try:
        return getattr(loop.loader, "total_batch_size", None)
    except TypeError:  # batches have no fixed size
        return None


def _rows_of_smaller_batch(data: Any, loops: Sequence[RunningLoop]) -> Any:
    """Cut what a single process computed for a full batch to the rows of a smaller last one."""
    rows_at_end: dict[int | None, set[int | None]] = {}
    for loop in loops:
        at_end = (loop.rows.real or loop.rows.on_rank) if loop.end_of_dataloader and loop.rows is not None else None
        rows_at_end.setdefault(_rows_of_full_group(loop), set()).add(at_end)
    # Where several loops have full batches of one size, what was given may belong to any of them.
    smaller = {full: found.pop() for full, found in rows_at_end.items() if len(found) == 1}
    if not any(smaller.values()):
        return data
    if _only_tensors(data):
        return map_tensors(lambda tensor: tensor[: smaller.get(len(tensor))] if tensor.dim() else tensor, data)
    return data[: smaller.get(len(data))] if isinstance(data, (list, tuple)) else data


def _only_tensors(data: Any) -> bool:
    try:
        return bool(tensors_in(data, strict=True))
    except TypeError:
        return False

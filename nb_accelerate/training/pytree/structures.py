"""Ask about nested structures, and change them by leaf: the functions of accelerate's ``utils.operations``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nb_accelerate.training.pytree.pytree import (
    find_batch_size as first_rows,
    is_half,
    map_tensors,
    send_to_device as place,
    tensors_in,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass
class TensorInformation:
    """What a tensor looks like, without its numbers."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: object) -> bool:
    """Return whether something is a tensor."""
    return isinstance(tensor, Tensor)


def is_tensor_information(tensor_info: object) -> bool:
    """Return whether something is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_namedtuple(data: object) -> bool:
    """Return whether something is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the items of ``generator`` in a container of the type of ``obj``: a list, tuple or named tuple."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return ``data`` with every leaf replaced by ``func(leaf, *args, **kwargs)``; containers keep their types.

    Args:
        func: what to do with a leaf.
        data: a leaf, or a structure of lists, tuples, named tuples and mappings.
        *args: passed on.
        test_type: which leaves; tensors by default. The others are kept.
        error_on_other_type: refuse other leaves.
        **kwargs: passed on.

    Raises:
        TypeError: with ``error_on_other_type``, a leaf does not pass ``test_type``.
    """
    if test_type is is_torch_tensor:
        return map_tensors(lambda tensor: func(tensor, *args, **kwargs), data, strict=error_on_other_type)

    def visit(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return honor_type(item, (visit(part) for part in item))
        if isinstance(item, Mapping):
            return type(item)({key: visit(part) for key, part in item.items()})  # type: ignore[call-arg]
        if test_type(item):
            return func(item, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(
                f"found a {type(item).__name__} where only what {getattr(test_type, '__name__', 'test_type')} accepts, "
                "and containers of that, can be"
            )
        return item

    return visit(data)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Return a structure with all tensors on ``device``.

    Args:
        tensor: a tensor or a structure of tensors; an object with a ``to`` method moves itself.
        device: where to.
        non_blocking: do not wait for the copy.
        skip_keys: keys of the outermost mapping that stay where they are.
    """
    if skip_keys and isinstance(tensor, Mapping):
        skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys)
        return type(tensor)(  # type: ignore[call-arg]
            {
                key: value if key in skipped else place(value, device, non_blocking=non_blocking)
                for key, value in tensor.items()
            }
        )
    return place(tensor, device, non_blocking=non_blocking)


def find_batch_size(data: Any) -> int:
    """Return the number of rows of the first tensor of a structure.

    Raises:
        TypeError: there is no tensor with rows.
    """
    rows = first_rows(data)
    if rows is None:
        raise TypeError(
            f"find_batch_size was given a {type(data).__name__} without a tensor that has rows, so there is no batch "
            "size to find. Give it a batch."
        )
    return rows


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the number of rows of the first tensor of a structure, or None if there is none."""
    return first_rows(data)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor of a structure, or None if there is none."""
    return next((tensor.device for tensor in tensors_in(data)), None)


def listify(data: Any) -> Any:
    """Return a structure with every tensor replaced by numbers in lists."""
    return map_tensors(lambda tensor: (tensor.float() if is_half(tensor) else tensor).detach().tolist(), data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Return one structure with the tensors of several joined along ``dim``.

    Args:
        data: structures of the same form. One alone is returned unchanged.
        dim: along which dimension.

    Raises:
        TypeError: a leaf is not a tensor.
    """
    first = data[0]
    if len(data) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, (list, tuple)):
        return honor_type(first, (concatenate([item[index] for item in data], dim) for index in range(len(first))))
    if isinstance(first, Mapping):
        return type(first)({key: concatenate([item[key] for item in data], dim) for key in first})  # type: ignore[call-arg]
    raise TypeError(f"concatenate joins tensors, and found a {type(first).__name__}. Leave it out of the structures.")


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return a structure with every tensor cut to ``tensor_slice``.

    Args:
        data: a tensor or a structure of tensors.
        tensor_slice: rows.
        process_index: not used; slicing functions for dispatched loaders are called with it.
        num_processes: not used, as above.
    """
    del process_index, num_processes
    return map_tensors(lambda tensor: tensor[tensor_slice], data)


def get_data_structure(data: Any) -> Any:
    """Return a structure with every tensor replaced by its shape and dtype."""
    return map_tensors(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return a structure with every `TensorInformation` replaced by a tensor of that form, numbers undefined."""
    return recursively_apply(
        lambda info: torch.empty(*info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )

"""Log the bytes of tensors while they live, as an accelerator would have them, on the CPU."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BLOCK = 512  # bytes, of which the allocator of CUDA gives whole ones


class LiveBytes:
    """Log how many bytes tensors have that operations make, as long as their storages live.

    Attributes:
        changes: the number of a storage and the bytes that it has from then on; 0 when it is gone.
        labels: what each storage is for, by its number. A label may be given after the storage is gone.
        is_logging: whether changes are logged. Which storages are on the device is known in any case.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[int, int]] = []
        self.labels: dict[int, str] = {}
        self.is_logging = True
        self._numbers: dict[int, tuple[int, Any]] = {}  # by address, which is not given again while a storage lives
        self._next = itertools.count()

    def see(self, tensors: Iterable[Tensor], label: str = "") -> None:
        """Log tensors that are on the device now, if their storages are new, or are to have a label."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue  # a sparse one has no storage
            storage: Any = tensor.untyped_storage()
            if storage._cdata not in self._numbers:  # noqa: SLF001 - no public name tells storages apart
                self._add(storage)
            if label:
                self.labels[self._numbers[storage._cdata][0]] = label  # noqa: SLF001 - as above

    def _add(self, storage: Any) -> None:
        number, address = next(self._next), storage._cdata  # noqa: SLF001 - as above

        def gone(_: object) -> None:
            del self._numbers[address]
            self._changed(number, 0)

        self._numbers[address] = number, weakref.ref(storage, gone)
        self._changed(number, storage.nbytes())

    def _changed(self, number: int, size: int) -> None:
        if self.is_logging:
            self.changes.append((number, -(-size // _BLOCK) * _BLOCK))

    def resized(self, storage: Any, label: str) -> None:
        """Log that a storage has another size now."""
        if (known := self._numbers.get(storage._cdata)) is not None:  # noqa: SLF001 - as above
            self._changed(known[0], storage.nbytes())
            self.labels[known[0]] = label

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        if tensor.layout is not torch.strided:
            return False
        storage: Any = tensor.untyped_storage()
        return storage._cdata in self._numbers  # noqa: SLF001 - as above

    def label_rest(self, label: str) -> None:
        """Label all storages that live and have no label yet."""
        for number, _ in self._numbers.values():
            self.labels.setdefault(number, label)

    def history(self) -> Iterator[dict[str, int]]:
        """Yield the bytes by label after each change. It is the same dictionary each time."""
        sizes: dict[int, int] = {}
        held: dict[str, int] = {}
        for number, size in self.changes:
            label = self.labels.get(number, "")
            held[label] = held.get(label, 0) + size - sizes.get(number, 0)
            sizes[number] = size
            yield held


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors in nested dicts, lists and tuples."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class FusedAttention(TorchFunctionMode):
    """Leave dropout out of attention: with it the CPU keeps all scores, which the kernels of GPUs do not."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = args[:4] + (0.0,) * (len(args) > 4) + args[5:], {**(kwargs or {})}
            kwargs.pop("dropout_p", None)
        return func(*args, **(kwargs or {}))

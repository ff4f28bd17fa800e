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

_BLOCK = 512  # bytes: the allocator of CUDA gives whole blocks


class LiveBytes:
    """Log how many bytes tensors have that operations make, as long as their storages live.

    Attributes:
        changes: the number of a storage and the bytes that it has from then on; 0 when it is gone.
        labels: what each storage is for, by its number. A label may be given after the storage is gone.
        devices: the number of the device that each storage is on, by its number.
        is_logging: whether changes are logged. Which storages are on a device is known in any case.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[int, int]] = []
        self.labels: dict[int, str] = {}
        self.devices: dict[int, int] = {}
        self.is_logging = True
        self._numbers: dict[int, tuple[int, Any]] = {}  # by address, which is not given again while a storage lives
        self._next = itertools.count()

    def see(self, tensors: Iterable[Tensor], label: str = "", device: int = 0) -> None:
        """Log tensors that are on a device now, if their storages are new, or are to have a label."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue  # a sparse one has no storage
            storage: Any = tensor.untyped_storage()
            if storage._cdata not in self._numbers:  # noqa: SLF001 - no public name tells storages apart
                self._add(storage, device)
            if label:
                self.labels[self._numbers[storage._cdata][0]] = label  # noqa: SLF001 - as above

    def _add(self, storage: Any, device: int) -> None:
        number, address = next(self._next), storage._cdata  # noqa: SLF001 - as above
        self.devices[number] = device

        def gone(_: object) -> None:
            # Python calls this as the last reference goes, in the middle of other code: it only notes.
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

    def device_of(self, tensor: Tensor) -> int | None:
        """Return the number of the device that a tensor is on; None if it is on none."""
        if tensor.layout is not torch.strided:
            return None
        storage: Any = tensor.untyped_storage()
        known = self._numbers.get(storage._cdata)  # noqa: SLF001 - as above
        return None if known is None else self.devices[known[0]]

    def label_rest(self, label: str) -> None:
        """Label all storages that live and have no label yet."""
        for number, _ in self._numbers.values():
            self.labels.setdefault(number, label)

    def history(self, device: int = 0) -> Iterator[dict[str, int]]:
        """Yield the bytes on a device, by label, after each change. It is the same dictionary each time."""
        sizes: dict[int, int] = {}
        held: dict[str, int] = {}
        for number, size in self.changes:
            if self.devices[number] == device:
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

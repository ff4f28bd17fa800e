"""Count the bytes of tensors while they live, as an accelerator would have them, on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable


class LiveBytes:
    """Count the bytes of tensors that operations make, as long as their storages live.

    Args:
        known: tensors that are on the device, and are not counted.

    Attributes:
        peak: the most bytes at once.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self.peak = 0
        self._held = 0  # at most; storages that are gone are looked for where it matters
        self._known: set[int] = set()
        self._live: dict[int, tuple[Any, int]] = {}  # by address, which is not given again while the reference is kept
        self.know(known)

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Count these, which stay on the device, no longer."""
        for tensor in tensors:
            key = _reference(tensor).cdata
            self._known.add(key)
            self._held -= self._live.pop(key, (None, 0))[1]

    def see(self, inputs: Any, results: Any, *, counts: bool = False) -> bool:
        """Count the tensors among the results of an operation, and return whether there have never been more bytes.

        Args:
            inputs: the results are on the device if one of these is.
            counts: whether they are on the device in any case.
        """
        if not (counts or any(self._has(_reference(tensor)) for tensor in _tensors(inputs))):
            return False
        for tensor in _tensors(results):
            reference = _reference(tensor)
            if not self._has(reference):
                size = tensor.untyped_storage().nbytes()
                self._live[reference.cdata] = reference, size
                self._held += size
        if self._held <= self.peak:
            return False
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        self._held = sum(size for _, size in self._live.values())
        is_most = self._held > self.peak
        self.peak = max(self.peak, self._held)
        return is_most

    def _has(self, reference: Any) -> bool:
        return reference.cdata in self._known or reference.cdata in self._live


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _reference(tensor: Tensor) -> Any:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


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

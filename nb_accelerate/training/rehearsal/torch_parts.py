"""The parts of torch that a rehearsal needs and that are not public: a group that exchanges nothing, and dispatch.

They have the same names from torch 2.8 on; 2.8 wants the store that newer versions make by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable

_COLLECTIVES = ("c10d::", "_c10d_functional::")
_READ_NUMBER = "aten::_local_scalar_dense"


def make_fake_group(rank: int, world_size: int) -> None:
    """Make the default process group, whose collectives return at once: gathered is what this rank gives."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tell of the collectives that torch runs, whoever calls them, and of numbers that Python reads from tensors.

    Args:
        exchanged: called after a collective.
        read: called before a number is read.
    """

    def __init__(self, exchanged: Callable[[Collective], None], read: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._exchanged = exchanged
        self._read = read

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler, for some seconds: nothing is compiled here

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema  # noqa: SLF001 - as modes of torch do
        name: str = schema.name
        if name == _READ_NUMBER:
            self._read()
        result = func(*args, **(kwargs or {}))
        if name.startswith(_COLLECTIVES) and "wait" not in name:
            names = (argument.name for argument in schema.arguments)
            self._exchanged(Collective(name.rpartition("::")[2].strip("_"), dict(zip(names, args, strict=False))))
        return result


@dataclass(frozen=True)
class Collective:
    """A collective that torch has run, with its arguments by the names that they have in C++."""

    name: str
    arguments: dict[str, Any]

    @property
    def source(self) -> int | None:
        """The rank whose tensors the others get; None if it has none."""
        return self.arguments.get("root_rank")

    @property
    def given(self) -> list[Any]:
        """The tensors that this rank gives."""
        return next((found for name in _GIVEN if (found := self._tensors(name))), self.received)

    @property
    def received(self) -> list[Any]:
        """The tensors that this rank gets from the source of a broadcast or a scatter."""
        return self._tensors("output_tensors") or self._tensors("tensors")

    @property
    def compared(self) -> list[Any]:
        """The tensors whose shapes are those of the other ranks."""
        return self.received if self.name == "scatter" else self.given

    def _tensors(self, name: str) -> list[Any]:
        found = self.arguments.get(name)
        while isinstance(found, list) and found and isinstance(found[0], list):
            found = found[0]
        return [found] if isinstance(found, torch.Tensor) else found if isinstance(found, list) else []

    @property
    def is_of_all(self) -> bool:
        """Whether all ranks take part, and all do the same."""
        group = self.arguments.get("process_group", self.arguments.get("group_name"))
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        whole: Any = dist.group.WORLD
        size = group.size() if isinstance(group, dist.ProcessGroup) else 0
        is_whole = size == whole.size() if size else group in (None, whole.group_name)
        return is_whole and not self.name.startswith(("send", "recv"))


_GIVEN = ("input_tensors", "input_tensor", "inputs", "input", "tensors", "tensor")

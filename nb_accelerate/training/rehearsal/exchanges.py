"""What ranks exchange in a rehearsal: nothing, but for what rank 0 sends, which the others read from a file.

::

    rank 0 ──> tape ──> the others       rank 0 never waits; who reads waits until it has sent, or has ended
"""

from __future__ import annotations

import contextlib
import pickle
import time
import weakref
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import override

from nb_accelerate.training.comm.torch_distributed import TorchCollectives
from nb_accelerate.training.process.shapes_only import as_meta, is_large, unwritten
from nb_accelerate.training.pytree import map_tensors, tensors_in
from nb_accelerate.training.strategies.ddp import DistributedDataParallel
from nb_accelerate.training.strategies.unwrapping import innermost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

    from nb_accelerate.training.comm.collectives import ReduceOp

_LARGEST = 1 << 26  # bytes: a larger tensor that rank 0 sends is a weight, which others have as they made it
_PADDED = "_is_padded_in_rehearsal"  # attribute of a tensor


class Tape:
    """The file with what rank 0 sends. A rank that is not in step with it may read what was meant for another call."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        self._writes = writes
        self._file: IO[bytes] = (folder / "tape").open("ab" if writes else "rb")

    def write(self, value: Any) -> None:
        """Append what rank 0 sends; None at its end."""
        self._file.write(pickle.dumps(value))
        self._file.flush()

    def of_rank_0(self, value: Any) -> Any:
        """Return the value that rank 0 gives, when it is there; None if it has ended before."""
        if self._writes:
            self.write(value)
            return value
        while True:
            start = self._file.tell()
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # not yet written to its end
                if (value := pickle.load(self._file)) is None:
                    self._file.seek(start)
                return value
            self._file.seek(start)
            time.sleep(0.001)

    def carry(self, collective: Collective, ranks: Sequence[int], rank: int) -> None:
        """Write, or put in place, the tensors of a collective that rank 0 is the source of."""
        received, given = collective.tensors("output_tensors", "tensors"), collective.given
        if sum(tensor.nbytes for tensor in received) > _LARGEST:
            return
        is_shared_out = collective.name == "scatter"
        sent = self.of_rank_0({each: given[each : each + 1] if is_shared_out else given for each in ranks})
        for mine, value in zip(received, sent[rank] if isinstance(sent, dict) else (), strict=False):
            if mine.shape == value.shape and mine.dtype == value.dtype:  # else the ranks are not in step
                mine.copy_(value)


class RehearsedCollectives(TorchCollectives):
    """Exchange nothing, as torch's group for this does, and name what was asked for as users know it.

    Other ranks are taken to have the numbers that this one has.
    """

    packs_bytes = False

    def __init__(self, device: torch.device, told: Callable[[str], None]) -> None:
        super().__init__(device)
        self._told = told

    @override
    def verify(
        self, operation: str, data: Any, tensors: Sequence[Tensor], *, shapes: bool = True, waits: bool = True
    ) -> None:
        given = ", ".join(described(tensor) if shapes else f"{tensor.dim()} dimensions" for tensor in tensors)
        self._told(f"{operation} of {given or 'nothing'}")
        if operation == "pad_across_processes":  # which returns these tensors where no other rank has longer ones
            for tensor in tensors:
                vars(tensor)[_PADDED] = True

    @override
    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        reduced = super().all_reduce(tensor, op)
        return reduced if op == "max" else reduced * self.world_size


def described(tensor: Tensor) -> str:
    """Return dtype and shape of a tensor: ``float32 (4, 2)``; or its dimensions, where ranks pad it to the longest."""
    shape = f"{tensor.dim()} dimensions" if _PADDED in vars(tensor) else tuple(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


@dataclass(frozen=True)
class Collective:
    """A collective that torch has run, with its arguments by the names that they have in C++."""

    name: str
    arguments: dict[str, Any]

    def tensors(self, *names: str) -> list[Any]:
        """Return the tensors of the first of these arguments that has any."""
        for name in names:
            argument = self.arguments.get(name)
            while isinstance(argument, list) and argument and isinstance(argument[0], list):
                argument = argument[0]
            if isinstance(argument, Tensor) or (isinstance(argument, list) and argument):
                return [argument] if isinstance(argument, Tensor) else argument
        return []

    @property
    def given(self) -> list[Any]:
        """The tensors that this rank gives."""
        of_inputs = ("input_tensors", "input_tensor", "inputs", "input")
        return self.tensors(*of_inputs, "tensors", "tensor", "output_tensors")

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that take part."""
        group: Any = self.arguments.get("process_group", self.arguments.get("group_name"))
        if isinstance(group, torch.ScriptObject):
            return dist.ProcessGroup.unbox(group)
        if group is None:
            return dist.group.WORLD  # type: ignore[return-value]
        return distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined]  # noqa: SLF001

    @property
    def is_of_all(self) -> bool:
        """Whether all ranks take part, and all do the same."""
        return self.group.size() == dist.get_world_size() and not self.name.startswith(("send", "recv"))

    @property
    def largest(self) -> tuple[str, int, int]:
        """Its name, the bytes of what it gives or returns, the greater of both, and the number of ranks."""
        names = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
        name = next((each for each in names if self.name.startswith((each, each.replace("_", "", 1)))), self.name)
        sides = self.given, self.tensors("output_tensors", "output_tensor", "output")
        return name, max(sum(tensor.nbytes for tensor in side) for side in sides), self.group.size()


def averaging_nothing(plain: Callable[..., None], recorder: Any) -> Callable[..., None]:
    """Return ``__init__`` of torch's DistributedDataParallel for wrappers that tell of exchanges, and make none."""

    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        name = type(innermost(module)).__name__

        def exchange(_, bucket):  # type: ignore[no-untyped-def] # torch reads annotations, here texts
            recorder.exchange_bucket(bucket.buffer())
            if bucket.is_last():
                recorder.tell(f"the gradients of {name}")
            done: Any = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        sizes = [each.numel() for each in module.parameters()]  # torch refuses other sizes on another rank
        recorder.tell(f"the weights of {name}, {sum(sizes):,} in {len(sizes)} tensors")
        plain(self, module, *args, **kwargs)
        self.register_comm_hook(None, exchange)
        self.register_comm_hook = lambda *_: None  # the user's hook: torch takes one only

    return init


class WatchedCall:
    """Calls a prepared model, or returns what it has returned for inputs of the same shapes.

    That has a backward: it tells of the exchange of gradients, and reaches models that made the inputs.
    """

    def __init__(self, model: nn.Module, recorder: Any, *, is_sharded: bool) -> None:
        self._model: Any = weakref.ref(model)
        self._recorder = recorder
        self._is_sharded = is_sharded
        self._exchanges = False  # whether the next backward averages gradients
        self._known: dict[Any, tuple[Any, list[bool]]] = {}  # outputs, and which of them have gradients
        self._name = type(innermost(model)).__name__.removeprefix("FSDP")  # which torch puts before

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, or return what it has returned, and tell what ranks do together."""
        model: Any = self._model()
        wrapped = getattr(model, "_orig_mod", model)
        exchanges = self._is_sharded
        if isinstance(wrapped, DistributedDataParallel):
            exchanges = torch.is_grad_enabled() and wrapped.require_backward_grad_sync
            if wrapped.will_sync_module_buffers():  # type: ignore[no-untyped-call]
                self._recorder.tell(f"the buffers of {self._name}")
        elif self._is_sharded:
            self._recorder.tell(f"the shards of {self._name}")
        if torch.is_grad_enabled():
            self._exchanges = exchanges
        tensors = tensors_in((args, kwargs))
        self._recorder.see_inputs(tensors)
        shapes = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors]
        key = (*shapes, *sorted(kwargs), torch.is_grad_enabled(), model.training)
        if self._recorder.is_fast and key in self._known:
            if exchanges and not self._is_sharded:
                wrapped.note_prepared()
            with self._recorder.phase("the forward"):
                return self._remembered(*self._known[key], [tensor for tensor in tensors if tensor.requires_grad])
        with self._recorder.phase("the forward"):
            outputs = wrapped._call_impl(*args, **kwargs)  # noqa: SLF001 - what torch calls otherwise
        made = tensors_in(outputs)
        with _disable_current_modes():  # they would live longer than in a run, and are not counted
            kept = map_tensors(lambda each: as_meta(each) if is_large(each) else each.detach().clone(), outputs)
        self._known[key] = kept, [tensor.requires_grad for tensor in made]
        for tensor in made:
            if self._is_sharded and tensor.requires_grad:
                tensor.register_hook(self._exchange)  # type: ignore[no-untyped-call]
        return outputs

    def _exchange(self, _: Tensor | None = None) -> None:
        """Tell of the exchange of gradients, when the first gradient of outputs comes in a backward."""
        if self._exchanges:
            self._exchanges = False
            self._recorder.tell(f"the gradients of {self._name}")

    def _after_backward(self) -> None:
        for parameter in self._model().parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # which is clipped next
        self._exchange()

    def _remembered(self, known: Any, trained: list[bool], inputs: list[Tensor]) -> Any:
        """Return outputs as they were before, with a backward that reaches the inputs and tells."""
        known = map_tensors(lambda tensor: unwritten(tensor) if tensor.is_meta else tensor, known)
        before = list(zip(tensors_in(known), trained, strict=True))
        old = [tensor for tensor, is_trained in before if is_trained]
        anchor = torch.zeros((), requires_grad=True)
        new = iter(_Remembered.apply(self._after_backward, old, anchor, *inputs) if old else ())  # type: ignore[no-untyped-call]
        every = iter([next(new) if is_trained else tensor.clone() for tensor, is_trained in before])
        return map_tensors(lambda _: next(every), known)


class _Remembered(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, tell: Callable[[], None], outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.tell = tell
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        return tuple(output.clone() for output in outputs)

    @staticmethod
    @override
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.tell()
        return None, None, *(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)

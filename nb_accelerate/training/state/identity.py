"""Rank, device and work for some ranks only: the members that `Accelerator` and the states share."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.training.data.plan.plan import split_between
from nb_accelerate.training.process import main_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.process.context import ProcessContext

P = ParamSpec("P")
R = TypeVar("R")


class Identity(ABC):
    """Rank, device and work for some ranks only. A subclass returns the process and its collectives."""

    @abstractmethod
    def _process(self) -> ProcessContext:
        """Return the process that is described."""

    @abstractmethod
    def _collectives(self) -> Collectives:
        """Return its collectives."""

    def _place_in_data(self) -> tuple[int, int]:
        """Return which part of data this process gets, and how many parts there are."""
        return self.process_index, self.num_processes

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._process().device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of distributed setup; `DistributedType.NO` for one process."""
        return self._process().distributed_type

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self._process().topology.world_size

    @property
    def process_index(self) -> int:
        """The number of this process among all, from 0."""
        return self._process().topology.rank

    @property
    def local_process_index(self) -> int:
        """The number of this process among those of its machine, from 0."""
        return self._process().topology.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self._process().topology.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self._process().topology.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest number."""
        return self._process().topology.is_last

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one process, each with a device that is not a CPU."""
        return self.use_distributed and self._process().distributed_type is not DistributedType.MULTI_CPU

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on the first process of each machine. A notebook shows it without the number of the process.

        Examples:
            ```python
            accelerator.print(f"training on {accelerator.num_processes} processes")
            ```
        """
        if self.is_local_main_process:
            for_all = getattr(sys.stdout, "for_all", None)  # in a process that a launcher of ours has started
            if for_all is not None and kwargs.get("file") is None:
                kwargs["file"] = for_all
            print(*args, **kwargs)  # noqa: T201 - printing is what the user asked for

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Make a function run on process 0 only; elsewhere it returns None. Use it as a decorator.

        Methods and generators can be decorated too; elsewhere a generator yields nothing.

        Examples:
            ```python
            @accelerator.on_main_process
            def report(loss):
                print(f"loss {loss:.3f}")

            report(0.5)  # prints once
            ```
        """
        return main_process.only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Make a function run on the first process of each machine only. Use it as a decorator."""
        return main_process.only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Make a function run on the last process only. Use it as a decorator."""
        return main_process.only_if(self.is_last_process, function)

    def on_process(
        self, function: Callable[P, R] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Make a function run on one process only; elsewhere it returns None. A process that is alone runs it always.

        Use it as a decorator: ``@accelerator.on_process(process_index=1)``.

        Args:
            process_index: the number of the process; 0 by default.
        """
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return main_process.only_if(not self.use_distributed or self.process_index == (process_index or 0), function)

    def on_local_process(
        self,
        function: Callable[P, R] | None = None,
        local_process_index: int | None = None,
        *,
        local_process_idx: int | None = None,
    ) -> Callable[..., Any]:
        """Make a function run on one process of each machine only. A process that is alone runs it always.

        Use it as a decorator: ``@accelerator.on_local_process(local_process_index=1)``.

        Args:
            local_process_index: the number of the process on its machine; 0 by default.
            local_process_idx: the same, as tutorials of accelerate spell it.
        """
        index = local_process_idx if local_process_index is None else local_process_index
        if function is None:
            return partial(self.on_local_process, local_process_index=index)
        return main_process.only_if(not self.use_distributed or self.local_process_index == (index or 0), function)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that process 0 runs before the others. All processes enter it.

        Examples:
            ```python
            with accelerator.main_process_first():
                if not Path("data.pt").exists():
                    torch.save(torch.zeros(100, 8), "data.pt")  # by process 0; the others find it
                data = torch.load("data.pt")
            ```
        """
        return main_process.first(self.is_main_process, self.wait_for_everyone)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that the first process of each machine runs before the others. All processes enter it."""
        return main_process.first(self.is_local_main_process, self.wait_for_everyone)

    def wait_for_everyone(self) -> None:
        """Block until all processes have called it: a barrier.

        Examples:
            ```python
            if accelerator.is_main_process:
                Path("ready.txt").write_text("yes")
            accelerator.wait_for_everyone()
            assert Path("ready.txt").exists()
            ```
        """
        self._collectives().barrier()

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's part of ``inputs``: a list, tuple, dict of those, or tensor, cut in order.

        Examples:
            ```python
            with accelerator.split_between_processes(["a", "b", "c"]) as prompts:
                for prompt in prompts:  # each prompt on one process
                    print(accelerator.process_index, prompt)
            ```

        Args:
            inputs: the same on all processes. The first processes get one item more where it does not divide evenly.
            apply_padding: repeat the last item, so that all parts are equally long.

        Raises:
            TypeError: ``inputs`` has no length.
            ValueError: the values of a dict are of different lengths.
        """
        rank, ranks = self._place_in_data()
        yield split_between(inputs, rank, ranks, pad=apply_padding)

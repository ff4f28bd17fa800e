"""`PartialState`: a view of the rank, device and process group of this process."""

from __future__ import annotations

import threading
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from typing_extensions import override

from nb_accelerate.base.config.checks import check_flag, suggest
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.kwargs import InitProcessGroupKwargs
from nb_accelerate.errors import UnknownArgumentError
from nb_accelerate.training.process import context, devices, group as process_group
from nb_accelerate.training.process.setup import setup_process
from nb_accelerate.training.state.choices import current_collectives, current_process
from nb_accelerate.training.state.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from typing_extensions import Self

    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.process.context import ProcessContext


class SharedState:
    """Descriptor of ``_shared_state``, the class attribute that holds a state's values in accelerate. Read-only.

    Libraries compare it to find out whether there is a state: ``if PartialState._shared_state == {}``.
    """

    def __init__(self, known: Callable[[], bool], *names: str) -> None:
        self._known = known
        self._names = names

    def __get__(self, view: View | None, kind: type[View]) -> Mapping[str, Any]:
        if not self._known():
            return MappingProxyType({})
        shown = kind() if view is None else view
        return MappingProxyType({name: getattr(shown, name) for name in self._names})


class View:
    """A read-only object whose attributes are computed. A copy of it is the object itself."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


SHOWN = (  # attributes that ``_shared_state`` of both classes holds
    "backend",
    "debug",
    "device",
    "distributed_type",
    "fork_launched",
    "local_process_index",
    "num_processes",
    "process_index",
)


class ProcessView(View, Identity):
    """Members that `PartialState` and `AcceleratorState` share: rank, device, process group."""

    @override
    def _process(self) -> ProcessContext:
        return current_process()

    @override
    def _collectives(self) -> Collectives:
        return current_collectives()

    @property
    def backend(self) -> str | None:
        """The name of torch.distributed's backend (``"gloo"``, ``"nccl"``), or None without a process group."""
        here = self._process()
        return None if here.group is None else str(dist.get_backend(here.group))

    @property
    def debug(self) -> bool:
        """Whether collectives are checked before they run.

        Set it for the functions of ``nb_accelerate.utils``, and for an `Accelerator` that is made afterwards.
        """
        return Environment().debug_mode

    @debug.setter
    def debug(self, on: bool) -> None:
        Environment.set_debug_mode(check_flag("debug", on))

    @property
    def initialized(self) -> bool:
        """Whether rank and device of this process were set up."""
        return context.current() is not None

    @property
    def fork_launched(self) -> bool:
        """Whether a launcher started this process from a notebook (``FORK_LAUNCHED`` in the environment)."""
        return bool(Environment().flag("FORK_LAUNCHED"))

    def set_device(self) -> None:
        """Make the device of this process the current one of torch, as setting up a process does."""
        here = self._process()
        if here.device.index is not None:
            here.kind.set_device(here.device.index)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy the process group, or one of its subgroups.

        Scripts for accelerate call this at their end; without it the group is destroyed when the interpreter exits.

        Args:
            group: a subgroup; by default the group of all processes.
        """
        if group is None or group is context.default_group():
            process_group.close()  # from then on this process is not connected
        else:
            dist.destroy_process_group(group)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(process {self.process_index} of {self.num_processes}, "
            f"local process {self.local_process_index}, {self.device}, {self.distributed_type})"
        )


class PartialState(ProcessView):
    """Rank, device and process group of this process. The first one made sets up the process group.

    Examples:
        ```python
        state = PartialState()
        with state.split_between_processes(prompts) as mine:
            ...
        ```

    Args:
        cpu: use the CPU even if another device is available.
        **kwargs: fields of `InitProcessGroupKwargs`, such as ``timeout``.

    Raises:
        ConfigError: the environment contradicts itself, or an earlier choice.
        UnknownArgumentError: `InitProcessGroupKwargs` has no such field.
    """

    _shared_state = SharedState(lambda: context.current() is not None, *SHOWN)

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        kwargs.pop("_from_accelerator", None)  # what accelerate passes to itself
        known = ["cpu", *(field.name for field in fields(InitProcessGroupKwargs))]
        for name in kwargs:
            if name not in known:
                raise UnknownArgumentError(f"PartialState has no argument {name!r}.{suggest(name, known)}")
        setup_process(cpu=cpu or None, options=InitProcessGroupKwargs(**kwargs) if kwargs else None)

    @property
    def default_device(self) -> torch.device:
        """The best kind of device of this machine, without a number."""
        return devices.best_device()

    @staticmethod
    def _reset_state() -> None:
        """Clear the rank and device of this process. The process group stays, and is used again."""
        context.reset()


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, with any arguments."""


class ThreadLocalSharedDict(threading.local):
    """A descriptor with a dict of its own for each thread, which accelerate uses for TPU threads.

    Args:
        thread_local: ignored; the dict is always one per thread.
    """

    def __init__(self, thread_local: bool = False) -> None:
        del thread_local
        self._storage: dict[Any, Any] = {}

    def __get__(self, obj: object, objtype: type | None = None) -> dict[Any, Any]:
        return self._storage

    def __set__(self, obj: object, value: dict[Any, Any]) -> None:
        self._storage = value

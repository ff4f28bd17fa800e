"""`PartialState`, `AcceleratorState` and `GradientState`: views for ported code.

::

    PartialState -----> ProcessContext <----- AcceleratorState ----> Choices <---- GradientState
                        (what this process is)            (of one Accelerator, or of the newest)

A view holds nothing of its own: two of them never disagree, and neither disagrees with the `Accelerator`. So they
cannot be set, and one that is pickled shows the process in which it is loaded.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.config.checks import check_flag, suggest
from nb_accelerate.config.env import Environment
from nb_accelerate.config.kwargs import InitProcessGroupKwargs
from nb_accelerate.config.precision import resolve_precision
from nb_accelerate.data.tracker import LoaderView
from nb_accelerate.errors import ConfigError
from nb_accelerate.process import context, devices, group
from nb_accelerate.process.setup import setup_process
from nb_accelerate.state.choices import Choices, collectives_here, newest_choices, process_here, remember
from nb_accelerate.state.identity import Identity
from nb_accelerate.state.view import SharedState, View

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from typing_extensions import Self

    from nb_accelerate.comm import Collectives
    from nb_accelerate.config.dynamo import TorchDynamoPlugin
    from nb_accelerate.data.tracker import LoaderTracker
    from nb_accelerate.process.context import ProcessContext

_PROCESS = (
    "backend",
    "debug",
    "device",
    "distributed_type",
    "fork_launched",
    "local_process_index",
    "num_processes",
    "process_index",
)


class _ProcessView(View, Identity):
    """What is true of a process, whatever is trained in it."""

    @override
    def _process(self) -> ProcessContext:
        return process_here()

    @override
    def _collectives(self) -> Collectives:
        return collectives_here()

    @property
    def backend(self) -> str | None:
        """What carries tensors between processes, or None for a process that is alone."""
        here = self._process()
        return None if here.group is None else group.backend(here.group)

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
        """Whether it is known what this process is."""
        return context.current() is not None

    @property
    def fork_launched(self) -> bool:
        """Whether this process was started by a launcher from a notebook."""
        return bool(Environment().flag("FORK_LAUNCHED"))

    def set_device(self) -> None:
        """Make this process's device the current one; done already when it was connected."""
        here = self._process()
        if here.device.index is not None:
            here.kind.set_device(here.device.index)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """End the process group, or one of its subgroups.

        A script for accelerate asks for this at its end; without it the group ends with the interpreter.

        Args:
            group: a subgroup; by default the group of all processes.
        """
        end_group(group)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(process {self.process_index} of {self.num_processes}, "
            f"local process {self.local_process_index}, {self.device}, {self.distributed_type})"
        )


def end_group(given: dist.ProcessGroup | None) -> None:
    """Destroy a subgroup, or the group of all processes, which makes this process one that is not connected."""
    if given is None or given is context.default_group():
        group.close()
    else:
        group.destroy(given)


class PartialState(_ProcessView):
    """What this process is, without anything about training. The first one made connects it with the others.

    Example::

        state = PartialState()
        with state.split_between_processes(prompts) as mine:
            ...

    Args:
        cpu: compute on the CPU even where there is an accelerator.
        **kwargs: fields of `InitProcessGroupKwargs`, ``timeout`` say.

    Raises:
        ConfigError: the environment contradicts itself, or an earlier choice.
        TypeError: there is no such field.
    """

    _shared_state = SharedState(lambda: context.current() is not None, *_PROCESS)

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        kwargs.pop("_from_accelerator", None)  # what accelerate passes to itself
        fields = InitProcessGroupKwargs.__dataclass_fields__
        for name in kwargs:
            if name not in fields:
                raise TypeError(f"PartialState has no argument {name!r}.{suggest(name, ['cpu', *fields])}")
        setup_process(cpu=cpu or None, options=InitProcessGroupKwargs(**kwargs) if kwargs else None)

    @property
    def default_device(self) -> torch.device:
        """The best kind of device of this machine, without a number."""
        return devices.best_device()

    @staticmethod
    def _reset_state() -> None:
        """Forget what this process is. The process group stays, and is found again."""
        context.reset()


class AcceleratorState(_ProcessView):
    """What this process is, and what its newest `Accelerator` chose.

    Args:
        mixed_precision: what an `Accelerator` would be given; for code that needs the state before it makes one.
        cpu: as in `PartialState`.
        **kwargs: as in `PartialState`. Plugins of accelerate that are None are accepted.

    Raises:
        ConfigError: an `Accelerator` chose another precision already, or a plugin was given.
    """

    _shared_state = SharedState(
        lambda: newest_choices() is not None, *_PROCESS, "mixed_precision", "dynamo_plugin", "parallelism_config"
    )

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any) -> None:
        for name in [name for name in kwargs if name in _PLUGINS]:
            if kwargs.pop(name) is not None:
                raise ConfigError(f"AcceleratorState was given {name}. Write Accelerator({name}=...) instead.")
        PartialState(cpu, **kwargs)
        self._fixed: tuple[ProcessContext, Choices] | None = None
        known = newest_choices()
        if known is None:
            remember(process_here(), Choices.make(mixed_precision))
        elif mixed_precision is not None and str(resolve_precision(mixed_precision, Environment())) != (
            known.mixed_precision
        ):
            raise ConfigError(
                f"mixed_precision={mixed_precision!r} was given to AcceleratorState, but the Accelerator of this "
                f"process computes in {known.mixed_precision!r}. A state only shows what was chosen; write "
                f"Accelerator(mixed_precision={mixed_precision!r})."
            )

    @classmethod
    def of(cls, process: ProcessContext, choices: Choices) -> Self:
        """Return the state of one `Accelerator`."""
        view = cls.__new__(cls)
        view._fixed = process, choices  # noqa: SLF001 - this class
        return view

    @override
    def _process(self) -> ProcessContext:
        return self._fixed[0] if self._fixed else process_here()

    @property
    def mixed_precision(self) -> str:
        """The precision: ``"no"``, ``"fp16"`` or ``"bf16"``."""
        choices = self._fixed[1] if self._fixed else newest_choices()
        return choices.mixed_precision if choices else str(resolve_precision(None, Environment()))

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """How models are compiled."""
        return (self._fixed[1] if self._fixed else newest_choices() or Choices.make()).dynamo

    @property
    def initialized(self) -> bool:
        """Whether an `Accelerator`, or this state, was made."""
        return is_initialized()

    @property
    def deepspeed_plugin(self) -> None:
        """None: DeepSpeed is not in use."""
        return

    @property
    def parallelism_config(self) -> None:
        """None: there is no device mesh; models are trained with data parallelism only."""
        return

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded with FSDP's second version."""
        return False

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget what the newest `Accelerator` chose, and with ``reset_partial_state`` what this process is."""
        known = context.current()
        if known is not None:
            remember(known, None)
        if reset_partial_state:
            context.reset()


_PLUGINS = (
    "dynamo_plugin",
    "deepspeed_plugin",
    "fsdp_plugin",
    "torch_tp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
)


class GradientState(View, LoaderView):
    """Where the loop of the newest `Accelerator` is: in its accumulation window, and in its loader.

    Args:
        gradient_accumulation_plugin: how gradients accumulate, for code that makes this state before any
            `Accelerator`; later the `Accelerator` decides.
    """

    _shared_state = SharedState(lambda: newest_choices() is not None, "sync_gradients", "plugin_kwargs")

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self._fixed: Choices | None = None
        if gradient_accumulation_plugin is not None and newest_choices() is None:
            remember(process_here(), Choices.make(plugin=gradient_accumulation_plugin))

    @classmethod
    def of(cls, choices: Choices) -> Self:
        """Return the state of one `Accelerator`."""
        view = cls()
        view._fixed = choices
        return view

    @property
    def _choices(self) -> Choices:
        return self._fixed or newest_choices() or Choices.make()

    @property
    def initialized(self) -> bool:
        """Whether there is an `Accelerator`, or a state, to show."""
        return self._fixed is not None or newest_choices() is not None

    @property
    def sync_gradients(self) -> bool:
        """Whether the current batch closes an accumulation window."""
        return self._choices.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._choices.accumulation.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """How many batches make one optimizer step."""
        return self._choices.accumulation.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers count batches without an optimizer step."""
        return self._choices.accumulation.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader closes the window."""
        return self._choices.accumulation.sync_with_dataloader

    @property
    def sync_each_batch(self) -> bool:
        """Whether gradients travel between processes after every batch."""
        return self._choices.accumulation.sync_each_batch

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The fields of the accumulation plugin that differ from their defaults."""
        state = self._choices.accumulation
        names = GradientAccumulationPlugin.__dataclass_fields__
        return GradientAccumulationPlugin(**{name: getattr(state, name) for name in names}).to_kwargs()

    @property
    @override
    def tracker(self) -> LoaderTracker:
        return self._choices.tracker

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether gradients were already summed over TPU cores; False where there are none."""
        return False

    @staticmethod
    def _reset_state() -> None:
        """Forget what the newest `Accelerator` chose."""
        AcceleratorState._reset_state()  # noqa: SLF001 - accelerate's name, used by ported tests

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"
        )


def is_initialized() -> bool:
    """Return whether an `Accelerator`, or an `AcceleratorState`, was made in this process."""
    return newest_choices() is not None


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, with any arguments."""


class ThreadLocalSharedDict(threading.local):
    """A dict that is another one in each thread, as accelerate uses it for TPU threads.

    Args:
        thread_local: accepted for its name; the dict is always one per thread.
    """

    def __init__(self, thread_local: bool = False) -> None:
        del thread_local
        self._storage: dict[Any, Any] = {}

    def __get__(self, obj: object, objtype: type | None = None) -> dict[Any, Any]:
        """Return the dict of this thread."""
        return self._storage

    def __set__(self, obj: object, value: dict[Any, Any]) -> None:
        """Replace the dict of this thread."""
        self._storage = value

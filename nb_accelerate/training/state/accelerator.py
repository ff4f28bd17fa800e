"""`AcceleratorState`: a view of the rank and device of this process and of the choices of its newest `Accelerator`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.base.config.checks import suggest
from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.precision import resolve_precision
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.data.loops import LoaderView
from nb_accelerate.training.process import context
from nb_accelerate.training.state.choices import Choices, current_process, newest_choices, remember
from nb_accelerate.training.state.partial import SHOWN, PartialState, ProcessView, SharedState, View

if TYPE_CHECKING:
    from typing_extensions import Self

    from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin
    from nb_accelerate.base.config.dynamo import TorchDynamoPlugin
    from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin
    from nb_accelerate.base.config.parallelism import ParallelismConfig
    from nb_accelerate.training.data.loops import RunningLoops
    from nb_accelerate.training.process.context import ProcessContext


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
            remember(current_process(), Choices.make(plugin=gradient_accumulation_plugin))

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
        values = {field.name: getattr(state, field.name) for field in fields(GradientAccumulationPlugin)}
        return GradientAccumulationPlugin(**values).to_kwargs()

    @property
    @override
    def loops(self) -> RunningLoops:
        return self._choices.loops

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


_PLUGINS = (
    "dynamo_plugin",
    "deepspeed_plugin",
    "fsdp_plugin",
    "torch_tp_plugin",
    "megatron_lm_plugin",
    "parallelism_config",
)


class AcceleratorState(ProcessView):
    """The members of `PartialState`, and the precision and compilation that the newest `Accelerator` chose.

    Args:
        mixed_precision: as for `Accelerator`, in code that makes the state before any `Accelerator`.
        cpu: as in `PartialState`.
        **kwargs: as in `PartialState`. Plugins of accelerate that are None are accepted.

    Raises:
        ConfigError: an `Accelerator` chose another precision already, or a plugin was given.
    """

    _shared_state = SharedState(
        lambda: newest_choices() is not None,
        *SHOWN,
        "mixed_precision",
        "dynamo_plugin",
        "fsdp_plugin",
        "parallelism_config",
    )

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any) -> None:
        for name in [name for name in kwargs if name in _PLUGINS]:
            if kwargs.pop(name) is not None:
                raise ConfigError(f"AcceleratorState was given {name}. Write Accelerator({name}=...) instead.")
        PartialState(cpu, **kwargs)
        self._fixed: tuple[ProcessContext, Choices] | None = None
        choices = newest_choices()
        if choices is None:
            remember(current_process(), Choices.make(mixed_precision))
        elif mixed_precision is not None and str(resolve_precision(mixed_precision, Environment())) != (
            choices.mixed_precision
        ):
            raise ConfigError(
                f"mixed_precision={mixed_precision!r} was given to AcceleratorState, but the Accelerator of this "
                f"process computes in {choices.mixed_precision!r}. A state only shows what was chosen; write "
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
        return self._fixed[0] if self._fixed else current_process()

    @property
    def _choices(self) -> Choices:
        return self._fixed[1] if self._fixed else newest_choices() or Choices.make()

    @property
    @override
    def distributed_type(self) -> DistributedType:
        return self._choices.distributed_type or super().distributed_type

    @property
    def mixed_precision(self) -> str:
        """The precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``."""
        return self._choices.mixed_precision

    @property
    def dynamo_plugin(self) -> TorchDynamoPlugin:
        """How models are compiled."""
        return self._choices.dynamo

    @property
    def initialized(self) -> bool:
        """Whether an `Accelerator`, or this state, was made."""
        return is_initialized()

    @property
    def deepspeed_plugins(self) -> dict[str, DeepSpeedPlugin] | None:
        """How DeepSpeed trains models, by the names that were given; None where it does not."""
        strategy_options = self._choices.strategy_options
        return (
            None if strategy_options is None or strategy_options.deepspeed is None else dict(strategy_options.deepspeed)
        )

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The plugin that counts for what is prepared now; None where DeepSpeed does not train."""
        plugins = self.deepspeed_plugins or {}
        return next((plugin for plugin in plugins.values() if plugin.selected), None)

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return one of several plugins.

        Args:
            name: a key of ``Accelerator(deepspeed_plugins={...})``.

        Raises:
            ConfigError: there is none of this name.
        """
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise ConfigError(
                f"There is no DeepSpeed plugin {name!r}.{suggest(name, plugins)} There are: "
                f"{', '.join(map(repr, plugins)) or 'none'}. Write Accelerator(deepspeed_plugins={{{name!r}: ...}})."
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str) -> None:
        """Make one of several plugins count for what is prepared from now on.

        Args:
            name: see `get_deepspeed_plugin`.

        Raises:
            ConfigError: there is none of this name.
        """
        chosen = self.get_deepspeed_plugin(name)
        for plugin in (self.deepspeed_plugins or {}).values():
            plugin.deselect()
        chosen.select(_from_accelerator_state=True)

    @property
    def fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        """How models are sharded; None if they are not."""
        strategy_options = self._choices.strategy_options
        return strategy_options.fsdp if strategy_options is not None and self.is_fsdp2 else None

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How ranks are laid out; None if nobody has said."""
        strategy_options = self._choices.strategy_options
        return None if strategy_options is None else strategy_options.parallelism

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded with FSDP2; its first version is not supported."""
        return self.distributed_type is DistributedType.FSDP

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Clear the choices of the newest `Accelerator`; with ``reset_partial_state`` also rank and device."""
        process = context.current()
        if process is not None:
            remember(process, None)
        if reset_partial_state:
            context.reset()


def is_initialized() -> bool:
    """Return whether an `Accelerator`, or an `AcceleratorState`, was made in this process."""
    return newest_choices() is not None

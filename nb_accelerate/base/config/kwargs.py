"""Arguments that are passed on to torch: for DistributedDataParallel, the gradient scaler, process groups, autocast.

Pass instances in ``Accelerator(kwargs_handlers=[...])``, at most one of each.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from nb_accelerate.base.config.checks import check_choice, check_number, check_whole, shown
from nb_accelerate.base.config.distributed import Word
from nb_accelerate.base.config.options import Options
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import profile


class KwargsHandler(Options):
    """Base of the classes in this module, and of dataclasses of users, frozen or not."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
        return {item.name: getattr(self, item.name) for item in fields}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}


class DDPCommunicationHookType(Word):
    """How DistributedDataParallel sends gradients: unchanged, as 16-bit numbers, or as low-rank factors (PowerSGD)."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_HOOKS = tuple(member.value for member in DDPCommunicationHookType)
_WRAPPERS = ("no", "fp16", "bf16")


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and how it sends gradients.

    Attributes:
        dim: the batch dimension of inputs.
        broadcast_buffers: send rank 0's buffers (batch norm statistics, say) to all ranks before each forward.
        bucket_cap_mb: size of the buckets in which gradients are sent, in MiB.
        find_unused_parameters: look, after each forward, for parameters that will get no gradient.
        check_reduction: ignored by torch; kept because accelerate has it.
        gradient_as_bucket_view: let gradients share the memory of the buckets in which they are sent.
        static_graph: promise that the same parameters are used in every step.
        comm_hook: how gradients are sent.
        comm_wrapper: the number format around ``comm_hook``: no, fp16 or bf16.
        comm_state_option: arguments of the PowerSGD state.

    Raises:
        ConfigError: a value is of the wrong type, or not a choice.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_state_option: Mapping[str, Any] = field(default_factory=dict)

    _checks: ClassVar[dict[str, Any]] = {
        "dim": partial(check_whole, at_least=0),
        "bucket_cap_mb": partial(check_whole, at_least=1),
        "comm_hook": lambda name, value: DDPCommunicationHookType(check_choice(name, value, _HOOKS)),
        "comm_wrapper": lambda name, value: DDPCommunicationHookType(check_choice(name, value, _WRAPPERS)),
    }

    @override
    def to_dict(
        self, ignore_keys: Sequence[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the fields that DistributedDataParallel's constructor takes, by name.

        Args:
            ignore_keys: names to leave out.
        """
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Make a wrapped model send its gradients as ``comm_hook`` says. ``prepare`` does it for models it wraps.

        Args:
            model: wrapped in DistributedDataParallel by you.
        """
        if self.comm_hook is DDPCommunicationHookType.NO:
            return
        # Imported when used: torch compiles a part of PowerSGD when it is imported.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        low_rank: dict[Any, Any] = {
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        hook: Any = low_rank.get(self.comm_hook) or getattr(default_hooks, f"{self.comm_hook}_compress_hook")
        if self.comm_wrapper is not DDPCommunicationHookType.NO:
            hook = getattr(default_hooks, f"{self.comm_wrapper}_compress_wrapper")(hook)
        state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option) if self.comm_hook in low_rank else None
        # Under another name: torch refuses its bfloat16 hooks by name where there is no NCCL.
        model.register_comm_hook(state=state, hook=lambda state, bucket: hook(state, bucket))  # noqa: PLW0108

    def to_ddp(self) -> dict[str, Any]:
        """Return the arguments of DistributedDataParallel's constructor that differ from their defaults."""
        # check_reduction is deprecated in torch and warns when it is passed.
        return {name: value for name, value in self.to_kwargs().items() if name != "check_reduction"}


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of `torch.amp.GradScaler`, which ``mixed_precision="fp16"`` uses.

    Attributes:
        init_scale: the first factor by which losses are multiplied.
        growth_factor: by how much that factor grows after ``growth_interval`` good steps.
        backoff_factor: by how much it shrinks after a step with infinite gradients; between 0 and 1.
        growth_interval: good steps in a row before it grows.
        enabled: False switches scaling off.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    _checks: ClassVar[dict[str, Any]] = {
        "init_scale": partial(check_number, above=0.0),
        "growth_factor": partial(check_number, above=1.0),
        "backoff_factor": partial(check_number, above=0.0),
        "growth_interval": partial(check_whole, at_least=1),
    }

    @override
    def _check(self) -> None:
        super()._check()
        if self.backoff_factor >= 1.0:
            raise ConfigError(f"backoff_factor={self.backoff_factor} does not shrink. Write a number between 0 and 1.")


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`.

    Attributes:
        backend: what carries tensors between ranks; None takes what fits the device (gloo on CPU, nccl on CUDA).
        init_method: the address where ranks meet; None takes ``MASTER_ADDR`` and ``MASTER_PORT``.
        timeout: how long a collective waits for ranks that do not come; None takes torch's default.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None

    @override
    def _check(self) -> None:
        if self.timeout is not None and not (isinstance(self.timeout, timedelta) and self.timeout > timedelta(0)):
            raise ConfigError(
                f"timeout={shown(self.timeout)} is not a datetime.timedelta above 0. "
                "Write timeout=timedelta(seconds=60), with `from datetime import timedelta`."
            )


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`.

    Attributes:
        enabled: False computes in float32 inside the block.
        cache_enabled: keep the 16-bit copies of weights for the whole block; None takes torch's default.

    Raises:
        ConfigError: a value is of the wrong type.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


_SCHEDULE = ("skip_first", "wait", "warmup", "active", "repeat", "skip_first_wait")


@dataclass
class ProfileKwargs(KwargsHandler):
    """Arguments of `torch.profiler.profile`, and where `Accelerator.profile` writes the trace.

    Attributes:
        activities: what to record: ``["cpu"]``, ``["cpu", "cuda"]``, or one of them; None records all there is.
        schedule_option: which steps to record: a dict of ``wait``, ``warmup``, ``active``, ``repeat`` and
            ``skip_first``, the arguments of `torch.profiler.schedule`. Call ``step()`` on the profiler at each step.
        on_trace_ready: called with the profiler when a cycle of the schedule is complete.
        record_shapes: record the shapes of inputs.
        profile_memory: record allocations of memory.
        with_stack: record file and line of each operation.
        with_flops: estimate floating point operations.
        with_modules: record which module called an operation.
        output_trace_dir: write ``profile_<process>.json``, a trace for Chrome's and Perfetto's viewers, into this
            folder: one for each process.

    Raises:
        ConfigError: a value is of the wrong type, or not a choice.
    """

    activities: Sequence[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | os.PathLike[str] | None = None

    @override
    def _check(self) -> None:
        super()._check()
        if isinstance(self.activities, str):
            self.activities = [self.activities]
        for activity in self.activities or ():
            check_choice("activities", activity, _activities())
        for name in self.schedule_option or ():
            check_choice("schedule_option", name, _SCHEDULE)

    def build(self) -> profile:
        """Return the profiler: a context manager, with ``step()`` to call at each step."""
        from torch import profiler

        options = self.to_dict()
        del options["output_trace_dir"]
        activities, schedule = options.pop("activities") or (), options.pop("schedule_option")
        return profiler.profile(
            activities=[_activities()[name.lower()] for name in activities] or None,
            schedule=profiler.schedule(**schedule) if schedule else None,
            **options,
        )


def _activities() -> dict[str, Any]:
    """Return what this build of torch can record, by its name in small letters."""
    from torch.profiler import ProfilerActivity

    return {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}

"""How layers are parallelized over the ranks of a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from nb_accelerate.base.config.checks import check_flag, check_whole, shown
from nb_accelerate.base.config.options import Options
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass
class TorchTensorParallelConfig(Options):
    """Say which layers tensor parallelism applies to, and how.

    Example::

        plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        parallelism = ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=plan))
        accelerator = Accelerator(parallelism_config=parallelism)

    Attributes:
        enable_async_tp: not supported, as in accelerate.
        plan: styles by the names of layers, in which ``*`` stands for any part between two dots. A style is one of
            `torch.distributed.tensor.parallel`, ``ColwiseParallel()`` say, or what plans of transformers call it:
            ``"colwise"``. Default: the plan that the model brings, as those of transformers do (``_tp_plan``).

    Raises:
        ConfigError: a value is not supported.
    """

    enable_async_tp: bool = False
    plan: Mapping[str, ParallelStyle | str] | None = None

    @override
    def _check(self) -> None:
        if check_flag("enable_async_tp", self.enable_async_tp):
            raise ConfigError("enable_async_tp=True (asynchronous tensor parallelism) is not supported. Leave it out.")
        if self.plan is not None and not isinstance(self.plan, Mapping):
            raise ConfigError(
                f"plan={shown(self.plan)} is not a dict of styles by the names of layers. Write "
                'plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, with the names of your layers.'
            )


@dataclass
class TorchTensorParallelPlugin(Options):
    """Ask for tensor parallelism alone: ``Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))``.

    ``ParallelismConfig(tp_size=2)`` asks for the same, and takes a plan.

    Attributes:
        tp_size: number of ranks that compute each layer together. Must be the number of all ranks, unless a
            `ParallelismConfig` or its variables give other sizes too.
        torch_device_mesh: not supported: the `Accelerator` makes it.

    Raises:
        ConfigError: a value is not supported.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | Any = None

    _checks: ClassVar = {"tp_size": partial(check_whole, at_least=1)}

    @override
    def _check(self) -> None:
        super()._check()
        if self.torch_device_mesh is not None:
            raise ConfigError(
                "torch_device_mesh was given, and the Accelerator makes the mesh itself. Leave it out; "
                "accelerator.torch_device_mesh is the one that is made."
            )

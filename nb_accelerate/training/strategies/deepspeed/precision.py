"""The precision of models that a DeepSpeed engine trains: it casts weights, scales losses and takes steps itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from typing_extensions import override

from nb_accelerate.errors import ConfigError, NotPreparedError
from nb_accelerate.training.precision.precision import Float32Forward, OptimizerStep, Precision
from nb_accelerate.training.pytree import map_tensors
from nb_accelerate.training.strategies.deepspeed.gradients import (
    engine_of,
    limit_norm_to_configured,
    note_backward,
    note_step,
)
from nb_accelerate.training.strategies.deepspeed.library import engines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ENGINE = "nb_accelerate_engine"


class HalfForward(Float32Forward):
    """Convert floating point inputs of a model to its 16-bit dtype, and its outputs to float32."""

    def __init__(self, forward: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__(forward)
        self.dtype = dtype

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(lambda x: x.to(self.dtype) if x.is_floating_point() else x, (args, kwargs))
        return super().__call__(*args, **kwargs)


class DeepSpeedPrecision(Precision):
    """Compute in the dtype of an engine, ``"no"``, ``"bf16"`` or ``"fp16"``, and let it run backward."""

    def __init__(self, name: str) -> None:
        self.name = name

    @override
    def prepare_model(self, model: nn.Module) -> nn.Module:
        model = super().prepare_model(model)
        dtype = _DTYPES.get(self.name)
        present = vars(model).get("forward")
        if dtype is not None and not (isinstance(present, HalfForward) and present.dtype is dtype):
            model.forward = HalfForward(model.forward, dtype)
        return model

    @override
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        refused = kwargs.keys() - {"retain_graph"}
        if refused:
            raise ConfigError(
                f"accelerator.backward was given {', '.join(sorted(refused))}, which DeepSpeed's backward does not "
                "take. Leave it out."
            )
        # The loss has been divided by the length of the window already.
        engine = engine_of_loss(loss)
        note_backward(engine)
        engine.backward(loss, scale_wrt_gas=False, **kwargs)

    @override
    def bind(self, optimizer: torch.optim.Optimizer) -> OptimizerStep:
        return EngineStep(optimizer)


class EngineStep(OptimizerStep):
    """Take the steps of the engine that owns an optimizer."""

    @override
    def __call__(self, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None:
            raise ConfigError(
                "optimizer.step was given a closure, and DeepSpeed takes none: gradients come from "
                "accelerator.backward. Train without DeepSpeed for optimizers such as LBFGS."
            )
        engine = engine_of(self.optimizer)
        if engine is None:
            raise NotPreparedError(
                "The DeepSpeed engine of this optimizer is gone: its process group has ended, or free_memory was "
                "called. Prepare a new model and its optimizer."
            )
        engine.step()
        note_step(engine)
        self.skipped = bool(getattr(engine.optimizer, "overflow", False))
        limit_norm_to_configured(engine)


def mark_outputs(engine: nn.Module, _: Any, outputs: Any) -> None:
    """Note on the outputs of an engine that they are its. A forward hook."""

    def mark(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is not None:
            notes: Any = tensor.grad_fn.metadata  # a dict; torch declares a method
            notes[_ENGINE] = ref(engine)
        return tensor

    if len(engines) > 1:
        map_tensors(mark, outputs)


def engine_of_loss(loss: Tensor) -> Any:
    """Return the engine whose outputs a loss was computed from; with several, the one nearest to the loss."""
    # DeepSpeed's hooks run backward in the others by themselves, in stages 1 to 3.
    candidates = list(engines)
    if len(candidates) == 1:
        return candidates[0]
    level: Sequence[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while level:
        following = []
        for node in level:
            if node is None or node in seen:
                continue
            seen.add(node)
            engine = node.metadata.get(_ENGINE)
            if engine is not None and engine() is not None:
                return engine()
            following += [function for function, _ in node.next_functions]
        level = following
    raise NotPreparedError(
        "accelerator.backward was given a loss that comes from no DeepSpeed engine. DeepSpeed trains models that were "
        "prepared together with their optimizer: model, optimizer = accelerator.prepare(model, optimizer)."
    )

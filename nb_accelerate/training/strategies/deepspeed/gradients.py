"""Gradients that a DeepSpeed engine holds: their norm, clipping them, dropping them.

ZeRO optimizers keep averaged gradients in buffers of their own. Stage 0 in float32 leaves them in ``parameter.grad``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process.live_bytes import tensors_in
from nb_accelerate.training.strategies.deepspeed.library import engines

# An attribute of an engine: whether it has averaged gradients since its last step.
_AVERAGED = "_nb_accelerate_averaged"

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def engine_of(optimizer: torch.optim.Optimizer) -> Any | None:
    """Return the engine that took over an optimizer; None if there is none any more."""
    return next((engine for engine in engines if engine.basic_optimizer is optimizer), None)


def engine_with(parameters: Sequence[Tensor]) -> Any | None:
    """Return the engine that trains parameters and keeps their gradients in buffers of its own; None if none does.

    Parameters of an engine that trains others too are refused: these could not be left out of the norm.
    """
    wanted = {id(parameter) for parameter in parameters}
    for engine in engines:
        if not has_buffers(engine):
            continue
        trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        if not any(id(parameter) in wanted for parameter in trained):
            continue
        missing = sum(id(parameter) not in wanted for parameter in trained)
        if missing:
            raise ConfigError(
                f"clip_grad_norm_ was given parameters of a model of which {missing} others are trained too, and ZeRO "
                "knows the norm of all together only. Write accelerator.clip_grad_norm_(model.parameters(), max_norm)."
            )
        return engine
    return None


def has_buffers(engine: Any) -> bool:
    """Return whether an engine keeps averaged gradients elsewhere than in ``parameter.grad``."""
    return hasattr(engine.optimizer, "clip_grad")


def shards_of(engine: Any) -> list[Tensor]:
    """Return what this rank holds of the parameters that stage 3 has sharded; none in other stages."""
    shards = [getattr(parameter, "ds_tensor", None) for parameter in engine.module.parameters()]
    return [shard for shard in shards if shard is not None]


def held_by(engine: Any) -> list[Tensor]:
    """Return the buffers in which the optimizer of an engine keeps gradients, and those it collects them in."""
    return _tensors_named(engine, lambda name: "grad" in name or "ipg" in name)


def precise_weights(engine: Any) -> list[Tensor]:
    """Return the float32 weights that the optimizer of an engine keeps besides those of the model."""
    return _tensors_named(engine, lambda name: "fp32" in name and "grad" not in name)


def _tensors_named(engine: Any, is_meant: Callable[[str], bool]) -> list[Tensor]:
    attributes = vars(engine.optimizer).items()
    return [tensor for name, value in attributes if is_meant(name) for tensor in tensors_in(value)]


def note_backward(engine: Any) -> None:
    """Note that an engine is about to run backward, if it has not averaged gradients yet: ZeRO would replace them."""
    if not engine.is_gradient_accumulation_boundary() or not has_buffers(engine):
        return
    if vars(engine).get(_AVERAGED):
        raise ConfigError(
            "accelerator.backward was called twice for one optimizer step. A ZeRO engine averages gradients in the "
            "last backward of a step, so it has to know which that is: run the others in `with "
            "accelerator.no_sync(model):`, or every batch in `with accelerator.accumulate(model):`. To drop what an "
            "interrupted loop has left, call optimizer.zero_grad()."
        )
    vars(engine)[_AVERAGED] = True


def note_step(engine: Any) -> None:
    """Note that the gradients of an engine were used, or dropped."""
    vars(engine)[_AVERAGED] = False


def norm_of_gradients(engine: Any) -> Tensor:
    """Return the norm of the gradients that an engine has averaged, without the loss scale. Collective."""
    from deepspeed.runtime import utils

    optimizer = engine.optimizer
    if not engine.is_gradient_accumulation_boundary():
        return torch.full((), float("nan"))
    scale = 1.0
    if hasattr(optimizer, "get_grads_for_norm"):  # BF16_Optimizer: stage 1 in bf16
        gradients, _ = optimizer.get_grads_for_norm()
        norm = utils.get_global_norm_of_tensors(gradients, mpu=optimizer.mpu, norm_type=optimizer.norm_type)
    elif hasattr(optimizer, "_get_norm_groups"):  # stage 3
        norm = utils.combine_grad_norm_groups(optimizer._get_norm_groups())  # noqa: SLF001 - there is no public way
        scale = optimizer.loss_scale
    else:  # stages 1 and 2
        norm = optimizer.scaled_global_norm()
        scale = optimizer.loss_scale
    norm = torch.as_tensor(norm, dtype=torch.float32).reshape(())
    return torch.where(norm >= 0, norm / scale, torch.full_like(norm, float("nan")))  # -1 stands for an infinite one


def limit_norm(engine: Any, max_norm: float) -> None:
    """Make the next step of an engine scale gradients so that their norm is at most ``max_norm``."""
    configured = engine.gradient_clipping()
    if configured and configured != max_norm:
        raise ConfigError(
            f"clip_grad_norm_ was given max_norm={max_norm}, and the DeepSpeed configuration has gradient_clipping "
            f'{configured}. Leave one of them out, or write "gradient_clipping": "auto".'
        )
    engine.optimizer.clip_grad = max_norm


def limit_norm_to_configured(engine: Any) -> None:
    """Undo `limit_norm`."""
    if has_buffers(engine):
        engine.optimizer.clip_grad = engine.gradient_clipping()


def drop_gradients(engine: Any) -> None:
    """Drop what an engine has averaged and accumulated, as it does itself after gradients that were infinite."""
    note_step(engine)
    optimizer = engine.optimizer
    if not has_buffers(engine):
        engine.zero_grad()
        return
    optimizer.zero_grad()
    for name in ("averaged_gradients", "all_grad_tensors"):
        held = getattr(optimizer, name, None)
        if isinstance(held, dict):
            for group in held:
                held[group] = None
    if hasattr(optimizer, "_get_norm_groups"):  # stage 3 looks for missing groups, not for None
        optimizer.averaged_gradients = {}
    if hasattr(optimizer, "reset_cpu_buffers"):
        optimizer.reset_cpu_buffers()
    if hasattr(optimizer, "micro_step_id"):
        optimizer.micro_step_id = -1 if hasattr(optimizer, "all_grad_tensors") else 0  # as each says before a window

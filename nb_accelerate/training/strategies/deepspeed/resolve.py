"""What a DeepSpeed engine is made of: the optimizer of a model, and the configuration, every ``"auto"`` replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.deepspeed_json import AUTO, contradictions, filled
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.optim.placeholders import DummyOptim, DummyScheduler
from nb_accelerate.training.strategies.unwrapping import parameters_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin


# Optimizers that DeepSpeed compiles at their first use, unless it is told to take those of torch.
_COMPILED = {"adam", "adamw"}

_NEVER = 10**9  # optimizer steps between two lines of DeepSpeed about progress: more than any run has


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known about a training where a model is prepared.

    How often a scheduler advances for one optimizer step divides ``total_num_steps`` of a `DummyScheduler`, as
    accelerate does; ``warmup_num_steps`` is not divided.
    """

    precision: str
    world_size: int
    accumulation_steps: int
    batch_sizes: tuple[int, ...] = ()  # rows on one rank, of each loader that is prepared with the model
    scheduler_steps: int = 1
    hidden_size: int | None = None


def engine_config(
    plugin: DeepSpeedPlugin,
    run: Run,
    optimizer: torch.optim.Optimizer | None,
    schedulers: Sequence[Any],
) -> dict[str, Any]:
    """Return the configuration for one engine: a copy of the user's, checked and completed."""
    base = dict(plugin.deepspeed_config)
    if optimizer is None:
        base.pop("optimizer", None)
        base.pop("scheduler", None)
    _check_objects(base, optimizer, schedulers)
    batch = _batch_size(plugin, run)
    values: dict[str, Any] = {
        "gradient_accumulation_steps": run.accumulation_steps,
        "train_micro_batch_size_per_gpu": batch,
        "bf16.enabled": run.precision == "bf16",
        "fp16.enabled": run.precision == "fp16",
        **_of_size(run.hidden_size),
        **_of_schedulers(schedulers, run),
    }
    if isinstance(optimizer, DummyOptim):
        options = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        values |= {f"optimizer.params.{name}": value for name, value in options.items()}
    config = filled(base, values)
    sizes = {"gradient_accumulation_steps": run.accumulation_steps}
    micro = config.get("train_micro_batch_size_per_gpu", batch)
    if micro is not None:
        sizes["train_batch_size"] = micro * run.accumulation_steps * run.world_size
    problems = contradictions(config, sizes)
    if problems:
        raise ConfigError(
            f"The DeepSpeed configuration contradicts what is prepared ({run.world_size} ranks, batches of {micro} "
            f'rows, {run.accumulation_steps} for one optimizer step): {"; ".join(problems)}. Write "auto" there.'
        )
    config["gradient_accumulation_steps"] = run.accumulation_steps
    if "train_batch_size" not in config:
        config["train_micro_batch_size_per_gpu"] = micro or 1  # DeepSpeed wants one, and only counts samples with it
    config.setdefault("gradient_clipping", 0.0)  # newer versions of DeepSpeed clip to 1.0 otherwise
    config.setdefault("steps_per_print", _NEVER)
    config.setdefault("zero_allow_untested_optimizer", True)
    zero = config.setdefault("zero_optimization", {})
    zero.setdefault("stage", plugin.stage)
    if run.precision != "no":
        if zero["stage"] == 0:
            raise ConfigError(
                f"mixed_precision={run.precision!r} was asked for with ZeRO stage 0, where DeepSpeed's first optimizer "
                "step is wrong. Write zero_stage=1 or more, or leave mixed_precision out."
            )
        config.setdefault(run.precision, {})["enabled"] = True
    if zero["stage"] == 3:
        zero.setdefault("stage3_gather_16bit_weights_on_model_save", True)
    described = config.get("optimizer")
    if optimizer is not None and described is None:
        config.setdefault("zero_force_ds_cpu_optimizer", False)  # the user's optimizer works there too
    elif described is not None and str(described.get("type", "")).lower() in _COMPILED:
        described.setdefault("params", {}).setdefault("torch_adam", True)
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    return config


def _check_objects(config: dict[str, Any], optimizer: torch.optim.Optimizer | None, schedulers: Sequence[Any]) -> None:
    """Raise `ConfigError` where an optimizer or a scheduler is both configured and prepared, or neither of them."""
    if optimizer is None:
        return
    stands_in = isinstance(optimizer, DummyOptim)
    if "optimizer" in config and not stands_in:
        raise ConfigError(
            f'The DeepSpeed configuration has an "optimizer", and a {type(optimizer).__name__} is prepared. Leave one '
            "of them out, or write optimizer = DummyOptim(model.parameters())."
        )
    if "optimizer" not in config and stands_in:
        raise ConfigError(
            'A DummyOptim stands for the "optimizer" of a DeepSpeed configuration, and this one has none. Describe it '
            "there, or make an optimizer of torch.optim."
        )
    for scheduler in schedulers:
        name = type(scheduler).__name__
        if isinstance(scheduler, DummyScheduler):
            if "scheduler" not in config and scheduler.lr_scheduler_callable is None:
                raise ConfigError(
                    'A DummyScheduler stands for the "scheduler" of a DeepSpeed configuration, and this one has none. '
                    "Describe it there, or write DummyScheduler(optimizer, lr_scheduler_callable=...)."
                )
        elif "scheduler" in config:
            raise ConfigError(
                f'The DeepSpeed configuration has a "scheduler", and a {name} is prepared. Leave one of them out, or '
                "write DummyScheduler(optimizer)."
            )
        elif stands_in:
            raise ConfigError(
                f"A {name} of a DummyOptim would change nothing. Write DummyScheduler(optimizer, "
                "lr_scheduler_callable=...), which makes it from the real optimizer."
            )


def _batch_size(plugin: DeepSpeedPlugin, run: Run) -> int | None:
    """Return the rows of a batch on one rank; None where nothing says."""
    setting = plugin.get_value("train_micro_batch_size_per_gpu")
    size = None if setting in {None, AUTO} else int(setting)
    if not run.batch_sizes:
        return size
    if size is not None and size not in run.batch_sizes:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu is {size} in the DeepSpeed configuration, and the loaders that are "
            f'prepared have batches of {", ".join(map(str, sorted(set(run.batch_sizes))))} rows. Write "auto" there.'
        )
    if size is not None:
        return size
    return min(run.batch_sizes) if plugin.is_train_batch_min else max(run.batch_sizes)


def _of_size(hidden_size: int | None) -> dict[str, Any]:
    """Return sizes of buffers for a size of hidden states; transformers takes the same sizes."""
    if hidden_size is None:
        return {}
    square = hidden_size * hidden_size
    return {
        "zero_optimization.reduce_bucket_size": square,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * square),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }


def _of_schedulers(schedulers: Sequence[Any], run: Run) -> dict[str, Any]:
    scheduler = next((known for known in schedulers if isinstance(known, DummyScheduler)), None)
    if scheduler is None:
        return {}
    total = scheduler.total_num_steps
    return {
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": scheduler.optimizer.defaults.get("lr"),
        "scheduler.params.warmup_num_steps": max(1, scheduler.warmup_num_steps),
        "scheduler.params.total_num_steps": None if total is None else -(-total // run.scheduler_steps),
    }


def optimizer_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """Return the optimizer, of ``optimizers``, that trains a model; None if there is none.

    It is refused if there are several, if it trains other models too, or has a state that the engine would lose.
    """
    weights = {id(parameter) for parameter in model.parameters()}
    mine = [optimizer for optimizer in optimizers if not weights.isdisjoint(map(id, parameters_of(optimizer)))]
    if not mine:
        return None
    if len(mine) > 1:
        raise ConfigError(
            f"{len(mine)} optimizers train parts of one {type(model).__name__}, and a DeepSpeed engine has one. "
            "Make one optimizer with several parameter groups."
        )
    [optimizer] = mine
    others = sum(id(parameter) not in weights for parameter in parameters_of(optimizer))
    if others:
        raise ConfigError(
            f"This {type(optimizer).__name__} trains {others} parameters that are not those of the "
            f"{type(model).__name__}, and a DeepSpeed engine has one model. Make an optimizer for each model, or put "
            "the models into one torch.nn.Module."
        )
    # Constructors of some optimizers (Adagrad) make a state; a state without "step" was made by a step.
    if any(state.get("step", 1) != 0 for state in optimizer.state.values()):
        raise ConfigError(
            f"This {type(optimizer).__name__} has taken steps or was loaded before prepare, and DeepSpeed begins with "
            "an empty state. Prepare it first, then call accelerator.load_state."
        )
    return optimizer

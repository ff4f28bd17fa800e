"""Train with DeepSpeed: an engine takes over a model together with its optimizer.

::

    prepare(model, optimizer)   plugin + what is prepared -> configuration (`resolve`) -> deepspeed.initialize -> engine
    forward                     engine(inputs)
    backward                    `DeepSpeedPrecision.backward` -> engine.backward, at a boundary where the window closes
    optimizer.step()            `EngineStep` -> engine.step: clips, steps, drops gradients, advances its scheduler

The prepared model is the engine. The prepared optimizer wraps the optimizer inside of the engine: the user's own, whose
parameter groups (and so learning rates) stay the same objects, or the one that the configuration describes.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

from typing_extensions import override

from nb_accelerate.base.config.deepspeed import tell_transformers
from nb_accelerate.base.config.distributed import DistributedType
from nb_accelerate.base.config.env import variables_set
from nb_accelerate.errors import ConfigError, NotPreparedError
from nb_accelerate.training.optim.placeholders import DummyOptim, DummyScheduler
from nb_accelerate.training.strategies.deepspeed import checkpoint, gradients
from nb_accelerate.training.strategies.deepspeed.library import (
    engines,
    forget_ended_groups,
    import_deepspeed,
    path_of_programs,
    refuse_unsupported,
    set_loudness,
)
from nb_accelerate.training.strategies.deepspeed.precision import DeepSpeedPrecision, mark_outputs
from nb_accelerate.training.strategies.deepspeed.resolve import Run, engine_config, optimizer_of
from nb_accelerate.training.strategies.model_memory import measure
from nb_accelerate.training.strategies.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from nb_accelerate.base.config.deepspeed import DeepSpeedPlugin
    from nb_accelerate.base.progress_page import RankMemory
    from nb_accelerate.training.comm import Collectives
    from nb_accelerate.training.precision import Precision
    from nb_accelerate.training.strategies.strategy import ModelRequest


class DeepSpeedStrategy(Strategy):
    """Train with DeepSpeed, as the selected one of some plugins says when a model is prepared."""

    is_replicated = False
    owns_gradients = True
    refusals: ClassVar[Mapping[str, str]] = {
        "LocalSGD": "DeepSpeed averages gradients at every step. Leave LocalSGD out, or deepspeed_plugin.",
        "join_uneven_inputs": "every step needs all ranks. Write DataLoaderConfiguration(even_batches=True) instead.",
        "sync_each_batch": "an engine averages when a window closes, or in stages 2 and 3 always. Leave it out.",
        "torch.compile": (
            "a DeepSpeed engine cannot be compiled by dynamo_backend and dynamo_plugin. Leave them out, and call "
            "model.compile() on the prepared model."
        ),
        "async_save": "a DeepSpeed engine writes its own files. Leave async_save out.",
    }

    def __init__(
        self,
        device: torch.device,
        collectives: Collectives,
        *,
        local_rank: int,
        plugins: Mapping[str, DeepSpeedPlugin],
    ) -> None:
        super().__init__(device, collectives, DistributedType.DEEPSPEED)
        self._deepspeed = import_deepspeed(device.type)
        forget_ended_groups()
        self._local_rank = local_rank
        self._plugins = plugins
        self._precision = "no"
        self._schedulers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        set_loudness(self.plugin.deepspeed_config)
        if self.plugin.is_zero3_init_enabled():
            with self._surroundings():  # models may be sharded before an engine is made
                self._deepspeed.init_distributed(verbose=False)
            tell_transformers(self.plugin)

    @property
    def plugin(self) -> DeepSpeedPlugin:
        return next(plugin for plugin in self._plugins.values() if plugin.selected)

    @override
    def sharding(self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> str:
        if not any(model in engines for model in models):
            return ""
        stages = sorted({int(engine.zero_optimization_stage()) for engine in engines})
        named = " and ".join(map(str, stages)) or str(self.plugin.zero_stage)
        return f"ZeRO stage{'s' if len(stages) > 1 else ''} {named}, {self.collectives.world_size} ranks"

    @override
    def model_memory(self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> RankMemory:
        models = list(models)
        prepared = [model for model in models if model in engines]
        return measure(
            models,
            optimizers,
            parameters=itertools.chain.from_iterable(map(gradients.shards_of, prepared)),
            gradients=itertools.chain.from_iterable(map(gradients.held_by, prepared)),
            states=itertools.chain.from_iterable(map(gradients.precise_weights, prepared)),
        )

    # -- preparation

    @override
    def adapt_precision(self, precision: Precision) -> Precision:
        if precision.name == "fp8":
            raise ConfigError(
                "mixed_precision='fp8' was asked for, and DeepSpeed keeps the weights of models that it trains in 16 "
                "bits. Write mixed_precision='bf16', or shard the model with fsdp_plugin instead of deepspeed_plugin."
            )
        configured = self.plugin.precision
        is_off = precision.name != "no" and self.plugin.get_value(f"{precision.name}.enabled") is False
        if precision.name not in {"no", configured or precision.name} or is_off:
            raise ConfigError(
                f"mixed_precision={precision.name!r} was asked for, but the DeepSpeed configuration has "
                f"{precision.name}.enabled false"
                + (f" or {configured}.enabled true. " if configured else ". ")
                + 'Write one of the two, or "auto" in the configuration.'
            )
        self._precision = configured or precision.name
        refuse_unsupported(self._precision)
        return DeepSpeedPrecision(self._precision)

    @override
    def prepare(
        self,
        models: Sequence[ModelRequest],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        earlier: Iterable[torch.optim.Optimizer] = (),
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        taken: dict[int, torch.optim.Optimizer] = {}
        prepared = [self._prepare_one(request, optimizers, taken) for request in models]
        for optimizer in optimizers:
            if id(optimizer) not in taken:
                if gradients.engine_of(optimizer) is None:
                    raise ConfigError(
                        f"A {type(optimizer).__name__} was prepared without its model. A DeepSpeed engine takes over "
                        "both at once: model, optimizer = accelerator.prepare(model, optimizer)."
                    )
                taken[id(optimizer)] = optimizer  # of an engine that another Accelerator has made
        return prepared, [taken[id(optimizer)] for optimizer in optimizers]

    def _prepare_one(
        self,
        request: ModelRequest,
        optimizers: Sequence[torch.optim.Optimizer],
        taken: dict[int, torch.optim.Optimizer],
    ) -> nn.Module:
        model = request.model
        if isinstance(model, self._deepspeed.DeepSpeedEngine):
            if model not in engines and model.optimizer is not None:
                raise NotPreparedError(
                    f"The process group of the DeepSpeed engine of this {type(model.module).__name__} has ended, and "
                    "with it the engine. Make the model again, and load a checkpoint."
                )
            return request.model
        free = [optimizer for optimizer in optimizers if id(optimizer) not in taken] if request.training else []
        optimizer = optimizer_of(model, free)
        if optimizer is None and not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            return model.to(self.device) if request.place else model  # it is only evaluated
        engine = self._initialize(request, optimizer)
        if optimizer is not None:
            taken[id(optimizer)] = engine.basic_optimizer
        return engine  # type: ignore[no-any-return]

    def _initialize(self, request: ModelRequest, optimizer: torch.optim.Optimizer | None) -> Any:
        """Make an engine of a model and its optimizer. Collective."""
        schedulers = [each for each in request.schedulers if optimizer is not None and each.optimizer is optimizer]
        run = Run(
            precision=self._precision,
            world_size=self.collectives.world_size,
            accumulation_steps=request.accumulation_steps,
            batch_sizes=request.batch_sizes,
            scheduler_steps=request.scheduler_steps,
            hidden_size=_hidden_size(request.model),
        )
        config = engine_config(self.plugin, run, optimizer, schedulers)
        self.plugin.set_moe_leaf_modules(request.model)
        set_loudness(self.plugin.deepspeed_config)
        arguments: dict[str, Any] = {"model": request.model, "config": config}
        if isinstance(optimizer, DummyOptim):
            arguments["model_parameters"] = optimizer.params
            makers = [each.lr_scheduler_callable for each in schedulers if each.lr_scheduler_callable is not None]
            if makers:
                arguments["lr_scheduler"] = makers[0]
        elif optimizer is not None:
            arguments["optimizer"] = optimizer
        with self._surroundings():
            engine, _, _, scheduler = self._deepspeed.initialize(**arguments)
        if optimizer is not None:
            engines.add(engine)
            engine.set_gradient_accumulation_boundary(True)
            engine.register_forward_hook(mark_outputs)
        for each in schedulers:
            if isinstance(each, DummyScheduler):
                self._schedulers[each] = scheduler
        return engine

    def _surroundings(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which variables say what DeepSpeed reads from nowhere else."""
        return variables_set({"LOCAL_RANK": str(self._local_rank), "PATH": path_of_programs()})

    @override
    def engine_scheduler(self, scheduler: Any) -> Any | None:
        if not isinstance(scheduler, DummyScheduler):
            return None
        try:
            return self._schedulers[scheduler]
        except KeyError:
            raise NotPreparedError(
                "A DummyScheduler was prepared without its model and optimizer. Write model, optimizer, scheduler = "
                "accelerator.prepare(model, optimizer, scheduler)."
            ) from None

    # -- gradients

    @override
    def no_sync(self, models: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any] | None:
        return _at_boundary([model for model in models if model in engines], False)

    @override
    def accumulate(self, models: Iterable[nn.Module]) -> contextlib.AbstractContextManager[Any] | None:
        return _at_boundary(list(engines), False)  # windows close for all models together

    @override
    def sync_in_backward(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return _at_boundary([model] if model in engines else [], True)

    @override
    def drop_gradients(
        self, optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
    ) -> Callable[[], None] | None:
        def drop() -> None:
            engine = gradients.engine_of(optimizer)
            if engine is not None:
                gradients.drop_gradients(engine)

        return drop

    @override
    def grad_norm(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        engine = gradients.engine_with(parameters)
        if engine is None:
            return super().grad_norm(parameters, norm_type)
        _check_euclidean(norm_type)
        return gradients.norm_of_gradients(engine)

    @override
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        engine = gradients.engine_with(parameters)
        if engine is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        _check_euclidean(norm_type)
        gradients.limit_norm(engine, float(max_norm))
        return gradients.norm_of_gradients(engine)

    @override
    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        if gradients.engine_with(parameters) is not None:
            raise ConfigError(
                "clip_grad_value_ limits elements of gradients, and ZeRO clips by their norm only. Write "
                "accelerator.clip_grad_norm_(model.parameters(), max_norm), or zero_stage=0."
            )
        super().clip_grad_value(parameters, clip_value)

    # -- state

    @override
    def model_state(self, model: nn.Module, *, keep: bool = True) -> dict[str, Any]:
        values = model.state_dict(keep_vars=True)
        if not any(hasattr(value, "ds_id") for value in values.values()):
            return model.state_dict()
        whole: dict[int, Tensor] = {}  # tied weights stay one tensor
        for value in values.values():
            if id(value) not in whole:
                with self._deepspeed.zero.GatheredParameters([value], enabled=hasattr(value, "ds_id")):
                    whole[id(value)] = value.detach().cpu().clone() if keep else value.detach()
        return {name: whole[id(value)] for name, value in values.items()} if keep else {}

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> dict[str, Any]:
        raise ConfigError("The whole state of an optimizer is not collected with DeepSpeed. Write save_state(...).")

    @override
    def saves_itself(self, model: nn.Module) -> bool:
        return model in engines

    @override
    def owner_of(self, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        return gradients.engine_of(optimizer)

    save_engine = staticmethod(checkpoint.save_engine)  # type: ignore[assignment]  # the model is the engine
    check_engine = staticmethod(checkpoint.check_engine)  # type: ignore[assignment]  # the model is the engine
    load_engine = staticmethod(checkpoint.load_engine)  # type: ignore[assignment]  # the model is the engine


def _hidden_size(model: nn.Module) -> int | None:
    """Return the size of hidden states that the configuration of a model says, as models of transformers have it."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", config)
    size = getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or (0,))
    return size if type(size) is int and size > 0 else None


def _check_euclidean(norm_type: float) -> None:
    if norm_type != 2:
        raise ConfigError(f"norm_type={norm_type} was given, and ZeRO clips by the Euclidean norm only. Leave it out.")


@contextlib.contextmanager
def _at_boundary(models: Iterable[Any], closes: bool) -> Iterator[None]:
    """Return a block in which engines take a batch for one that closes an accumulation window, or does not."""
    before = [(engine, engine.is_gradient_accumulation_boundary()) for engine in models]
    for engine, _ in before:
        engine.set_gradient_accumulation_boundary(closes)
    try:
        yield
    finally:
        for engine, was in before:
            engine.set_gradient_accumulation_boundary(was)

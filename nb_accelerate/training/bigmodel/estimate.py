"""Estimate the memory that training a model takes, without loading its weights."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from nb_accelerate.errors import ConfigError, MissingDependencyError
from nb_accelerate.training.bigmodel.sizes import calculate_maximum_sizes
from nb_accelerate.training.process.live_bytes import FusedAttention, LiveBytes
from nb_accelerate.training.process.shapes_only import run_operation, unwritten
from nb_accelerate.training.pytree import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

_ADAM_MOMENTS = 2  # tensors that Adam keeps per parameter: the averages of the gradient and of its square


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Hold the bytes that one process needs to train a model with Adam.

    Attributes:
        precision: ``no``, ``fp16``, ``bf16``: weights in 32 bits, as with `Accelerator(mixed_precision=...)`;
            ``bf16 weights``: everything in 16 bits.
        weights: parameters and buffers.
        gradients: gradients of trainable parameters.
        adam: both moments of Adam.
        activations: the most that forward and backward hold at once: what is kept for backward, and temporaries; None
            if the inputs are unknown.
        buckets: the buffers in which DistributedDataParallel communicates gradients.
    """

    precision: str
    weights: int
    gradients: int
    adam: int
    activations: int | None
    buckets: int

    @property
    def training(self) -> int:
        """Bytes in a single process."""
        return self.weights + self.gradients + self.adam + (self.activations or 0)

    @property
    def distributed(self) -> int:
        """Bytes in one of several processes, with DistributedDataParallel."""
        return self.training + self.buckets


def make_model(target: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a model whose weights take no memory, if called inside a `FakeTensorMode`.

    The model can be used inside that mode only.

    Args:
        target: ``module:Class``, a class or function that is called without arguments; otherwise an argument of
            ``transformers.AutoConfig.from_pretrained``: a folder, a ``config.json`` or a name on the Hub.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return _make(target)
    finally:
        torch.set_default_dtype(before)


def _make(target: str) -> nn.Module:
    module, colon, name = target.partition(":")
    if colon and not Path(target).exists():
        try:
            make = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{target!r} cannot be imported: {error}. Write module:Class") from error
        try:
            inspect.signature(make).bind()
        except TypeError as error:
            raise ConfigError(
                f"{target} cannot be called without arguments: {error}. Name a function that builds the model."
            ) from error
        return make()  # type: ignore[no-any-return]
    return _transformers_model(target)


def _transformers_model(target: str) -> nn.Module:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise MissingDependencyError("transformers", needed_for=f"the model {target!r}") from error
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call] # its advice is about training
    try:
        config = transformers.AutoConfig.from_pretrained(target)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{target!r} is not a folder with a config.json, and was not found on the Hub: {first} "
            f"For a class of your own, write module:Class"
        ) from error
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    kind = next((found for found in named if found is not None), None)
    return kind(config) if kind is not None else transformers.AutoModel.from_config(config)  # type: ignore[no-any-return, no-untyped-call]


def estimate_memory(
    model: nn.Module, precision: str, inputs: Callable[[nn.Module], Mapping[str, Any]] | None = None
) -> MemoryEstimate:
    """Return the bytes of weights, gradients, optimizer state and activations.

    Args:
        precision: see `MemoryEstimate`; for ``bf16 weights`` the model must have bfloat16 weights already.
        inputs: returns the keyword arguments of a forward pass for a model. It is run once, and its backward, to
            count the activations.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(map(_bytes, parameters))
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    autocast = torch.autocast("cpu", dtype=half) if half is not None else contextlib.nullcontext()
    activations = None
    if inputs is not None:
        with autocast:
            activations = count_activations(model, inputs(model))
    return MemoryEstimate(
        precision=precision,
        weights=sum(map(_bytes, [*model.parameters(), *model.buffers()])),
        gradients=gradients,
        adam=_ADAM_MOMENTS * gradients,
        activations=activations,
        buckets=gradients,
    )


def count_activations(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Return the most bytes that forward and backward hold at once: what is kept for backward, and temporaries.

    Parameters, buffers and gradients are not counted. Gradients are there before, as in all steps but the first.
    """
    model.train()
    for parameter in model.parameters():
        parameter.grad = unwritten(parameter) if parameter.requires_grad else None
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    live = LiveBytes()
    live.see([*model.parameters(), *model.buffers(), *gradients], "stays")
    with _Watch(live), FusedAttention():
        output = model(**inputs)
        loss = getattr(output, "loss", None)
        losses = [tensor.sum() for tensor in tensors_in(output if loss is None else loss) if tensor.requires_grad]
        del output, loss
        if losses:  # else all is frozen
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    return max((sum(held.values()) - held.get("stays", 0) for held in live.history()), default=0)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Show `LiveBytes` all operations, and compute none on large tensors."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = live

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, _ = run_operation(func, args, kwargs or {})
        self._live.see(tensors_in(result))
        return result


def token_inputs(batch_size: int, sequence_length: int) -> Callable[[nn.Module], Mapping[str, Any]]:
    """Return a function that makes inputs of a language model: ``input_ids``, and ``labels`` if it takes them."""

    def make(model: nn.Module) -> Mapping[str, Any]:
        ids = torch.zeros(batch_size, sequence_length, dtype=torch.long)
        names = inspect.signature(model.forward).parameters
        if "input_ids" not in names:
            raise ConfigError(
                f"{type(model).__name__}.forward takes no input_ids, so its activations cannot be estimated. "
                f"Leave out --batch_size"
            )
        with_labels = "labels" in names and type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
        return {"input_ids": ids, **({"labels": ids} if with_labels else {})}

    return make


def largest_layer(model: nn.Module) -> tuple[int, str]:
    """Return the bytes and the name of the largest layer, the first of equal ones. See `get_max_layer_size`."""
    size, names = calculate_maximum_sizes(model)[1]
    return int(size), names[0] if names else ""


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()

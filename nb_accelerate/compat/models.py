"""Functions about models and the precision they compute in, for code without an `Accelerator`."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.base.config.env import Environment
from nb_accelerate.base.config.kwargs import AutocastKwargs, GradScalerKwargs
from nb_accelerate.base.config.precision import resolve_precision
from nb_accelerate.training.bigmodel.sizes import compute_module_sizes
from nb_accelerate.training.bigmodel.tensors import has_offloaded_params
from nb_accelerate.training.precision import select_precision
from nb_accelerate.training.precision.precision import Float32Forward
from nb_accelerate.training.pytree import to_float32
from nb_accelerate.training.state.choices import current_process, newest_choices
from nb_accelerate.training.strategies.unwrapping import extract_model_from_parallel

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from nb_accelerate.base.config.distributed import DistributedType


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a model was made by `torch.compile`."""
    compiler = sys.modules.get("torch._dynamo")  # imported by the first compilation, and takes a second
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether some part inside a model was made by `torch.compile`, but not the model itself."""
    return not is_compiled_module(module) and any(is_compiled_module(part) for part in module.modules())


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model, inside of what distributes or compiles it, was made by the package peft."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    return any(base.__module__.split(".")[0] == "peft" and base.__name__ == "PeftModel" for base in type(inner).__mro__)


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether any parameter of a model is sharded over devices (a DTensor)."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class with a name of a module or of a part of it; None if there is none."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return over how many ranks transformers has split the layers of a model; None if it has not split them."""
    config = getattr(getattr(model, "config", None), "distributed_config", None)
    noted = config if isinstance(config, dict) else vars(config) if config is not None else {}
    size = getattr(model, "tp_size", None)  # set by transformers before version 5
    return noted.get("tp_size") if size is None else size


def convert_to_fp32(tensor: Any) -> Any:
    """Return a structure with 16-bit floating point tensors converted to float32."""
    return to_float32(tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward whose 16-bit outputs are converted to float32."""
    return Float32Forward(model_forward)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute with a dotted name such as ``"encoder.layers.0.weight"``."""
    return functools.reduce(getattr, attr.split("."), obj)


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, and of the class of anything else."""
    if hasattr(obj, "__qualname__"):
        return str(obj.__qualname__)
    return str(obj.__name__) if hasattr(obj, "__name__") else type(obj).__qualname__


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Any:
    """Yield the names and tensors of a module.

    Args:
        module: the module.
        include_buffers: buffers too.
        recurse: those of its submodules too.
        remove_non_persistent: leave out buffers that a state dict leaves out.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    not_saved = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in not_saved:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of buffers that a state dict leaves out.

    Args:
        module: of any kind.
        recurse: look at the modules in it, too.
        fqns: names as the module has them, ``"0.running_mean"``, in place of those in their own modules.
    """
    parts = module.named_modules() if recurse else [("", module)]
    return {
        # There is no public way to ask.
        f"{prefix}.{name}" if prefix and fqns else name
        for prefix, part in parts
        for name in part._non_persistent_buffers_set  # noqa: SLF001
    }


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
) -> float:
    """Return the bytes of all buffers of a model. Arguments are as for `compute_module_sizes`."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: float,
    module_sizes: Mapping[str, float],
    modules_to_treat: Sequence[tuple[str, nn.Module]],
) -> tuple[float, list[str], list[nn.Module]]:
    """Return the bytes of a module and of the modules that its ties are in, with names and modules of the latter.

    Args:
        tied_params: names of parameters elsewhere that are tied to the module's.
        module_size: the bytes of the module by itself.
        module_sizes: the result of `compute_module_sizes`.
        modules_to_treat: names and modules among which the parameters are looked for.
    """
    owners = [
        next((name, module) for name, module in modules_to_treat if tied.startswith(f"{name}.")) for tied in tied_params
    ]
    others = sum(module_sizes[name] - module_sizes[tied] for tied, (name, _) in zip(tied_params, owners, strict=True))
    return module_size + others, [name for name, _ in owners], [module for _, module in owners]


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a placed model on the CPU. Weights without numbers (on ``meta``) are left out."""
    return {name: tensor.to("cpu") for name, tensor in model.state_dict().items() if not tensor.is_meta}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device = "cpu",
) -> dict[str, Any]:
    """Put the tensors of a placed module in the place of what a state dict has under their names, and return it.

    Args:
        module: a part of a model.
        module_name: the whole name of one of its tensors, such as ``"linear2.weight"``.
        state_dict: is changed; names of other tensors stay.
        device_to_put_offload: the device of what is offloaded; other tensors stay on theirs.
    """
    prefix, is_offloaded = module_name.rpartition(".")[0], has_offloaded_params(module)
    for name, tensor in module.state_dict(prefix=f"{prefix}.").items():
        if name in state_dict:
            state_dict[name] = tensor.to(device_to_put_offload) if is_offloaded else tensor
    return state_dict


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Return a block that computes in the precision of the newest `Accelerator`.

    Args:
        native_amp: False returns a block that changes nothing.
        autocast_kwargs: arguments of `torch.autocast`.
    """
    choices = newest_choices()
    chosen = resolve_precision(choices.mixed_precision if choices and native_amp else "no", Environment())
    options = autocast_kwargs or AutocastKwargs()
    return select_precision(chosen, current_process().kind, autocast=options, scaler=GradScalerKwargs()).autocast(
        options
    )


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for this process's device.

    Args:
        distributed_type: accepted; plain scalers do for all setups there are.
        **kwargs: those of `torch.amp.GradScaler`.
    """
    del distributed_type
    return torch.amp.GradScaler(current_process().device.type, **kwargs)

"""Distributed PyTorch that is at home in a Jupyter notebook.

What is public is what this module names, and nothing else. Each name is imported when it is first used, so
that ``import nb_accelerate`` and ``%load_ext nb_accelerate`` cost nothing and leave a kernel as it was.

The package has two halves over one base. The training half needs torch and runs in the ranks, and in plain
scripts. The notebook half runs in the kernel and does not import torch. They meet when a program runs, never
by an import::

    level  training half                                                        base                  notebook half
    12                                                                          __main__
    11                                                                          __init__  cli
    10     utils  data_loader  logging
     9     compat  optimizer  scheduler  local_sgd                                              magics
     8     accelerator                                                                            pool  launchers
     7     state                                                                                  launch
     6     strategies  checkpoint                                                                     worker  display
     5     optim  data  tracking  bigmodel                                                            diagnostics
     4     precision  comm                                                                            protocol
     3     process  nested
     2                                                                          topology
     1                                                                          config  board  records
     0                                                                          errors  version

A module imports from lower levels or from its own package, nothing from the other half, and torch at import in
the training half only. ``tests/structure/test_layers.py`` reads this picture and holds the sources to it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nb_accelerate.version import __version__

if TYPE_CHECKING:
    from nb_accelerate.accelerator import Accelerator
    from nb_accelerate.checkpoint.model import load_checkpoint_in_model
    from nb_accelerate.compat.exchange import synchronize_rng_states
    from nb_accelerate.compat.packages import is_rich_available
    from nb_accelerate.config.accumulation import GradientAccumulationPlugin
    from nb_accelerate.config.distributed import DistributedType
    from nb_accelerate.config.kwargs import (
        AutocastKwargs,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
    )
    from nb_accelerate.config.loader import DataLoaderConfiguration
    from nb_accelerate.config.profiling import ProfileKwargs
    from nb_accelerate.data import skip_first_batches
    from nb_accelerate.display.runs import runs
    from nb_accelerate.errors import (
        CollectiveMismatchError,
        ConfigError,
        DeadlineError,
        LaunchError,
        MissingDependencyError,
        NbAccelerateError,
        NotPreparedError,
        RankDiedError,
        RankError,
        RemoteError,
        ShippingError,
        StartError,
    )
    from nb_accelerate.launch import notebook_launcher
    from nb_accelerate.launchers import debug_launcher
    from nb_accelerate.magics import load_ipython_extension, unload_ipython_extension
    from nb_accelerate.process.memory import find_executable_batch_size
    from nb_accelerate.process.progress import progress
    from nb_accelerate.process.rng import set_seed
    from nb_accelerate.state import PartialState

_HOME = {
    "Accelerator": "accelerator",
    "AutocastKwargs": "config.kwargs",
    "CollectiveMismatchError": "errors",
    "ConfigError": "errors",
    "DDPCommunicationHookType": "config.kwargs",
    "DataLoaderConfiguration": "config.loader",
    "DeadlineError": "errors",
    "DistributedDataParallelKwargs": "config.kwargs",
    "DistributedType": "config.distributed",
    "GradScalerKwargs": "config.kwargs",
    "GradientAccumulationPlugin": "config.accumulation",
    "InitProcessGroupKwargs": "config.kwargs",
    "LaunchError": "errors",
    "MissingDependencyError": "errors",
    "NbAccelerateError": "errors",
    "NotPreparedError": "errors",
    "PartialState": "state",
    "ProfileKwargs": "config.profiling",
    "RankDiedError": "errors",
    "RankError": "errors",
    "RemoteError": "errors",
    "ShippingError": "errors",
    "StartError": "errors",
    "debug_launcher": "launchers",
    "find_executable_batch_size": "process.memory",
    "is_rich_available": "compat.packages",
    "load_checkpoint_in_model": "checkpoint.model",
    "load_ipython_extension": "magics",
    "notebook_launcher": "launch",
    "progress": "process.progress",
    "runs": "display.runs",
    "set_seed": "process.rng",
    "skip_first_batches": "data",
    "synchronize_rng_states": "compat.exchange",
    "unload_ipython_extension": "magics",
}

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "CollectiveMismatchError",
    "ConfigError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeadlineError",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LaunchError",
    "MissingDependencyError",
    "NbAccelerateError",
    "NotPreparedError",
    "PartialState",
    "ProfileKwargs",
    "RankDiedError",
    "RankError",
    "RemoteError",
    "ShippingError",
    "StartError",
    "__version__",
    "debug_launcher",
    "find_executable_batch_size",
    "is_rich_available",
    "load_checkpoint_in_model",
    "load_ipython_extension",
    "notebook_launcher",
    "progress",
    "runs",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
    "unload_ipython_extension",
]


# Modules that are there after ``import nb_accelerate``, as accelerate's are, and imported when they are first used.
_MODULES = frozenset(
    {
        "accelerator",
        "data_loader",
        "launchers",
        "local_sgd",
        "logging",
        "optimizer",
        "scheduler",
        "state",
        "tracking",
        "utils",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _HOME and name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_HOME.get(name, name)}")
        value = getattr(module, name) if name in _HOME else module
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        from nb_accelerate.errors import MissingDependencyError

        raise MissingDependencyError("torch", needed_for=f"{__name__}.{name}") from error
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

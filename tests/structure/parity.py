"""What Hugging Face accelerate has and this package has not, with reasons: ``nb_accelerate/compat/parity.md``.

``python tests/structure/parity.py`` writes it, from the accelerate that is installed for comparison.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "nb_accelerate" / "compat" / "parity.md"
MODULES = (
    "accelerate",
    "accelerate.utils",
    "accelerate.state",
    "accelerate.data_loader",
    "accelerate.optimizer",
    "accelerate.scheduler",
    "accelerate.tracking",
    "accelerate.logging",
    "accelerate.hooks",
    "accelerate.local_sgd",
)

# The first that matches a name, or Class.member, or name(parameter), is its reason.
REASONS = (
    (
        r"megatron|sagemaker|sagemager|msamp|habana|gaudi|hpu|mlu|musa|sdaa|npu(_|$)|neuron|lomo|pippy|TrainStep"
        r"|MULTI_NPU|\bNPU|nvprims|avg_losses_across|pad_input_tensors",
        "Vendors and engines that are out of scope: hardware nobody here can test on, and engines that replace the "
        "training loop.",
    ),
    (r"register_comm_hook", "`prepare` registers the hook that `DistributedDataParallelKwargs(comm_hook=...)` names."),
    (r"deepspeed|GatheredParameters|ulysses", "DeepSpeed: not supported yet."),
    (r"fsdp|FullySharded|get_module_children_bottom_up|ensure_weights_retied", "FSDP: not supported yet."),
    (
        r"ParallelismConfig|parallelism|TensorParallel|ContextParallel|context_parallel|tensor_parallel"
        r"|data_parallel|pipeline_parallel|device_mesh|get_model_tp_size|tp_plugin",
        "Device meshes (tensor, context and pipeline parallelism): not supported yet.",
    ),
    (
        r"fp8|FP8|AORecipe|TERecipe|torchao|convert_model$|has_ao|has_transformer_engine|filter_first_and_last|opt_level",
        "8-bit training: not supported yet.",
    ),
    (r"bnb|Bnb|load_and_quantize", "Quantised weights (bitsandbytes): not supported yet."),
    (
        r"accelerate\.hooks|[oO]ffload|dispatch_model|device_map|init_empty|init_on_device|checkpoint_(and|in)"
        r"|align_module_device|module_sizes|max_layer_size|maximum_sizes|balanced_memory|max_memory|tied|retie"
        r"|PrefixedDataset|set_module_tensor|extract_submodules",
        "Models larger than a device (empty weights, device maps, offloading, hooks): not supported yet.",
    ),
    (
        r"save_state|load_state|save_model|should_save_model|register_|get_state_dict|load_state_dict|state_dict"
        r"|adjust_state",
        "Checkpoints: not supported yet. Loaders made with use_stateful_dataloader=True have `state_dict` and "
        "`load_state_dict` already.",
    ),
    (
        r"prepare_\w+_env|prepare_tpu|install_xla|write_basic_config|PrepareForLaunch|set_numa_affinity",
        "The insides of accelerate's command line and launchers. `nb-accelerate` and `notebook_launcher` are ours.",
    ),
    (r"compile_regions", "`TorchDynamoPlugin(use_regional_compilation=True)` compiles block by block."),
    (
        r"DataLoaderAdapter|DataLoaderStateMixin|DataLoader\w*\.(begin|end|reset|get_sampler|set_sampler)"
        r"|patch_optimizer_step|copy_tensor_to_devices|ThreadLocal|AcceleratedOptimizer\(|AcceleratedScheduler\("
        r"|DataLoader(Shard|Dispatcher)\(|SkipBatchSampler\(|SkipDataLoader\(",
        "How accelerate is built inside: wrappers here are made by `prepare`, and take what they need from it.",
    ),
    (r"CannotPadNestedTensorWarning", "A nested tensor cannot be padded, and here that is an error of torch."),
    (r"XLA|xla", "TPUs: not supported yet."),
    (
        r"AOT_TS|NVPRIMS|NVFUSER|OFI|FX2TRT|TVM|_BACKEND|TORCHXLA|ONNXRT",
        "Compilers that torch no longer has, or that are other packages; `dynamo_backend` takes their names as text.",
    ),
)


def missing() -> Iterator[str]:
    """Yield ``module: name``, ``module: Class.member`` and ``module: name(parameter)`` of what is not here."""
    for path in MODULES:
        module = importlib.import_module(path)
        for name in sorted(_public(module)):
            theirs, ours = getattr(module, name), _ours(path, name)
            if ours is None:
                yield f"{path}: {name}"
            else:
                yield from (f"{path}: {name}{what}" for what in sorted(_lacking(theirs, ours)))


def _public(module: ModuleType) -> Iterator[str]:
    for name, value in vars(module).items():
        theirs = getattr(value, "__module__", None) or ""
        # In a module that is not a package: what is defined there, not what it imports.
        here = theirs.startswith("accelerate") if hasattr(module, "__path__") else theirs == module.__name__
        if not name.startswith("_") and callable(value) and here:
            yield name


def _ours(path: str, name: str) -> Any:
    for place in (path.replace("accelerate", "nb_accelerate", 1), "nb_accelerate", "nb_accelerate.utils"):
        try:
            return getattr(importlib.import_module(place), name)
        except (ImportError, AttributeError):
            continue
    return None


def _lacking(theirs: Any, ours: Any) -> Iterator[str]:
    if isinstance(theirs, type) and issubclass(theirs, enum.Enum):
        yield from (f".{member}" for member in theirs.__members__ if member not in ours.__members__)
        return
    yield from (f"({parameter})" for parameter in _parameters(theirs, ours))
    if not isinstance(theirs, type):
        return
    for base in theirs.__mro__:
        if not base.__module__.startswith("accelerate"):
            continue
        for member, value in vars(base).items():
            if member.startswith("_") or not (callable(value) or isinstance(value, (property, classmethod))):
                continue
            if not hasattr(ours, member):
                yield f".{member}"
            elif inspect.isfunction(value):
                yield from (f".{member}({parameter})" for parameter in _parameters(value, getattr(ours, member)))


def _parameters(theirs: Any, ours: Any) -> list[str]:
    try:
        wanted, have = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
    except (TypeError, ValueError):
        return []
    if any(one.kind is one.VAR_KEYWORD for one in have.values()):
        return []
    starred = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [n for n, one in wanted.items() if one.kind not in starred and not n.startswith("_") and n not in have]


def reason(entry: str) -> str | None:
    return next((text for pattern, text in REASONS if re.search(pattern, entry, re.IGNORECASE)), None)


def page() -> str:
    """The page. Raises LookupError for what has no reason."""
    found: dict[str, list[str]] = {text: [] for _, text in REASONS}
    for entry in dict.fromkeys(missing()):
        text = reason(entry)
        if text is None:
            raise LookupError(f"{entry} is missing, and tests/structure/parity.py has no reason for it")
        found[text].append(entry)
    lines = [
        "# What accelerate has and nb_accelerate has not",
        "",
        "Compared with accelerate 1.15, name by name: functions and classes, members of classes, parameters. Whatever",
        "is not listed here exists, at the same path below `nb_accelerate`. Made by `tests/structure/parity.py`.",
        "",
        "What is there behaves as accelerate's documents say, except for this:",
        "",
        "- Two `Accelerator`s may differ. The second does not take over the mixed precision of the first.",
        "- An unknown or missing tracker is an error, not a line in a log.",
        "- `gather_for_metrics` raises where it cannot know which rows are copies, and never guesses.",
    ]
    for text, entries in found.items():
        if not entries:
            continue
        lines += ["", f"## {text}", ""]
        by_module: dict[str, list[str]] = {}
        for entry in entries:
            module, name = entry.split(": ")
            by_module.setdefault(module, []).append(name)
        lines += [f"- `{module}`: {', '.join(f'`{name}`' for name in names)}" for module, names in by_module.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(page() != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page(), encoding="utf-8")

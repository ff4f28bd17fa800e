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

from nb_accelerate.compat import refused as refused_names
from nb_accelerate.compat.refused import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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

OUT_OF_SCOPE = (
    "Out of scope: hardware nobody here can test on, engines that replace the training loop, and compilers that torch "
    "no longer has (`dynamo_backend` takes other compilers' names as text)."
)

# The first that matches a name, or Class.member, or name(parameter), says why it is not here. The last ones are
# features that bring their names along.
REASONS = (
    (
        r"megatron|sagemaker|sagemager|msamp|habana|gaudi|hpu|mlu|musa|sdaa|npu(_|$)|neuron|lomo|pippy|TrainStep"
        r"|MULTI_NPU|\bNPU|nvprims|avg_losses_across",
        OUT_OF_SCOPE,
    ),
    (r"AOT_TS|NVPRIMS|NVFUSER|OFI|FX2TRT|TVM|_BACKEND|TORCHXLA|ONNXRT", OUT_OF_SCOPE),
    (r"ulysses", "Sequences are not split over ranks (context and sequence parallelism)"),
    (
        r"accelerate\.hooks|[oO]ffload|dispatch_model|device_map|init_empty|init_on_device|checkpoint_(and|in)"
        r"|align_module_device|balanced_memory|max_memory|PrefixedDataset|set_module_tensor",
        "Comes with models larger than a device (empty weights, device maps, offloading, hooks)",
    ),
)
NO_EXCUSE = "Missing without a reason"


SHOWN_IN = ROOT / "tests" / "training" / "accelerator" / "test_differences.py"
DIFFERENCES = {
    "test_a_second_accelerator_may_be_told_another_precision": (
        "A second `Accelerator` takes over precision and compilation from the first, as in accelerate, and "
        "may be told otherwise, which accelerate refuses."
    ),
    "test_an_accelerator_outlives_the_reset_of_states": (
        "`_reset_state()` forgets what states say; an `Accelerator` that was made before goes on working."
    ),
    "test_an_accelerator_cannot_be_pickled_or_copied": (
        "An `Accelerator` cannot be pickled or copied: it would be wrong in any other process, and would not "
        "know what was prepared with it. Prepared objects can."
    ),
    "test_states_are_views_and_cannot_be_set": (
        "States show what is kept elsewhere. What they show cannot be set (`state.distributed_type = ...`), "
        "and one that was pickled shows the process in which it is loaded."
    ),
    "test_attributes_of_an_accelerator_that_count_for_nothing_later_cannot_be_set": (
        "Attributes of an `Accelerator` can be set where that counts for what is prepared afterwards "
        "(`even_batches`, `dataloader_config`, `device_placement`, `step_scheduler_with_optimizer`, "
        "`rng_types`, `ddp_handler`, `profile_handler`, `gradient_accumulation_steps`, `sync_gradients`); "
        "others cannot."
    ),
    "test_options_refuse_what_would_do_nothing": (
        "Option objects check a field when it is set, and refuse names that are no fields."
    ),
    "test_handlers_that_were_not_given_have_their_defaults": (
        "`accelerator.ddp_handler` and its like are never None: handlers that were not given have their "
        "defaults. `InitProcessGroupKwargs()` leaves backend and timeout to torch."
    ),
    "test_a_plugin_without_a_number_takes_that_of_the_environment": (
        "A `GradientAccumulationPlugin` without `num_steps` takes `ACCELERATE_GRADIENT_ACCUMULATION_STEPS`; "
        "accelerate takes 1."
    ),
    "test_schedulers_are_adjusted_unless_it_is_switched_off": (
        "`GradientAccumulationPlugin(adjust_scheduler=True)`, the default, has the effect that accelerate "
        "documents for it."
    ),
    "test_later_arguments_are_given_by_name": (
        "Arguments of `Accelerator` after `dataloader_config`, and of prepared loaders after the dataset, are "
        "given by name."
    ),
    "test_one_process_is_of_distributed_type_no_however_it_was_started": (
        "One process is of type `DistributedType.NO`, and has no process group, also when torchrun started it."
    ),
    "test_prepare_refuses_what_it_does_not_know": (
        "`prepare` refuses what is no model, optimizer, loader or scheduler; accelerate hands it back."
    ),
    "test_ranks_that_share_rows_count_as_one": (
        "Tensor parallelism runs on CPUs too, where accelerate refuses it. `gather`, `reduce`, `gather_for_metrics`, "
        "`split_between_processes` and schedulers count the processes of one group, which read the same rows, as one."
    ),
    "test_backward_on_several_processes_needs_a_prepared_model": (
        "With several processes `backward` is refused until a model was prepared: each would train a copy of its own."
    ),
    "test_fp16_computes_in_float16_on_a_cpu_too": (
        "`mixed_precision='fp16'` computes in float16, with a scaler, on a CPU too; accelerate computes in "
        "float32 there."
    ),
    "test_unseeded_shuffles_have_the_order_of_one_process": (
        "Shuffles without a generator or a seedable sampler have the order that one process would have, on "
        "any number of processes; accelerate's differs where there are several."
    ),
    "test_an_epoch_of_a_skipping_loader_is_one_of_the_loader_it_was_made_of": (
        "An epoch of what `skip_first_batches` returned counts as one of the loader it was made of, so the "
        "next epoch has the next order of a seedable sampler; in accelerate the epoch that was resumed comes "
        "once more."
    ),
    "test_batch_samplers_are_told_the_epoch": (
        "`set_epoch` of a prepared loader, and each new epoch, reach a batch sampler that has a `set_epoch`, on any "
        "number of processes; in accelerate on one."
    ),
    "test_split_batches_are_made_for_each_rank": (
        "With `dispatch_batches=True` and `split_batches=True`, `collate_fn` makes a batch of the rows of each rank, "
        "as where every rank reads; accelerate cuts the batch of all, so that it is padded to the longest of all."
    ),
    "test_a_batch_sampler_that_drops_does_so_where_one_rank_reads": (
        "A batch sampler with `drop_last=True` drops batches that do not fill all ranks, with `dispatch_batches=True` "
        "too; accelerate drops them only where every rank reads, and else cuts them and repeats rows."
    ),
    "test_tensors_in_dataclasses_become_float32": (
        "Outputs of a prepared model that are dataclasses become float32 under mixed precision like tuples and dicts; "
        "accelerate leaves their 16-bit numbers."
    ),
    "test_the_remainder_is_known_at_the_last_batch": (
        "`GradientState.remainder` is -1 until the last batch; accelerate's says from the first what the last "
        "will have."
    ),
    "test_a_prepared_stream_has_a_total_batch_size": (
        "Prepared streams (`IterableDataset`) have a `total_batch_size`; accelerate's raise an AttributeError."
    ),
    "test_reduce_none_gives_back_what_it_was_given": (
        "`reduce(..., reduction='none')` gives back what it was given; accelerate's is the sum."
    ),
    "test_maps_of_devices_keep_room_for_visitors_only": (
        "`infer_auto_device_map` keeps room for the largest offloaded block only where one will visit, so devices take "
        "more of a model; parameters and buffers beside submodules are mapped too, and all parts that ties join."
    ),
    "test_maps_of_devices_with_a_fallback_fill_each_device": (
        "`infer_auto_device_map(..., fallback_allocation=True)` puts all later parts that fit where the next one does "
        "not; accelerate puts one, and only on a device that is empty."
    ),
    "test_a_model_with_numbers_keeps_them_in_a_folder_of_another": (
        "`disk_offload` writes the numbers that a model has, whatever the folder holds; accelerate takes those of an "
        "`index.json` that lies there."
    ),
    "test_a_part_of_offloaded_weights_has_names_of_its_own": (
        "A `PrefixedDataset` iterates over the names that it takes, and counts them; accelerate's iterates over names "
        "of the whole, with which it finds nothing, and counts the whole."
    ),
    "test_quantised_weights_are_on_the_device_that_computes": (
        "`load_and_quantize_model` quantises on CPUs too, where accelerate needs a GPU. Modules of a `device_map` on "
        "the CPU or the disk beside a GPU are not quantised, in 8 bits as in 4; accelerate offloads 8-bit weights."
    ),
    "test_loading_leaves_no_weight_without_numbers": (
        "`load_checkpoint_in_model` refuses a checkpoint that has no numbers for a weight on `meta`, which accelerate "
        'leaves there; it loads buffers on `"disk"` with `offload_buffers=False` too, and needs an `offload_folder` '
        "only where something has to be written."
    ),
    "test_reduce_multiplies_with_scale": (
        "`reduce(..., scale=...)` multiplies on any hardware and any number of processes; accelerate's does "
        "on TPUs only."
    ),
    "test_a_tracker_whose_library_is_missing_is_an_error": (
        "A tracker whose library is missing is an error, not a warning."
    ),
    "test_libraries_that_ask_accelerate_itself_see_one_process_until_it_is_told": (
        "Libraries that ask accelerate itself how many processes there are see one. To tell it, write "
        "`accelerate.PartialState()` after `Accelerator()`, and on CPUs `accelerate.PartialState(cpu=True)`."
    ),
    "test_losses_of_boxes_in_transformers_are_those_of_one_process": (
        "transformers' losses for object detection and instance segmentation ask accelerate, and where it knows of "
        "N processes they divide the number of boxes, or of masks, by N twice: with accelerate the losses of boxes "
        "and masks are N times those of one process. Here accelerate is not told, and they are those of one process, "
        "normalised by the boxes of each rank."
    ),
    "test_words_are_printed_as_their_values": (
        "Enums are printed as their values: `MULTI_CPU`, not `DistributedType.MULTI_CPU`."
    ),
    "test_errors_have_other_texts_and_mostly_the_same_builtin_types": (
        "Errors, warnings and reprs have other texts; the built-in types of errors are mostly the same."
    ),
}


def missing() -> Iterator[str]:
    """Yield ``module: name``, ``module: Class.member`` and ``module: name(parameter)`` of what is not here."""
    return _entries(_lacking)


def listed() -> Iterator[str]:
    """Yield the same of all that accelerate has; of names that are not here, not what is inside of them."""
    return _entries(lambda theirs, _: ["", *_lacking(theirs, None)])


def _entries(inside: Callable[[Any, Any], Iterable[str]]) -> Iterator[str]:
    for path in MODULES:
        module = importlib.import_module(path)
        for name in sorted(_public(module)):
            theirs, ours = getattr(module, name), _ours(path, name)
            if ours is None:
                yield f"{path}: {name}"
            else:
                yield from (f"{path}: {name}{what}" for what in sorted(inside(theirs, ours)))


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
    """Yield members and parameters that ours has not: all of them, if there is none."""
    if ours in refused():
        return
    if isinstance(theirs, type) and issubclass(theirs, enum.Enum):
        yield from (f".{member}" for member in theirs.__members__ if member not in getattr(ours, "__members__", ()))
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
            if inspect.isfunction(value):
                mine = getattr(ours, member, None)
                yield from (f".{member}({parameter})" for parameter in _parameters(value, mine))


def _parameters(theirs: Any, ours: Any) -> list[str]:
    try:
        wanted = inspect.signature(theirs).parameters
        have = inspect.signature(ours).parameters if ours is not None else {}
    except (TypeError, ValueError):
        return []
    if any(one.kind is one.VAR_KEYWORD for one in have.values()):
        return []
    starred = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [n for n, one in wanted.items() if one.kind not in starred and not n.startswith("_") and n != "self"]
    return [name for name in names if name not in have]


def reason(entry: str) -> str:
    """Return why an entry of accelerate is not here, or would not be."""
    return next((text for pattern, text in REASONS if re.search(pattern, entry, re.IGNORECASE)), NO_EXCUSE)


def counted() -> list[str]:
    """Count names, members and parameters that are here: without what later features bring, and with it."""
    lacks = dict.fromkeys(missing())
    scope = [entry for entry in dict.fromkeys([*listed(), *lacks]) if reason(entry) != OUT_OF_SCOPE]
    half = [entry for entry in scope if entry not in lacks or reason(entry) == NO_EXCUSE]
    lines = []
    for what, entries in (("names of this half", half), ("names of all features", scope)):
        here = sum(entry not in lacks for entry in entries)
        lines.append(f"{what}: {here} of {len(entries)}, {100 * here / len(entries):.1f} %, members and parameters too")
    return [*lines, f"names that are here and refuse when they are called: {len(refused())}"]


def refused() -> list[type[Refused]]:
    """Return the names that can be imported, and refuse when they are called."""
    return [getattr(refused_names, name) for name in sorted(refused_names.REASON_OF)]


def page() -> str:
    """The page."""
    found: dict[str, list[str]] = {text: [] for _, text in REASONS} | {NO_EXCUSE: []}
    lacks = dict.fromkeys(missing())
    for entry in lacks:
        if "(" not in entry or entry.split("(")[0] not in lacks:  # a missing method lacks its parameters, of course
            found[reason(entry)].append(entry)
    lines = [
        "# What accelerate has and nb_accelerate has not",
        "",
        "Compared with accelerate 1.15, name by name: functions and classes, members of classes, parameters. Whatever",
        "is not listed here exists, at the same path below `nb_accelerate`. Made by `tests/structure/parity.py`.",
        "",
        "What is there behaves as accelerate's, except for this. The test that is named behind a line, in",
        f"`{SHOWN_IN.relative_to(ROOT)}`, shows it beside accelerate itself.",
        "",
        *(f"- {text} (`{test}`)" for test, text in DIFFERENCES.items()),
        "",
        "Names that are here:",
        "",
        *(f"- {line}" for line in counted()),
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
    lines += ["", "## Names that can be imported, so that a script starts, and refuse when they are called", ""]
    reasons: dict[str, list[str]] = {}
    for name in refused():
        reasons.setdefault(name.reason, []).append(f"`{name.__name__}`")
    lines += [f"- {', '.join(names)}: {why}" for why, names in reasons.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(page() != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page(), encoding="utf-8")
    print("\n".join(counted()))

"""The flags of ``launch`` for scripts: accelerate's names, what each does here, or why it is refused.

Flags can be written with underscores or with dashes. Where a flag is not given, the configuration file decides.
"""

from __future__ import annotations

import contextlib
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator


class Flag(NamedTuple):
    """A flag that is supported."""

    name: str  # with underscores, without the dashes in front
    help: str
    convert: Callable[[str], Any] | None = None  # makes a value of text; None for a flag without a value
    metavar: str = ""
    choices: tuple[str, ...] = ()
    short: str = ""  # a second name of one letter


class FlagGroup(NamedTuple):
    """Flags that stand together in the help."""

    title: str
    flags: tuple[Flag, ...]
    switch: str = ""  # name of the flag without which the others say nothing


_BOOL = ("true", "false")
_DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune")
_FILE_HELP = "what `nb-accelerate config` has written (its --help says where the default file lies)"
_PROCESSES_HELP = "number of processes, on all machines together; one for each GPU by default"
_PRECISION_HELP = "what Accelerator() takes by default: no, fp16, bf16 or fp8 (by torchao)"
_ACCUMULATION_HELP = "batches for one optimizer step: what Accelerator() takes by default"
_MESH_HELP = "lay processes out as a mesh, as these sizes say; their product is the number of processes"

_TO_RUN_ON = (
    Flag("config_file", _FILE_HELP, Path, "FILE"),
    Flag("cpu", "train on the CPU, also where there are GPUs"),
    Flag("multi_gpu", "train on GPUs, one process each; an error where there are none"),
    Flag("gpu_ids", "GPUs of this machine, such as 0,2; all by default", str, "IDS"),
    Flag("num_processes", _PROCESSES_HELP, int, "N", short="n"),
    Flag("num_cpu_threads_per_process", "threads of each process; by default the cores are shared out", int, "N"),
)
_TO_TRAIN = (
    Flag("mixed_precision", _PRECISION_HELP, str.lower, choices=("no", "fp16", "bf16", "fp8")),
    Flag("dynamo_backend", "compile models: inductor, eager ...", str, "NAME"),
    Flag("dynamo_mode", "what torch.compile optimises for", str, choices=_DYNAMO_MODES),
    Flag("dynamo_use_fullgraph", "refuse models that are not one graph"),
    Flag("dynamo_use_dynamic", "compile for shapes that vary"),
    Flag("dynamo_use_regional_compilation", "compile repeated blocks by themselves"),
    Flag("enable_cpu_affinity", "keep each process on the cores near its GPU"),
    Flag("gradient_accumulation_steps", _ACCUMULATION_HELP, int, "N"),
)
_MACHINES = (
    Flag("num_machines", "number of machines", int, "N"),
    Flag("machine_rank", "number of this machine, from 0", int, "K"),
    Flag("main_process_ip", "address of machine 0", str, "ADDRESS"),
    Flag("main_process_port", "port on machine 0", int, "PORT"),
    Flag("rdzv_backend", "how machines find one another: static or c10d", str, choices=("static", "c10d")),
    Flag("rdzv_conf", "seconds to wait, as join_timeout=60", str, "K=V,..."),
    Flag("same_network", "understood, and without effect"),
)
_FSDP = (
    Flag("use_fsdp", "shard models over the processes; also with --cpu"),
    Flag("fsdp_version", "version of FSDP: 2", str, "N"),
    Flag("fsdp_reshard_after_forward", "free gathered parameters after the forward", str.lower, "true|false"),
    Flag("fsdp_offload_params", "keep parameters and gradients in host memory", str.lower, choices=_BOOL),
    Flag("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP", str, "POLICY"),
    Flag("fsdp_transformer_layer_cls_to_wrap", "classes of blocks, as BertLayer,T5Block", str, "NAMES"),
    Flag("fsdp_min_num_params", "parameters of a block with SIZE_BASED_WRAP", int, "N"),
    Flag("fsdp_state_dict_type", "FULL_STATE_DICT or SHARDED_STATE_DICT in checkpoints", str, "TYPE"),
    Flag("fsdp_cpu_ram_efficient_loading", "only rank 0 reads the weights of a model", str.lower, choices=_BOOL),
    Flag("fsdp_activation_checkpointing", "compute activations again in the backward", str.lower, choices=_BOOL),
    Flag("fsdp_activation_checkpointing_offload", "keep inputs of blocks in host memory", str.lower, choices=_BOOL),
    Flag("fsdp_sharding_strategy", "of version 1: FULL_SHARD ...", str, "NAME"),
    Flag("fsdp_backward_prefetch", "of version 1: BACKWARD_PRE ...", str, "NAME"),
    Flag("fsdp_forward_prefetch", "gather the next block during the forward", str.lower, choices=_BOOL),
    Flag("fsdp_use_orig_params", "of version 1: keep parameters as they are", str.lower, choices=_BOOL),
    Flag("fsdp_sync_module_states", "all ranks get the weights of rank 0", str.lower, choices=_BOOL),
)
_MESH = (
    Flag("use_parallelism_config", _MESH_HELP),
    Flag("parallelism_config_dp_replicate_size", "copies of the model", int, "N"),
    Flag("parallelism_config_dp_shard_size", "processes that hold one copy in shards (FSDP)", int, "N"),
    Flag("parallelism_config_tp_size", "processes that share the work on each layer", int, "N"),
    Flag("parallelism_config_cp_size", "processes that share each sequence: 1", int, "N"),
    Flag("parallelism_config_sp_size", "processes that share each sequence in another way: 1", int, "N"),
)
_DEEPSPEED = (
    Flag("use_deepspeed", "train with DeepSpeed; also with --cpu"),
    Flag("deepspeed_config_file", "a JSON configuration of DeepSpeed", Path, "FILE"),
    Flag("zero_stage", "0 shards nothing, 1 the optimizer, 2 gradients too, 3 parameters too", int, "STAGE"),
    Flag("offload_optimizer_device", "where optimizer states are: none, cpu or nvme", str, "DEVICE"),
    Flag("offload_param_device", "where parameters are with stage 3: none, cpu or nvme", str, "DEVICE"),
    Flag("offload_optimizer_nvme_path", "folder for optimizer states on nvme", str, "PATH"),
    Flag("offload_param_nvme_path", "folder for parameters on nvme", str, "PATH"),
    Flag("gradient_clipping", "largest norm of all gradients", float, "NORM"),
    Flag("zero3_init_flag", "shard models of stage 3 while they are built", str.lower, choices=_BOOL),
    Flag("zero3_save_16bit_model", "save models of stage 3 in 16 bits", str.lower, choices=_BOOL),
    Flag("deepspeed_moe_layer_cls_names", "classes of mixture-of-experts blocks", str, "NAMES"),
)
_TPU = (
    Flag("tpu", "train on the TPU of this machine, one process for each chip"),
    Flag("downcast_bf16", "with bf16: keep weights in 16 bits too, and torch.double in 32"),
    Flag("main_training_function", "understood, and without effect", str, "NAME"),
)
_TO_RUN = (
    Flag("module", "the target is a module, as with python -m", short="m"),
    Flag("no_python", "the target is a program of any kind"),
    Flag("max_restarts", "after a failure, start all again, so often", int, "N"),
    Flag("monitor_interval", "seconds between two looks at what several machines have told", float, "SECONDS"),
    Flag("debug", "check what processes hand to each collective"),
    Flag("quiet", "show the script's output and nothing else", short="q"),
    Flag("timeout", "seconds after which the launch is ended", float, "S"),
    Flag("rehearse", "run the script as processes of many on this CPU, each alone, and say where they part"),
    Flag("rehearse_device", "whether a process of --rehearse fits this accelerator: T4, A100 ...", str, "NAME"),
    Flag("rehearse_memory", "the memory of the accelerator, if its name is not known", str, "24GB"),
)

HOW_TO_RUN = "how to run"  # title of the flags that say what to do with a script

GROUPS = (
    FlagGroup("what to run on", _TO_RUN_ON),
    FlagGroup("how to train", _TO_TRAIN),
    FlagGroup("several machines", _MACHINES),
    FlagGroup("sharded models (FSDP)", _FSDP, "use_fsdp"),
    FlagGroup("several kinds of parallelism", _MESH, "use_parallelism_config"),
    FlagGroup("DeepSpeed", _DEEPSPEED, "use_deepspeed"),
    FlagGroup("TPU", _TPU, "tpu"),
    FlagGroup(HOW_TO_RUN, _TO_RUN),
)

# Patterns of flags of accelerate and torchrun that are none here, and why. A flag in `GROUPS` is none of them.
REFUSED = {
    "vm env aws_access_key_id aws_secret_access_key mpirun_hostfile tpu_cluster no_tpu_cluster tpu_use_sudo": (
        "This command starts processes on machines where it runs itself, and on no others"
    ),
    "tee t log_dir": "The output of all processes is shown here; to keep it as well: ... 2>&1 | tee FILE",
    "role": "Processes have no roles here",
    "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher": (
        "DeepSpeed's own ways to other machines are not used here: start this command on each machine"
    ),
    "use_megatron_lm megatron_lm_*": "Megatron-LM brings a launcher of its own",
    "standalone": "A launch is on one machine unless --num_machines says otherwise: leave it out",
    "fp8_*": "How layers compute in 8 bits is said in code. Write AORecipeKwargs in kwargs_handlers",
    "parallelism_config_cp_* parallelism_config_sp_*": "Context and sequence parallelism are not in this version",
}


def add_flags(parser: argparse.ArgumentParser, *, without: str = "") -> None:
    """Add all flags to a parser, in groups. `without`: title of a group to leave out."""
    for title, flags, _ in GROUPS:
        if title == without:
            continue
        group = parser.add_argument_group(title)
        for flag in flags:
            how: dict[str, Any] = {"action": "store_true", "default": None}
            if flag.convert is not None:
                how = {"type": flag.convert, "choices": flag.choices or None, "metavar": flag.metavar or None}
            short = [f"-{flag.short}"] if flag.short else []
            names = dict.fromkeys((f"--{flag.name}", f"--{flag.name.replace('_', '-')}"))
            action = group.add_argument(*short, *names, dest=flag.name, help=flag.help, **how)
            action.option_strings = [*short, f"--{flag.name}"]  # one of the two spellings is enough for the help


def why_refused(flag: str) -> str:
    """Return why a flag of accelerate is none here; "" if it is no such flag."""
    name = flag.lstrip("-").replace("-", "_")
    return next((why for names, why in REFUSED.items() if any(fnmatch(name, known) for known in names.split())), "")


# Flags that are called otherwise than the option of `notebook_launcher`.
_FLAGS = {
    "num_nodes": "--num_machines",
    "node_rank": "--machine_rank",
    "master_addr": "--main_process_ip",
    "rdzv_endpoint": "--main_process_ip",
    "use_port": "--main_process_port",
    "devices": "--cpu, --tpu or --gpu_ids",
    "device": "--rehearse_device",
    "memory": "--rehearse_memory",
}


@contextlib.contextmanager
def errors_in_flags() -> Iterator[None]:
    """Add flags to errors about options of a launch."""
    try:
        yield
    except ConfigError as error:
        flags = [f"{_FLAGS[option]} for {option}" for option in error.options if option in _FLAGS]
        if not flags:
            raise
        raise ConfigError(f"{str(error).rstrip('.')}. Here write {'; '.join(flags)}.") from None

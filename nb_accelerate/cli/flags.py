"""The flags of ``launch`` for scripts: accelerate's names, what each does here, or why it is refused.

Flags can be written with underscores or with dashes. Where a flag is not given, the configuration file decides.
"""

from __future__ import annotations

import argparse
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Flag:
    """A flag that is supported.

    Attributes:
        name: with underscores, without the dashes in front.
        convert: makes a value of text; None for a flag without a value.
        short: a second name of one letter, or "".
        differs: how it differs from accelerate's flag of this name; "" if it does not.
        needs: name of the switch without which it says nothing; "" if there is none.
        is_ours: accelerate has no such flag.
    """

    name: str
    help: str
    convert: Callable[[str], Any] | None = None
    metavar: str = ""
    _: KW_ONLY
    choices: tuple[str, ...] = ()
    short: str = ""
    differs: str = ""
    needs: str = ""
    is_ours: bool = False


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Flags of accelerate that are recognised and refused.

    Attributes:
        switches: names of flags without a value.
        valued: names of flags with one.
    """

    reason: str
    switches: str = ""
    valued: str = ""


def _machines(text: str) -> tuple[int, int]:
    """Return the fewest and the most machines: ``2`` or ``1:2``."""
    fewest, _, most = text.partition(":")
    if not fewest.isdecimal() or not (most or fewest).isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number, such as 2, nor a range, such as 1:2")
    return int(fewest), int(most or fewest)


def _yes_or_no(text: str) -> str:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower()


def _flags_of(needs: str, *rows: tuple[str, Callable[[str], Any], str, str]) -> tuple[Flag, ...]:
    """Return flags that say something to one engine: name, conversion, what stands for the value, and help of each."""
    return tuple(Flag(name, text, convert, metavar, needs=needs) for name, convert, metavar, text in rows)


_BOOL = "true|false"

_ENGINES: tuple[tuple[str, tuple[Flag, ...]], ...] = (
    (
        "sharded models (FSDP)",
        (
            Flag(
                "use_fsdp",
                "shard models over the processes; also with --cpu",
                differs="with --cpu too, where accelerate trains without FSDP",
            ),
            Flag("fsdp_version", "version of FSDP: 2", str, "N", needs="use_fsdp", differs="2 by default, not 1"),
            *_flags_of(
                "use_fsdp",
                ("fsdp_reshard_after_forward", str.lower, _BOOL, "free gathered parameters after the forward"),
                ("fsdp_offload_params", _yes_or_no, _BOOL, "keep parameters and gradients in host memory"),
                ("fsdp_auto_wrap_policy", str, "POLICY", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP"),
                ("fsdp_transformer_layer_cls_to_wrap", str, "NAMES", "classes of blocks, as BertLayer,T5Block"),
                ("fsdp_min_num_params", int, "N", "parameters of a block with SIZE_BASED_WRAP"),
                ("fsdp_state_dict_type", str, "TYPE", "FULL_STATE_DICT or SHARDED_STATE_DICT in checkpoints"),
                ("fsdp_cpu_ram_efficient_loading", _yes_or_no, _BOOL, "only rank 0 reads the weights of a model"),
                ("fsdp_activation_checkpointing", _yes_or_no, _BOOL, "compute activations again in the backward"),
                ("fsdp_activation_checkpointing_offload", _yes_or_no, _BOOL, "keep inputs of blocks in host memory"),
                ("fsdp_sharding_strategy", str, "NAME", "of version 1: FULL_SHARD ..."),
                ("fsdp_backward_prefetch", str, "NAME", "of version 1: BACKWARD_PRE ..."),
                ("fsdp_forward_prefetch", _yes_or_no, _BOOL, "gather the next block during the forward"),
                ("fsdp_use_orig_params", _yes_or_no, _BOOL, "of version 1: keep parameters as they are"),
                ("fsdp_sync_module_states", _yes_or_no, _BOOL, "all ranks get the weights of rank 0"),
            ),
        ),
    ),
    (
        "several kinds of parallelism",
        (
            Flag(
                "use_parallelism_config",
                "lay processes out as a mesh, as these sizes say; their product is the number of processes",
                differs="without --use_fsdp too: sizes above 1 ask for what they need",
            ),
            *_flags_of(
                "use_parallelism_config",
                ("parallelism_config_dp_replicate_size", int, "N", "copies of the model"),
                ("parallelism_config_dp_shard_size", int, "N", "processes that hold one copy in shards (FSDP)"),
                ("parallelism_config_tp_size", int, "N", "processes that share the work on each layer"),
                ("parallelism_config_cp_size", int, "N", "processes that share each sequence: 1"),
                ("parallelism_config_sp_size", int, "N", "processes that share each sequence in another way: 1"),
            ),
        ),
    ),
    (
        "DeepSpeed",
        (
            Flag(
                "use_deepspeed",
                "train with DeepSpeed; also with --cpu",
                differs="with --cpu too; on several machines this command is started on each",
            ),
            *_flags_of(
                "use_deepspeed",
                ("deepspeed_config_file", Path, "FILE", "a JSON configuration of DeepSpeed"),
                (
                    "zero_stage",
                    int,
                    "STAGE",
                    "0 shards nothing, 1 the optimizer, 2 gradients too, 3 parameters too",
                ),
                ("offload_optimizer_device", str, "DEVICE", "where optimizer states are: none, cpu or nvme"),
                ("offload_param_device", str, "DEVICE", "where parameters are with stage 3: none, cpu or nvme"),
                ("offload_optimizer_nvme_path", str, "PATH", "folder for optimizer states on nvme"),
                ("offload_param_nvme_path", str, "PATH", "folder for parameters on nvme"),
                ("gradient_clipping", float, "NORM", "largest norm of all gradients"),
                ("zero3_init_flag", _yes_or_no, _BOOL, "shard models of stage 3 while they are built"),
                ("zero3_save_16bit_model", _yes_or_no, _BOOL, "save models of stage 3 in 16 bits"),
                ("deepspeed_moe_layer_cls_names", str, "NAMES", "classes of mixture-of-experts blocks"),
            ),
        ),
    ),
    (
        "TPU",
        (
            Flag("tpu", "train on the TPU of this machine, one process for each chip"),
            Flag("downcast_bf16", "with bf16: keep weights in 16 bits too, and torch.double in 32", needs="tpu"),
            Flag(
                "main_training_function",
                "understood, and without effect",
                str,
                "NAME",
                needs="tpu",
                differs="it has no effect: every process runs the whole script",
            ),
        ),
    ),
)

GROUPS: tuple[tuple[str, tuple[Flag, ...]], ...] = (
    (
        "what to run on",
        (
            Flag(
                "config_file",
                "what `nb-accelerate config` has written (its --help says where the default file lies)",
                Path,
                "FILE",
            ),
            Flag("cpu", "train on the CPU, also where there are GPUs"),
            Flag(
                "multi_gpu",
                "train on GPUs, one process each; an error where there are none",
                differs="one GPU is enough",
            ),
            Flag("gpu_ids", "GPUs of this machine, such as 0,2; all by default", str, "IDS"),
            Flag(
                "num_processes",
                "number of processes, on all machines together; one for each GPU by default",
                int,
                "N",
                short="n",
            ),
            Flag(
                "num_cpu_threads_per_process",
                "threads of each process; by default the cores are shared out",
                int,
                "N",
                differs="without it the cores are shared out, where accelerate sets one thread",
            ),
        ),
    ),
    (
        "how to train",
        (
            Flag(
                "mixed_precision",
                "what Accelerator() takes by default: no, fp16, bf16 or fp8 (by torchao)",
                str.lower,
                choices=("no", "fp16", "bf16", "fp8"),
            ),
            Flag("dynamo_backend", "compile models: inductor, eager ...", str, "NAME"),
            Flag(
                "dynamo_mode",
                "what torch.compile optimises for",
                str,
                choices=("default", "reduce-overhead", "max-autotune"),
            ),
            Flag("dynamo_use_fullgraph", "refuse models that are not one graph"),
            Flag("dynamo_use_dynamic", "compile for shapes that vary"),
            Flag("dynamo_use_regional_compilation", "compile repeated blocks by themselves"),
            Flag("enable_cpu_affinity", "keep each process on the cores near its GPU"),
            Flag(
                "gradient_accumulation_steps",
                "batches for one optimizer step: what Accelerator() takes by default",
                int,
                "N",
                differs="it counts with every setup, not with DeepSpeed alone",
            ),
        ),
    ),
    (
        "several machines",
        (
            Flag(
                "num_machines",
                "number of machines; with c10d also a range, such as 1:4: as many as there are, also later",
                _machines,
                "N",
                differs="a range too, as torchrun's --nnodes 1:4",
            ),
            Flag("machine_rank", "number of this machine, from 0", int, "K"),
            Flag("main_process_ip", "address of machine 0", str, "ADDRESS"),
            Flag("main_process_port", "port on machine 0", int, "PORT"),
            Flag(
                "rdzv_backend",
                "how machines find one another: static or c10d",
                str,
                choices=("static", "c10d"),
                differs="etcd is refused",
            ),
            Flag("rdzv_conf", "seconds to wait, as join_timeout=60,last_call_timeout=5", str, "K=V,..."),
            Flag("same_network", "understood, and without effect", differs="it has no effect"),
        ),
    ),
    *_ENGINES,
    (
        "how to run",
        (
            Flag("module", "the target is a module, as with python -m", short="m"),
            Flag("no_python", "the target is a program of any kind"),
            Flag("max_restarts", "after a failure, start all again, so often", int, "N"),
            Flag(
                "monitor_interval",
                "seconds between two looks for processes that were stopped (SIGSTOP)",
                float,
                "SECONDS",
                differs="failures are events here and need no interval",
            ),
            Flag(
                "debug",
                "check what processes hand to each collective",
                differs="errors show the stacks of all processes without it",
            ),
            Flag(
                "quiet",
                "show the script's output and nothing else",
                short="q",
                differs="it also hides the progress of the processes",
            ),
            Flag("timeout", "seconds after which the launch is ended", float, is_ours=True, metavar="S"),
            Flag("dry_run", "print commands and environments, and start nothing", is_ours=True),
        ),
    ),
)

REFUSED = (
    Refused(
        reason="This command starts processes on machines where it runs itself, and on no others",
        switches="tpu_cluster no_tpu_cluster tpu_use_sudo",
        valued="vm env aws_access_key_id aws_secret_access_key mpirun_hostfile",
    ),
    Refused(
        reason="The output of all processes is shown here; to keep it as well: ... 2>&1 | tee FILE",
        valued="tee log_dir",
    ),
    Refused(reason="Processes have no roles here", valued="role"),
    Refused(
        reason="DeepSpeed's own ways to other machines are not used here: start this command on each machine",
        valued="deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher",
    ),
    Refused(
        reason="Megatron-LM brings a launcher of its own",
        switches="use_megatron_lm",
        valued="megatron_lm_tp_degree megatron_lm_use_custom_fsdp megatron_lm_no_load_optim megatron_lm_eod_mask_loss "
        "megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_no_save_optim megatron_lm_optimizer_cpu_offload "
        "megatron_lm_use_precision_aware_optimizer megatron_lm_decoder_last_pipeline_num_layers megatron_lm_pp_degree "
        "megatron_lm_num_micro_batches megatron_lm_sequence_parallelism megatron_lm_recompute_activations "
        "megatron_lm_use_distributed_optimizer megatron_lm_gradient_clipping megatron_lm_recompute_granularity "
        "megatron_lm_recompute_method megatron_lm_recompute_num_layers megatron_lm_attention_backend "
        "megatron_lm_expert_model_parallel_size megatron_lm_context_parallel_size megatron_lm_attention_dropout "
        "megatron_lm_hidden_dropout megatron_lm_attention_softmax_in_fp32 megatron_lm_expert_tensor_parallel_size "
        "megatron_lm_calculate_per_token_loss megatron_lm_use_rotary_position_embeddings",
    ),
    Refused(
        reason="How layers compute in 8 bits is said in code. Write AORecipeKwargs in kwargs_handlers",
        switches="fp8_use_autocast_during_eval",
        valued="fp8_backend fp8_margin fp8_interval fp8_format fp8_amax_history_len fp8_amax_compute_algo "
        "fp8_override_linear_precision fp8_opt_level fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim",
    ),
    Refused(
        reason="Context and sequence parallelism are not in this version",
        valued="parallelism_config_cp_backend parallelism_config_cp_comm_strategy parallelism_config_sp_backend "
        "parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable "
        "parallelism_config_sp_attn_implementation",
    ),
)


def add_flags(parser: argparse.ArgumentParser, *, without: str = "") -> None:
    """Add all flags to a parser, in groups; those that are refused are not in its help.

    Args:
        without: title of a group to leave out.
    """
    for title, flags in GROUPS:
        if title == without:
            continue
        group = parser.add_argument_group(title)
        for flag in flags:
            names = [f"-{flag.short}"] if flag.short else []
            if flag.convert is None:
                _add(group, flag.name, names, action="store_true", default=None, help=flag.help)
            else:
                choices: Sequence[str] | None = flag.choices or None
                metavar = flag.metavar or None
                _add(group, flag.name, names, type=flag.convert, choices=choices, metavar=metavar, help=flag.help)
    for refused in REFUSED:
        for name in refused.switches.split():
            _add(parser, name, [], action=_Refuse, nargs=0, reason=refused.reason)
        for name in refused.valued.split():
            _add(parser, name, ["-t"] if name == "tee" else [], action=_Refuse, reason=refused.reason)


def _add(group: argparse._ActionsContainer, name: str, short: list[str], **how: Any) -> None:
    action = group.add_argument(*short, *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **how)
    action.option_strings = [*short, f"--{name}"]  # one of the two ways to write it is enough for the help


class _Refuse(argparse.Action):
    """End the command with the reason why a flag is refused."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, reason: str, nargs: int | None = None) -> None:
        super().__init__(option_strings, dest, nargs=nargs, help=argparse.SUPPRESS)
        self.reason = reason

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse calls every action alike
        namespace: argparse.Namespace,  # noqa: ARG002
        values: Any,  # noqa: ARG002
        option: str | None = None,
    ) -> None:
        """Refuse."""
        raise ConfigError(f"{option}: {self.reason}.")

"""What has to do with FSDP: `nb-accelerate merge-weights` and `to-fsdp2`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

# Keys of version 1 that version 2 does not have, and why.
_REMOVED = {
    "fsdp_backward_prefetch": "version 2 prefetches by itself",
    "fsdp_forward_prefetch": "version 2 has no such option in a file",
    "fsdp_sync_module_states": "version 2 loads full weights on one rank with fsdp_cpu_ram_efficient_loading",
    "fsdp_use_orig_params": "version 2 always keeps the original parameters",
}

# The numbers that older files have for them: those of ``torch.distributed.fsdp.ShardingStrategy``.
_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to the command line."""
    parser = subparsers.add_parser(
        "merge-weights",
        help="make one file of the weights of a sharded checkpoint",
        description="Read the weights of a model from a folder that sharded training has written "
        "(torch.distributed.checkpoint), or from several safetensors files with an index, and write them into one "
        "file. All weights are in memory at once. Code in a checkpoint is not run.",
    )
    parser.add_argument("checkpoint_directory", type=Path, metavar="FOLDER", help="the sharded checkpoint")
    parser.add_argument("output_path", type=Path, metavar="OUTPUT", help="folder for model.safetensors")
    parser.add_argument(
        "--unsafe_serialization",
        "--unsafe-serialization",
        action="store_true",
        help="write pytorch_model.bin instead of model.safetensors",
    )
    parser.add_argument(
        "--remove_checkpoint_dir",
        "--remove-checkpoint-dir",
        action="store_true",
        help="remove the sharded checkpoint when the file is written",
    )
    parser.set_defaults(run=_merge_weights)
    parser = subparsers.add_parser(
        "to-fsdp2",
        help="convert a configuration file from FSDP to FSDP2",
        description="Write a configuration file with the names that version 2 of FSDP has, and fsdp_version: 2. Keys "
        "that version 2 does not have are left out, each with a line that says why. All other keys are kept.",
    )
    parser.add_argument("--config_file", "--config-file", type=Path, required=True, metavar="FILE", help="file to read")
    parser.add_argument("--output_file", "--output-file", type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the file that is there")
    parser.set_defaults(run=_to_fsdp2)


def _merge_weights(arguments: argparse.Namespace) -> int:
    import shutil

    from nb_accelerate.errors import ConfigError
    from nb_accelerate.training.checkpoint.sharded import merge_weights

    folder, output = arguments.checkpoint_directory, arguments.output_path
    if arguments.remove_checkpoint_dir and output.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"--remove_checkpoint_dir would remove {output} too, which lies in {folder}. Write to another folder."
        )
    print(merge_weights(folder, output, safe_serialization=not arguments.unsafe_serialization))
    if arguments.remove_checkpoint_dir:
        shutil.rmtree(folder)
    return 0


def _to_fsdp2(arguments: argparse.Namespace) -> int:
    import sys

    from nb_accelerate.base.config.file import read_config, write_config
    from nb_accelerate.errors import ConfigError

    config = read_config(arguments.config_file)
    assert config is not None  # a file that was named is there, or reading it is an error
    target = arguments.output_file or arguments.config_file
    if not arguments.overwrite and (arguments.output_file is None or target.exists()):
        how = "Write --output_file FILE" if arguments.output_file is None else f"{str(target)!r} is there already"
        raise ConfigError(f"to-fsdp2 replaces no file unless it is told to. {how}, or add --overwrite.")
    section = config.section("fsdp_config")
    if not section:
        raise ConfigError(f"{str(config.path)!r} has no fsdp_config, so there is nothing to convert.")
    if str(section.get("fsdp_version")) == "2":
        print(f"{config.path} is for version 2 already")
        return 0
    converted, left_out = convert(section)
    for key, why in left_out.items():
        print(f"{key} is left out: {why}", file=sys.stderr)
    print(write_config({**config.values, "fsdp_config": converted}, target))
    return 0


def convert(section: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the ``fsdp_config`` of version 2 for one of version 1, and why keys were left out, by key."""
    from nb_accelerate.base.config.fsdp import RESHARDS

    converted: dict[str, Any] = {}
    for key, value in section.items():
        if key in {"fsdp_sharding_strategy", "fsdp_reshard_after_forward"}:
            name = _NUMBERED.get(str(value), value)
            converted["fsdp_reshard_after_forward"] = {**RESHARDS, "NO_SHARD": False}.get(name, name)
        elif key not in _REMOVED:
            converted[key] = value
    return {**converted, "fsdp_version": 2}, {key: why for key, why in _REMOVED.items() if key in section}

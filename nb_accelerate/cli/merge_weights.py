"""`nb-accelerate merge-weights`: make one file of the weights of a sharded checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `merge-weights` to the command line."""
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
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
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

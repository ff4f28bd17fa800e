"""Merge the weights of a model that lie in many files into one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.files import load_state_dict
from nb_accelerate.training.checkpoint.model import weight_files, write_model
from nb_accelerate.training.checkpoint.names import METADATA_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from nb_accelerate.training.checkpoint.sharded import ShardReader, entries_of, read_into

if TYPE_CHECKING:
    import os

    from torch import Tensor

_ONE_FILE = 2**62
"""Bytes that no model has, so that its weights go to one file."""


def merge_weights(
    checkpoint_dir: str | os.PathLike[str], output_path: str | os.PathLike[str], *, safe_serialization: bool = True
) -> Path:
    """Write the weights of a sharded checkpoint into one file, and return its path.

    All weights are in memory at once, on the CPU.

    Args:
        checkpoint_dir: a folder of `torch.distributed.checkpoint`, as sharded training writes it, or one with an index
            and several safetensors or ``.bin`` files.
        output_path: the folder to write to; made if it is not there.
        safe_serialization: write ``model.safetensors``; False writes ``pytorch_model.bin``.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it would run code when it is read.
    """
    folder = Path(checkpoint_dir).expanduser()
    if (folder / METADATA_NAME).is_file():
        tensors = _distributed_weights(folder)
    else:
        inside = sorted(file.parent for file in folder.glob(f"*/{METADATA_NAME}"))
        if inside:
            raise CheckpointError(
                f"{folder} holds several checkpoints: {', '.join(part.name for part in inside)}. Give the folder of "
                f"the model, {inside[0]} say."
            )
        tensors = {}
        for file in weight_files(folder):
            tensors |= load_state_dict(file)
    write_model(tensors, output_path, max_shard_size=_ONE_FILE, safe_serialization=safe_serialization)
    return Path(output_path).expanduser() / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)


def _distributed_weights(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder of `torch.distributed.checkpoint`; those of ``"model"`` if it has such a part."""
    reader = ShardReader(folder)
    entries = [entry for entry in entries_of(reader) if isinstance(entry[2], TensorStorageMetadata)]
    if not entries:
        raise CheckpointError(f"The checkpoint in {folder} holds no tensors.")
    of_model = [entry for entry in entries if entry[0][0] == "model" and len(entry[0]) > 1]
    names = {name: ".".join(map(str, path[1:] if of_model else path)) for path, name, _ in of_model or entries}
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for _, name, entry in entries
        if name in names
    }
    read_into(reader, tensors)
    return {names[name]: tensor for name, tensor in tensors.items()}

"""Weights in a folder of accelerate's format: a file ``NAME.dat`` with the numbers of each, and ``index.json`` of all.

A ``.dat`` file holds a contiguous tensor and nothing else; dtype and shape are in the index. An index may also name
safetensors files, which transformers makes of checkpoints.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.bigmodel.mapped import WeightFiles
from nb_accelerate.training.bigmodel.tensors import set_module_tensor_to_device

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

    PathLike = str | os.PathLike[str]


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: PathLike, index: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Write a weight to ``offload_folder/weight_name.dat``.

    Args:
        weight: on any device but ``meta``.
        weight_name: its full name in the model.
        offload_folder: one that exists. A weight of that name there is replaced; tensors that `load_offloaded_weight`
            made of it keep their numbers.
        index: gets a row with dtype and shape. `save_offload_index` writes it.

    Returns:
        The index.

    Raises:
        CheckpointError: the disk has too little space for it, which is found out before, or fails.
    """
    folder = Path(offload_folder)
    _check_space_beside(folder, {weight_name: weight})
    file = folder / f"{weight_name}.dat"
    # An empty weight is one byte, as by numpy.memmap, because nothing cannot be mapped.
    numbers: Any = weight.detach().cpu().reshape(-1).view(torch.uint8).numpy() if weight.numel() else b"\0"
    try:
        file.unlink(missing_ok=True)  # who has mapped it keeps what it was
        file.write_bytes(numbers)
    except OSError as error:
        raise CheckpointError(f"{file} could not be written: {error.strerror}") from error
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def offload_state_dict(save_dir: PathLike, state_dict: Mapping[str, Tensor]) -> None:
    """Write weights to a folder, which is made, beside weights that are there.

    Args:
        save_dir: the folder.
        state_dict: tensors by name.

    Raises:
        CheckpointError: the disk has too little space for all of them, which is found out before, or fails.
    """
    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _check_space_beside(folder, state_dict)
    index: dict[str, Any] = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, folder, index=index)
    save_offload_index(index, folder)


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: PathLike) -> None:
    """Write the rows of an index to ``index.json``, beside the rows of other weights that are there.

    Args:
        index: made by `offload_weight`. Nothing is written if it is empty.
        offload_folder: the folder of the weights.

    Raises:
        CheckpointError: the index that is there is damaged.
    """
    file = Path(offload_folder) / "index.json"
    if index:
        before = _read_index(file) if file.is_file() else {}
        file.write_text(json.dumps({**before, **index}, indent=2), encoding="utf-8")


def load_offloaded_weight(weight_file: PathLike, weight_info: Mapping[str, Any]) -> Tensor:
    """Return a weight that `offload_weight` wrote.

    It is mapped, not read: its numbers come into memory when they are used. Changes of them stay in memory.

    Args:
        weight_file: its ``.dat`` file.
        weight_info: its row in the index, with dtype and shape.

    Raises:
        CheckpointError: the file is missing or damaged, or the row does not describe it.
    """
    try:
        dtype, shape = getattr(torch, weight_info["dtype"]), torch.Size(weight_info["shape"])
        nbytes = math.prod(shape) * dtype.itemsize
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"The index has no dtype and shape for {weight_file}, but {weight_info!r}.") from error
    try:
        size = Path(weight_file).stat().st_size
    except OSError as error:
        raise CheckpointError(f"{weight_file} cannot be read: {error.strerror}") from error
    if size != max(nbytes, 1):
        raise CheckpointError(
            f"{weight_file} has {size} bytes, and a weight of shape {tuple(shape)} and {dtype} has {nbytes}: the file "
            "was cut off, or belongs to another index. Write the weights again."
        )
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_file(str(weight_file), shared=False, size=nbytes, dtype=torch.uint8).view(dtype).view(shape)


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any] | None, offload_folder: PathLike) -> None:
    """Load weights of a folder that `offload_state_dict` wrote into a model, on the CPU.

    Args:
        model: gets new parameters for the names in the index.
        index: rows by name. The scales (``SCB``) of weights in 8 bits are not loaded for themselves.
        offload_folder: the folder of the weights.

    Raises:
        CheckpointError: a file is missing or damaged.
        ConfigError: the model has no such weight, or of another shape.
    """
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index or {})
    for name in weights:
        if not name.endswith("SCB"):
            scales = weights.get(f"{name.removesuffix('weight')}SCB") if name.endswith("weight") else None
            set_module_tensor_to_device(model, name, "cpu", value=weights[name], fp16_statistics=scales)


class PrefixedDataset(Mapping[str, "Tensor"]):
    """Show those weights of a mapping whose names begin with a prefix, by the rest of their names.

    Args:
        dataset: weights by name.
        prefix: of names in ``dataset``, with the dot: ``"layers.0."``.
    """

    def __init__(self, dataset: Mapping[str, Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    @override
    def __getitem__(self, key: str) -> Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    @override
    def __iter__(self) -> Iterator[str]:
        return (key.removeprefix(self.prefix) for key in self.dataset if key.startswith(self.prefix))

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, "Tensor"]):
    """Find weights by name: in memory, or in files, which are mapped when a weight of theirs is first asked for.

    Examples:
        ```python
        offload_state_dict("folder", model.state_dict())
        weights = OffloadedWeightsLoader(save_folder="folder")
        weights["layer.weight"]
        ```

    Args:
        state_dict: weights in memory. They come before those of files.
        save_folder: a folder that `offload_state_dict` wrote.
        index: what is in files. A row has dtype and shape of a ``.dat`` file in ``save_folder``; or it has a
            ``safetensors_file``, with ``weight_name`` and ``dtype`` if they are others than in that file. By default
            the index of ``save_folder``.
        device: where weights of safetensors files go, by default to the CPU. There they are views of the file.

    Raises:
        ConfigError: all of the first three are None.
        CheckpointError: there is no index in ``save_folder``, or it is damaged; later, that a file is.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: PathLike | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigError("Where weights are has to be said. Give a state_dict, a save_folder or an index.")
        if index is None and save_folder is not None:
            index = _read_index(Path(save_folder) / "index.json")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self.index = {} if index is None else index
        self.all_keys = list({**dict.fromkeys(self.state_dict), **dict.fromkeys(self.index)})
        self.device = device
        self._files: dict[str, WeightFiles] = {}

    @override
    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        row = self.index[key]
        if row.get("safetensors_file") is not None:
            return self._from_safetensors(key, row)
        if self.save_folder is None:
            raise ConfigError(f"{key} is in a .dat file by the index. Give the folder of that file as save_folder.")
        return load_offloaded_weight(Path(self.save_folder) / f"{key}.dat", row)

    def _from_safetensors(self, key: str, row: Mapping[str, Any]) -> Tensor:
        file, name = str(row["safetensors_file"]), row.get("weight_name", key)
        if file not in self._files:
            self._files[file] = WeightFiles([Path(file)])
        weights = self._files[file]
        if name not in weights:
            raise CheckpointError(f"{file} has no weight {name}, which the index says.")
        weights.check([name])
        dtype = getattr(torch, row["dtype"]) if "dtype" in row else None
        return weights[name].to(device=self.device, dtype=dtype)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    @override
    def __len__(self) -> int:
        return len(self.all_keys)


def _read_index(file: Path) -> dict[str, Any]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}, the index of offloaded weights, cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged, it may have been cut off: {error}") from error
    if not isinstance(index, dict) or not all(isinstance(row, dict) for row in index.values()):
        raise CheckpointError(f"{file} is not an index of offloaded weights: a row with dtype and shape for each name.")
    return index


def _check_space_beside(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Check that there is space for weights. Files that they replace leave theirs."""
    files: Iterable[Path] = (folder / f"{name}.dat" for name in weights)
    replaced = sum(file.stat().st_size for file in files if file.is_file())
    check_space(folder, sum(weight.nbytes for weight in weights.values()) - replaced)


def check_space(folder: Path, needed: int) -> None:
    """Check that a disk has space for weights, before anything is written."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"The weights take {needed / 1e9:.3g} GB in {folder}, and its disk has {free / 1e9:.3g} GB free. Nothing "
            "was written. Give a folder on another disk; or load the model from safetensors files in the dtype that "
            "they have, which are used where they are."
        )

"""Find where weights rest that a device map has on the disk: in files that are there, or that are written here."""

from __future__ import annotations

import contextlib
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.bigmodel.mapped import WeightFiles, files_of
from nb_accelerate.training.bigmodel.offloaded import OffloadedWeightsLoader, check_space, save_offload_index

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import torch
    from torch import Tensor

_OWN_FILE = re.compile(r"weights-[0-9a-f]{32}\.safetensors")

_BYTES_OF_FILE = 1 << 30
"""Of weights in one file: so much is converted to another dtype in memory at once."""


def weights_in_files(
    weights: Mapping[str, Tensor],
    folder: str | os.PathLike[str] | None,
    index: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, Tensor]:
    """Return weights as views of files. Weights that no file has are written, except views of other files.

    Args:
        weights: of the model, by name; on ``meta`` where they are in a file only.
        folder: that they are written to. Its ``index.json`` may be of another model: it counts for what is on ``meta``.
        index: rows by name, as in ``index.json``, for all weights that it has.

    Returns:
        The weights that are in files, by name. Others rest where they are.

    Raises:
        ConfigError: there is neither a folder nor an index.
        CheckpointError: the disk has too little space, which is found out before anything is written.
    """
    homeless = {name for name, weight in weights.items() if files_of(weight) is None}
    if folder is None and index is None and homeless:
        raise ConfigError(
            f"device_map has {', '.join(sorted(homeless))} on the disk, and these weights are in no file yet. Give "
            "dispatch_model an offload_dir that they are written to."
        )
    rows = _index_of(folder) if index is None else index
    found = _mapped(
        {name: rows[name] for name in weights if name in rows and (index is not None or weights[name].is_meta)}, folder
    )
    converted = {name for name, weight in found.items() if weight.dtype != weights[name].dtype}
    unwritten = {
        name: found.get(name, weights[name])
        for name in weights
        if name in converted or (name in homeless and name not in found and not weights[name].is_meta)
    }
    if folder is not None and unwritten:
        found |= _written({name: (weight, weights[name].dtype) for name, weight in unwritten.items()}, Path(folder))
    return found


def _index_of(folder: str | os.PathLike[str] | None) -> Mapping[str, Mapping[str, Any]]:
    file = Path(folder or "") / "index.json"
    return OffloadedWeightsLoader(save_folder=folder).index if folder is not None and file.is_file() else {}


def _mapped(rows: Mapping[str, Mapping[str, Any]], folder: str | os.PathLike[str] | None) -> dict[str, Tensor]:
    files = WeightFiles(
        dict.fromkeys(Path(row["safetensors_file"]) for row in rows.values() if row.get("safetensors_file"))
    )
    others = OffloadedWeightsLoader(save_folder=folder, index=rows)
    found = {}
    for name, row in rows.items():
        source = row.get("weight_name", name)
        is_here = source in files and files.entry(source).file == Path(row.get("safetensors_file") or "")
        found[name] = files[source] if is_here else others[name]
    return found


def _written(weights: Mapping[str, tuple[Tensor, torch.dtype]], folder: Path) -> dict[str, Tensor]:
    """Write weights, each in a dtype, and return them as views of what was written."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: weight.numel() * dtype.itemsize for name, (weight, dtype) in weights.items()}
    check_space(folder, sum(sizes.values()))
    first = {
        (id(weight), dtype): name for name, (weight, dtype) in reversed(list(weights.items()))
    }  # of weights that are tied to each other
    files: list[list[str]] = [[]]
    for name in first.values():
        if sum(sizes[each] for each in files[-1]) > _BYTES_OF_FILE:
            files.append([])
        files[-1].append(name)
    rows: dict[str, Any] = {}
    for names in files:
        file = folder.absolute() / f"weights-{uuid.uuid4().hex}.safetensors"  # beside those of other calls and ranks
        part = {name: weights[name][0].detach().to("cpu", weights[name][1]).contiguous().clone() for name in names}
        save_file(part, file)
        rows |= {name: _row(file, name, weights[name][1]) for name in names}
    rows |= {name: rows[first[id(weight), dtype]] for name, (weight, dtype) in weights.items()}
    found = _mapped(rows, folder)
    before = _index_of(folder)
    save_offload_index(rows, folder)
    after = {row.get("safetensors_file") for row in _index_of(folder).values()}
    for old in {str(row.get("safetensors_file")) for row in before.values()} - after:
        if Path(old).parent == folder.absolute() and _OWN_FILE.fullmatch(Path(old).name):
            with contextlib.suppress(OSError):  # Windows keeps a file that is mapped; elsewhere its maps stay
                Path(old).unlink()
    return found


def _row(file: Path, name: str, dtype: torch.dtype) -> dict[str, Any]:
    return {"safetensors_file": str(file), "weight_name": name, "dtype": str(dtype).removeprefix("torch.")}

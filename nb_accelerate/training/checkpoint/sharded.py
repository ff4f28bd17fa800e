"""Sharded states: every rank holds a part. A folder of `torch.distributed.checkpoint` for each state.

torch plans, writes and reads; who waits for whom, and when a checkpoint is complete, is decided as for other files::

    save   all ranks plan together -> each writes `__<rank>_0.distcp` to its own folder -> rank 0 adds `.metadata`
    load   each rank reads from all files what it holds now, alone: on any number of ranks, sharded or not

Names and content are those of Hugging Face accelerate: ``pytorch_model_fsdp_0/`` holds ``{"model": weights}`` and
``optimizer_0/`` holds ``{"optimizer": {"state": ..., "param_groups": ...}}`` by the names of parameters.
"""

from __future__ import annotations

import itertools
import pickle
import warnings
from enum import EnumMeta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from typing_extensions import override

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.checksums import record_files
from nb_accelerate.training.checkpoint.files import load_state_dict
from nb_accelerate.training.checkpoint.fitting import check_shapes
from nb_accelerate.training.checkpoint.model import fit, weight_files, write_model
from nb_accelerate.training.checkpoint.names import METADATA_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, is_plain

if TYPE_CHECKING:
    import io
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import ReadItem, SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

    from nb_accelerate.training.checkpoint.checksums import FileRecord
    from nb_accelerate.training.comm import Collectives


# What the metadata of a checkpoint is made of. Nothing here runs code when it is unpickled.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}


@runtime_checkable
class NamedOptimizer(Protocol):
    """An optimizer whose parameters have names, by group."""

    names: list[list[str]]
    param_groups: list[dict[str, Any]]


class ShardedFolder:
    """A state (nested dicts, lists, tensors and `DTensor` objects), and the folder that it is saved to.

    There it is under the key ``content``, ``"model"`` say. `values` are what this rank may write, by flattened name:
    plain tensors, which may be replaced by copies.
    """

    def __init__(self, name: str, content: str, state: Any) -> None:
        self.name = name
        self.content = content
        self.state = state
        self.values: dict[str, Any] = {}

        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None

    def plan(self, collectives: Collectives) -> None:
        """Agree on who writes what. Collective; comes before any writing, which is done alone."""
        planner = DefaultSavePlanner()
        planner.set_up_planner({self.content: self.state}, is_coordinator=True)
        plans = collectives.all_gather_object(planner.create_local_plan())
        # The same on all ranks: it follows from the plans alone.
        divided, self._metadata = planner.create_global_plan(plans)
        self._plan = FileSystemWriter("").prepare_global_plan(divided)[collectives.rank]
        self.values = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in planner.state_dict.items()
        }

    def write(self, parent: Path) -> list[WriteResult]:
        """Write this rank's part, into its folder; return what `finish` needs to know of it."""
        assert self._plan is not None
        folder = parent / self.name
        folder.mkdir()
        # `record_files` syncs. No copying ahead: values are in host memory already if this is a thread,
        # where it would make a context on the first GPU of the machine on every rank.
        writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
        return writer.write_data(self._plan, _Values(self.values)).wait()

    def finish(self, path: Path, results: list[list[WriteResult]]) -> dict[str, FileRecord]:
        """Add what tells where each part is, when all ranks have written; return what that file is."""
        assert self._metadata is not None
        folder = path / self.name
        folder.mkdir()
        FileSystemWriter(folder, sync_files=False).finish(self._metadata, results)
        return {f"{self.name}/{file}": record for file, record in record_files(folder).items()}


class _Values(DefaultSavePlanner):
    """Hands out the values that a rank is to write."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self._values = values

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._values[index.fqn]


def read_model(folder: Path, model: nn.Module, *, strict: bool) -> dict[str, Any]:
    """Read what this rank holds of the weights of a model, under the names that the model has for them."""
    reader = ShardReader(folder)
    stored = {
        ".".join(map(str, path[1:])): (name, entry) for path, name, entry in entries_of(reader) if path[0] == "model"
    }
    fitted = cast("dict[str, Any]", fit(cast("Any", stored), model, str(folder), strict=strict))
    shapes = {name: entry.size for name, (_, entry) in fitted.items() if isinstance(entry, TensorStorageMetadata)}
    check_shapes(str(folder), shapes, model)
    now = model.state_dict()
    wanted = {
        saved: _empty(entry, now.get(name)) if isinstance(entry, TensorStorageMetadata) else None
        for name, (saved, entry) in fitted.items()
    }
    read_into(reader, wanted)
    return {name: wanted[saved] for name, (saved, _) in fitted.items()}


def read_optimizer(folder: Path, parameters: Sequence[Sequence[Tensor]], names: Sequence[Sequence[str]]) -> Any:
    """Read what this rank holds of the state of an optimizer, in the form of ``optimizer.state_dict()``."""
    reader = ShardReader(folder)
    like = dict(zip(itertools.chain.from_iterable(names), itertools.chain.from_iterable(parameters), strict=True))
    wanted: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for path, name, entry in entries_of(reader):
        if path[0] == "optimizer":
            paths[name] = path
            of = like.get(path[2]) if path[1] == "state" and len(path) == 4 else None
            wanted[name] = _empty(entry, of) if isinstance(entry, TensorStorageMetadata) else None
    read_into(reader, wanted)
    state: dict[str, dict[str, Any]] = {}
    groups: dict[int, dict[str, Any]] = {}
    for name, path in paths.items():
        if path[1] == "state":
            state.setdefault(path[2], {})[path[3]] = wanted[name]
        else:
            groups.setdefault(path[2], {})[path[3]] = wanted[name]
    return by_number({"state": state, "param_groups": [groups[key] for key in sorted(groups)]}, names, str(folder))


def by_name(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the state of an optimizer by the names of parameters instead of their numbers."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, itertools.chain.from_iterable(names), strict=True))
    groups = [{**group, "params": list(own)} for group, own in zip(state["param_groups"], names, strict=True)]
    return {"state": {name_of[number]: values for number, values in state["state"].items()}, "param_groups": groups}


def by_number(state: Mapping[str, Any], names: Sequence[Sequence[str]], source: str) -> dict[str, Any]:
    """Undo `by_name`, for an optimizer whose groups have their parameters in another order, too."""
    saved = [list(group.get("params", ())) for group in state["param_groups"]]
    if [sorted(group) for group in saved] != [sorted(group) for group in names]:
        lacking = sorted({name for group in names for name in group} - {name for group in saved for name in group})
        raise CheckpointError(
            f"{source} is the state of an optimizer of other parameters"
            + (f": it has none for {lacking[0]}." if lacking else ", or they are in other groups.")
            + " Make model and optimizer as they were when it was saved."
        )
    number_of = {name: number for number, name in enumerate(name for group in names for name in group)}
    groups = [
        {**group, "params": [number_of[name] for name in own]}
        for group, own in zip(state["param_groups"], names, strict=True)
    ]
    return {"state": {number_of[name]: values for name, values in state["state"].items()}, "param_groups": groups}


def entries_of(reader: ShardReader) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
    """Yield the path of each saved value, its flattened name, and what is known about it."""
    metadata = reader.read_metadata()
    for name, entry in metadata.state_dict_metadata.items():
        yield tuple((metadata.planner_data or {}).get(name, name.split("."))), name, entry


def _empty(entry: TensorStorageMetadata, like: Any) -> Tensor:
    """Return memory for a saved tensor: sharded like a tensor of the same shape, else all of it in host memory."""
    dtype = entry.properties.dtype
    if isinstance(like, DTensor) and like.shape == entry.size:
        return torch.empty_like(like.detach(), dtype=dtype)
    return torch.empty(entry.size, dtype=dtype, device="cpu")


def read_into(reader: ShardReader, wanted: dict[str, Any]) -> None:
    """Replace the values of a flat dict by the saved values of the same names."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is what no_dist asks for
            load(wanted, storage_reader=reader, planner=ShardPlanner(), no_dist=True)
    except (OSError, RuntimeError, ValueError, AssertionError, CheckpointException) as error:
        raise CheckpointError(f"The checkpoint in {reader.path} is damaged: {error}") from error


class ShardReader(FileSystemReader):
    """Read a folder whose metadata may hold anything, which torch would unpickle."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / METADATA_NAME
        try:
            with file.open("rb") as opened:
                metadata = _Unpickler(opened).load()
        except (OSError, EOFError, ValueError, TypeError, AttributeError, IndexError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{file} is not the metadata of a checkpoint, or is damaged: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{file} is not the metadata of a checkpoint.")
        for info in (metadata.storage_data or {}).values():
            if not is_plain(info.relative_path):
                raise CheckpointError(f"{file} names {info.relative_path!r}, which is no file in its folder.")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # by which Python 3.11.0 to 3.11.3 pickle members of enums
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it would load {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _member(cls: object, name: str) -> Any:
    if not isinstance(cls, EnumMeta):
        raise pickle.UnpicklingError(f"it would read {name} of {cls!r}, which no checkpoint needs")
    return cls[name]


class ShardPlanner(DefaultLoadPlanner):
    """Read the tensors and values that a flat dict has the names of, in place.

    Values that are no tensors are unpickled by torch with ``weights_only=True``.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


_ONE_FILE = 2**62  # bytes that no model has, so that its weights go to one file


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

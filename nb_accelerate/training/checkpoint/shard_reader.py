"""Read folders of `torch.distributed.checkpoint` without running code that somebody may have put into them."""

from __future__ import annotations

import pickle
from enum import EnumMeta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from typing_extensions import override

from nb_accelerate.errors import CheckpointError
from nb_accelerate.training.checkpoint.names import METADATA_NAME, is_plain

if TYPE_CHECKING:
    import io
    from enum import Enum

    from torch.distributed.checkpoint.planner import ReadItem

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
"""What the metadata of a checkpoint is made of. Nothing here runs code when it is unpickled."""


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


def _member(cls: object, name: str) -> Enum:
    if not isinstance(cls, EnumMeta):
        raise pickle.UnpicklingError(f"it would read {name} of {cls!r}, which no checkpoint needs")
    member: Enum = cls[name]
    return member


class ShardPlanner(DefaultLoadPlanner):
    """Read the tensors and values that a flat dict has the names of, in place.

    Values that are no tensors are unpickled by torch with ``weights_only=True``.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)

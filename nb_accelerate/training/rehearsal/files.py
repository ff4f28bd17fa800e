"""Files of a rehearsal: what the function writes goes to another folder, and is read there again."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.training.rehearsal.lines import is_told_by_user, user_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nb_accelerate.training.rehearsal.trace import Line

_WRITES = frozenset("wax+")
_DEVICES = ("/dev/", "/proc/")


class Files:
    """The files that a rank would write.

    Args:
        folder: for what is written instead.
        written: gets each path, with the line.
    """

    def __init__(self, folder: Path, written: dict[str, Line]) -> None:
        self._folder = folder
        self._written = written

    def written(self, path: Any) -> str:
        """Note that a file is written, and return where to instead."""
        absolute = os.path.abspath(path)  # noqa: PTH100 - a link stays a link
        if not absolute.startswith(str(self._folder)):
            self._written.setdefault(absolute, user_line())
        instead = self._instead(absolute)
        os.makedirs(os.path.dirname(instead), exist_ok=True)  # noqa: PTH103, PTH120 - Path's is replaced below
        return instead

    def there(self, path: Any) -> Any:
        """Return where a file is: in the other folder if it was written there."""
        instead = self._instead(os.path.abspath(path))  # noqa: PTH100 - as above
        return instead if os.path.exists(instead) else path  # noqa: PTH110 - as above

    def _instead(self, absolute: str) -> str:
        return absolute if absolute.startswith(str(self._folder)) else f"{self._folder}{absolute}"

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have what is opened by a user's line for writing opened in the other folder, in a block."""
        replaced: list[tuple[Any, str, Any]] = []

        def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            replaced.append((owner, name, getattr(owner, name)))
            setattr(owner, name, make(getattr(owner, name)))

        replace(builtins, "open", self._open)
        replace(io, "open", lambda _: builtins.open)
        replace(torch, "save", self._save)
        replace(torch, "load", self._load)
        with contextlib.suppress(ImportError):
            import safetensors.torch

            replace(safetensors.torch, "serialize_file", self._serialize)
        for name in ("mkdir", "remove", "unlink", "rmdir", "rename", "replace"):
            replace(os, name, self._left_alone)
        try:
            yield
        finally:
            for owner, name, plain in reversed(replaced):
                setattr(owner, name, plain)

    def _open(self, plain: Any) -> Any:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not isinstance(file, (str, os.PathLike)) or os.fspath(file).startswith(_DEVICES):
                return plain(file, mode, *args, **kwargs)
            if not _WRITES & set(mode):
                return plain(self.there(file), mode, *args, **kwargs)
            if not is_told_by_user():
                return plain(file, mode, *args, **kwargs)
            there, instead = self.there(file), self.written(file)
            if mode[0] in "ar" and there != instead and os.path.exists(there):  # noqa: PTH110 - as above
                shutil.copyfile(there, instead)
            return plain(instead, mode, *args, **kwargs)

        return opened

    def _save(self, plain: Any) -> Any:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            f = self.written(f) if isinstance(f, (str, os.PathLike)) else f
            return plain(obj, f, *args, **kwargs)

        return save

    def _load(self, plain: Any) -> Any:
        def load(f: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(self.there(f) if isinstance(f, (str, os.PathLike)) else f, *args, **kwargs)

        return load

    def _serialize(self, plain: Any) -> Any:
        def serialize_file(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(tensors, self.written(filename), *args, **kwargs)

        return serialize_file

    def _left_alone(self, plain: Any) -> Any:
        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            """Change what was written in the other folder; what a user's line would change elsewhere stays."""
            is_ours = isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(str(self._folder))  # noqa: PTH100
            if is_ours or not is_told_by_user():
                return plain(path, *args, **kwargs)
            if plain.__name__ == "mkdir":  # what is written makes its folders
                return plain(path, *args, **kwargs) if os.path.exists(path) else None  # noqa: PTH110 - as above
            there = self.there(path)
            if there == path or kwargs:
                return None
            if args and plain.__name__ in ("rename", "replace"):
                args = (self.written(args[0]), *args[1:])
            return plain(there, *args, **kwargs)

        return change

"""Files of a rehearsal: what the function writes goes to another folder, and is read there again.

A rank finds what it has written, and what rank 0 has: others wait for rank 0 at each barrier.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.training.rehearsal.lines import is_told_by_user, user_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nb_accelerate.training.rehearsal.trace import Line

_WRITES = frozenset("wax+")
_DEVICES = ("/dev/", "/proc/")
_CHANGES = ("mkdir", "remove", "unlink", "rmdir", "rename", "replace", "chmod", "utime")
"""Functions of `os` that change files and folders; those of shutil and pathlib call them."""


class Files:
    """The files that a rank would write.

    Args:
        folder: of all ranks, each of which has one in it.
        written: gets each path, with the line.
    """

    def __init__(self, folder: Path, rank: int, written: dict[str, Line]) -> None:
        self._own, self._of_rank_0 = str(folder / str(rank)), str(folder / "0")
        self._written = written

    def written(self, path: Any) -> str:
        """Note that a file is written, and return where to instead."""
        absolute: str = os.path.abspath(path)  # noqa: PTH100 - a link stays a link
        if not self._is_ours(absolute):
            self._written.setdefault(absolute, user_line())
            absolute = self._own + absolute
        os.makedirs(os.path.dirname(absolute), exist_ok=True)  # noqa: PTH103, PTH120 - its calls are not the user's
        return absolute

    def there(self, path: Any) -> Any:
        """Return where a file or folder is: in the other folder if it was written there only."""
        absolute = os.path.abspath(path)  # noqa: PTH100 - as above
        for folder in (self._own, self._of_rank_0):
            instead = folder + absolute
            # Not by stat, which is replaced. A folder that is there in both holds what the user has put there.
            if os.access(instead, os.F_OK) and not (os.access(f"{instead}/.", os.F_OK) and os.access(path, os.F_OK)):
                return instead
        return path

    def _is_ours(self, path: Any) -> bool:
        return str(path).startswith((self._own, self._of_rank_0))

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Have what user's lines change, and then look for, changed and found in the other folder, in a block."""
        with contextlib.ExitStack() as stack:

            def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, make(getattr(owner, name)))

            replace(builtins, "open", self._open)
            replace(io, "open", lambda _: builtins.open)
            replace(torch, "save", self._save)
            with contextlib.suppress(ImportError):
                import safetensors.torch

                replace(safetensors.torch, "serialize_file", self._save)
                opens = safetensors.safe_open  # written in Rust, and imported by its name
                for module in [
                    one for one in [*sys.modules.values()] if getattr(one, "__dict__", {}).get("safe_open") is opens
                ]:
                    replace(module, "safe_open", self._found)
            replace(torch, "load", self._found)
            for name in ("stat", "scandir"):
                replace(os, name, self._found)
            replace(os, "listdir", self._listed)
            for name in _CHANGES:
                replace(os, name, self._changed)
            yield

    def _open(self, plain: Any) -> Any:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not _is_path(file) or os.fspath(file).startswith(_DEVICES):
                return plain(file, mode, *args, **kwargs)
            there = self.there(file)
            if not _WRITES & set(mode) or not is_told_by_user():
                return plain(there, mode, *args, **kwargs)
            instead = self.written(file)
            if mode[0] in "ar" and there != instead and os.access(there, os.F_OK):
                shutil.copyfile(there, instead)
            return plain(instead, mode, *args, **kwargs)

        return opened

    def _save(self, plain: Any) -> Any:
        def save(what: Any, file: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(what, self.written(file) if _is_path(file) else file, *args, **kwargs)

        return save

    def _found(self, plain: Any) -> Any:
        def found(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            return plain(self.there(path) if _is_path(path) else path, *args, **kwargs)

        return found

    def _listed(self, plain: Any) -> Any:
        def listed(path: Any = ".") -> Any:
            names = plain(self.there(path) if _is_path(path) else path)
            instead = self._own + os.path.abspath(path) if isinstance(path, str) else ""  # noqa: PTH100 - as above
            return list(dict.fromkeys([*names, *(plain(instead) if os.access(instead, os.F_OK) else ())]))

        return listed

    def _changed(self, plain: Any) -> Any:
        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            """Change what was written in the other folder; what a user's line would change elsewhere stays."""
            if not _is_path(path) or self._is_ours(path) or not is_told_by_user():
                return plain(path, *args, **kwargs)
            there = self.there(path)
            if plain.__name__ == "mkdir":
                there = there if os.access(there, os.F_OK) else self._own + os.path.abspath(path)  # noqa: PTH100
                if there.startswith(self._own):
                    os.makedirs(os.path.dirname(there), exist_ok=True)  # noqa: PTH103, PTH120 - as above
                return plain(there, *args, **kwargs)
            if not str(there).startswith(self._own) or "dir_fd" in kwargs:
                return None
            if args and plain.__name__ in ("rename", "replace"):
                args = (self.written(args[0]), *args[1:])
            return plain(there, *args, **kwargs)

        return change


def _is_path(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str)

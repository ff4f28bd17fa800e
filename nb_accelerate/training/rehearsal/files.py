"""Lines of the user, and files: what they write goes to another folder, and is read there again.

A rank finds what it has written, and what rank 0 has: others wait for rank 0 at each barrier.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import glob
import io
import os
import pathlib
import shutil
import sys
import sysconfig
from pathlib import Path
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import torch

from nb_accelerate.errors.traceback_lines import is_ours, is_users_file
from nb_accelerate.training.process import live_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from nb_accelerate.training.rehearsal.report import Line

_ROOM = (str(Path(__file__).parent), live_bytes.__file__)
# Libraries that write what users tell them to, and where.
_SAVERS = frozenset("torch numpy pandas safetensors transformers diffusers peft matplotlib PIL joblib".split())  # noqa: SIM905
# Functions of `os` that change files and folders; those of shutil and pathlib call them.
_CHANGES = ("mkdir", "remove", "unlink", "rmdir", "rename", "replace", "chmod", "utime")


class Files:
    """The files that a rank would write."""

    def __init__(self, folder: Path, own: str, written: dict[str, Line]) -> None:
        self._own, self._of_rank_0 = str(folder / own), str(folder / "0")
        self._written = written

    def written(self, path: Any) -> str:
        """Note that a file is written, and return where to instead."""
        if not self._is_ours(path):
            self._written.setdefault(os.path.abspath(path), user_call()[0])  # noqa: PTH100 - a link stays a link
        return self._instead(path)

    def as_named(self, text: str) -> str:
        """Return a text with files and folders as the function names them."""
        return text.replace(self._own, "").replace(self._of_rank_0, "")

    def _instead(self, path: Any) -> str:
        """Return where a file is written instead, in a folder that is there."""
        instead: str = ("" if self._is_ours(path) else self._own) + os.path.abspath(path)  # noqa: PTH100 - as above
        os.makedirs(os.path.dirname(instead), exist_ok=True)  # noqa: PTH103, PTH120 - its calls are not the user's
        return instead

    def _there(self, path: Any) -> Any:
        """Return where a file or folder is: in the other folder if it was written there only."""
        for folder in (self._own, self._of_rank_0):
            instead = folder + os.path.abspath(path)  # noqa: PTH100 - as above
            # Not by stat, which is replaced. A folder that is there in both holds what the user has put there.
            if os.access(instead, os.F_OK) and not (os.access(f"{instead}/.", os.F_OK) and os.access(path, os.F_OK)):
                return instead
        return path

    def _is_ours(self, path: Any) -> bool:
        return str(os.path.abspath(path)).startswith((self._own, self._of_rank_0))  # noqa: PTH100 - as above

    def use(self) -> None:
        """Have what user's lines change, and then look for, changed and found in the other folder from now on."""

        def replace(make: Callable[[Any], Any], owner: Any, *names: str) -> None:
            for name in names:
                setattr(owner, name, make(getattr(owner, name)))

        replace(self._open, builtins, "open")
        replace(lambda _: builtins.open, io, "open")
        replace(self._save, torch, "save")
        replace(self._found, os, "stat")
        replace(self._listed, os, "scandir", "listdir")
        replace(self._changed, os, *_CHANGES)
        # Classes that have bound functions before: of Python 3.10, of 3.13 and later.
        bound = [getattr(pathlib, "_NormalAccessor", None), *map(vars(glob).get, ("_Globber", "_StringGlobber"))]
        for owner in filter(None, bound):
            for name in ("open", "stat", "scandir", "listdir", *_CHANGES):
                if isinstance(getattr(owner, name, None), BuiltinFunctionType):
                    setattr(owner, name, staticmethod(getattr(io if name == "open" else os, name)))
        with contextlib.suppress(ImportError):
            import safetensors.torch

            replace(self._save, safetensors.torch, "serialize_file")
            opens = safetensors.safe_open  # written in Rust, and imported by its name
            for module in [one for one in [*sys.modules.values()] if getattr(one, "safe_open", None) is opens]:
                replace(self._found, module, "safe_open")

    def _open(self, plain: Any) -> Any:
        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not _is_path(file) or os.fspath(file).startswith(("/dev/", "/proc/")):
                return plain(file, mode, *args, **kwargs)
            there = self._there(file)
            if not set("wax+") & set(mode) or not is_told_by_user():
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
            return plain(self._there(path) if _is_path(path) else path, *args, **kwargs)

        return found

    def _listed(self, plain: Any) -> Any:
        def listed(path: Any = ".") -> Any:
            if not _is_path(path):
                return plain(path)
            absolute = os.path.abspath(path)  # noqa: PTH100 - as above
            folders = [path, self._of_rank_0 + absolute, self._own + absolute]
            folders = [each for each in folders if os.access(f"{each}/.", os.F_OK)] or [path]
            named = {getattr(each, "name", each): each for folder in folders for each in plain(folder)}
            return [*named] if plain.__name__ == "listdir" else _Entries(named.values())

        return listed

    def _changed(self, plain: Any) -> Any:
        def change(path: Any, *args: Any, **kwargs: Any) -> Any:
            """Change what was written in the other folder; what a user's line would change elsewhere stays."""
            if not _is_path(path) or self._is_ours(path) or not is_told_by_user():
                return plain(path, *args, **kwargs)
            there = self._there(path)
            if plain.__name__ == "mkdir":
                return plain(there if os.access(there, os.F_OK) else self._instead(path), *args, **kwargs)
            if not str(there).startswith(self._own) or "dir_fd" in kwargs:
                return None
            if plain.__name__ in ("rename", "replace"):
                args = (self.written(args[0]),)
            return plain(there, *args, **kwargs)

        return change


class _Entries(contextlib.AbstractContextManager["_Entries"]):
    """What `os.scandir` returns, of several folders."""

    def __init__(self, entries: Iterable[os.DirEntry[str]]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Have nothing to close, as all entries were read."""


def _is_path(path: Any) -> bool:
    return isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str)


def frames() -> Iterator[FrameType]:
    """Yield the frames that have led to here, innermost first, without those of this room."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - as `warnings` does
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_ROOM):
            yield frame
        frame = frame.f_back


def user_call() -> tuple[Line, str]:
    """Return the innermost line of the user's that has led to here, and what of this package it has called."""
    called = ""
    for frame in frames():
        filename = frame.f_code.co_filename
        if is_users_file(filename):
            return (filename, frame.f_lineno), "loop over a loader" if called == "__iter__" else called
        if is_ours(filename):
            called = frame.f_code.co_name
    return ("", 0), ""


def is_told_by_user() -> bool:
    """Return whether a user's line has told this, perhaps through Python's own modules and libraries that save."""
    for frame in frames():
        if is_users_file(frame.f_code.co_filename):
            return True
        if not _passes_on(frame.f_code.co_filename):
            return False
    return False


@functools.cache
def _passes_on(filename: str) -> bool:
    parts = Path(filename).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1] in _SAVERS
    return filename.startswith((sysconfig.get_path("stdlib"), "<frozen", "<__array_function__"))  # of NumPy 1

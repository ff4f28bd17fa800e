"""Have ``torch.save`` publish a file as a whole: every rank of a notebook's loop writes the same ``best.pt``.

Ranks that write into one file at once leave parts of each in it. So each writes one beside it, which takes its place;
and one line says how to write it once.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import shutil
import socket
import tempfile
import threading
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.imported import imported
from nb_accelerate.errors.traceback_lines import calling_line
from nb_accelerate.notebook.worker.groups import has_group

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("nb_accelerate")

_saved: set[str] = set()
"""Paths to which this rank has saved."""


def save_whole_files() -> None:
    """Change ``torch.save`` in this process, if torch is imported."""
    serialization: Any = imported("torch.serialization")
    torch: Any = imported("torch")
    if serialization is None or torch is None or hasattr(torch.save, "__wrapped__"):
        return
    # In both places, or it could not be pickled by its name.
    torch.save = serialization.save = _whole(torch.save)


def _whole(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def save_whole(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        is_path = isinstance(f, (str, os.PathLike))
        if not is_path or os.environ.get("WORLD_SIZE", "1") == "1":
            save(obj, f, *args, **kwargs)
            return
        path = os.path.realpath(f)
        folder = _folder_beside(path)
        if folder is None:
            save(obj, f, *args, **kwargs)
            return
        try:
            # Of the same name, since it is in the file.
            beside = os.path.join(folder, os.path.basename(path))  # noqa: PTH118, PTH119 - text, as it was given
            save(obj, beside, *args, **kwargs)
            if os.path.exists(path):  # noqa: PTH110 - as above
                shutil.copymode(path, beside)
            os.replace(beside, path)  # noqa: PTH105 - as above
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        _tell_of_others(obj, path, given=str(f))

    return save_whole


def _folder_beside(path: str) -> str | None:
    """Make a folder beside a file; None if the file is no plain one, or nothing may be made there."""
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 - text, as it was given
        return None
    place, name = os.path.split(path)
    try:
        return tempfile.mkdtemp(prefix=f".{name}-", dir=place)
    except OSError:
        return None


def _tell_of_others(obj: object, path: str, *, given: str) -> None:
    """Warn, once for a path, if another rank has saved to it too."""
    is_rank = multiprocessing.parent_process() is None and threading.current_thread() is threading.main_thread()
    if path in _saved or not (is_rank and has_group()):
        return
    _saved.add(path)
    distributed: Any = imported("torch.distributed")
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001 - the only one that all ranks are sure to share
    try:
        number = store.add(f"nb_accelerate/saved {socket.gethostname()} {path}", 1)
    except (distributed.DistError, OSError):  # who serves it has gone
        return
    if number == 2:
        is_wrapped = isinstance(obj, dict) and any(str(key).startswith("module.") for key in obj)
        logger.warning(
            '%s: several ranks write this file, one after the other. To write it once%s: accelerator.save(%s, "%s")',
            calling_line() or "torch.save",
            ', and without "module." in its keys' if is_wrapped else "",
            "accelerator.unwrap_model(model).state_dict()" if is_wrapped else "...",
            given,
        )

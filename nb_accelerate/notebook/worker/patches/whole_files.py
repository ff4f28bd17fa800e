"""Have ``torch.save`` publish a file as a whole: every rank of a notebook's loop writes the same ``best.pt``.

Ranks that write into one file at once leave parts of each in it. So each writes one beside it, which then replaces it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.imported import imported

if TYPE_CHECKING:
    from collections.abc import Callable


logger = logging.getLogger("nb_accelerate")

_ITS_OWN = re.compile(r"(?<!\d)1(?!\d)")  # in the name of a file, the number of rank 1: each rank saves one of its own


def save_whole_files() -> None:
    """Change ``torch.save`` in this process, if torch is imported."""
    torch, serialization = imported("torch"), imported("torch.serialization")
    if serialization is None or torch is None or hasattr(torch.save, "__wrapped__"):
        return
    # Set in both modules: otherwise it could not be pickled by its name.
    torch.save = serialization.save = _whole(torch.save)


def _whole(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def save_whole(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        is_path = isinstance(f, (str, os.PathLike))
        path = os.path.realpath(f) if is_path and os.environ.get("WORLD_SIZE", "1") != "1" else ""
        folder = _folder_beside(path) if path else None
        if folder is None:
            save(obj, f, *args, **kwargs)
            return
        try:
            # It has the same file name, because torch writes that into the file.
            beside = os.path.join(folder, os.path.basename(path))  # noqa: PTH118, PTH119 - text, as it was given
            save(obj, beside, *args, **kwargs)
            if os.path.exists(path):  # noqa: PTH110 - as above
                shutil.copymode(path, beside)
            os.replace(beside, path)  # noqa: PTH105 - as above
            name = os.path.basename(path)  # noqa: PTH119 - as above
            if os.environ.get("RANK") == "1" and not _ITS_OWN.search(name):
                _tell_of_prepared_model(obj, str(f))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return save_whole


def _tell_of_prepared_model(obj: object, file: str) -> None:
    """Say what to write if an object that all ranks save is a prepared model, or has the state of one in it."""
    values = obj if isinstance(obj, dict) else {}
    states = [values, *(value for value in values.values() if isinstance(value, dict))]
    instead = f"accelerator.save(accelerator.get_state_dict(model), {file!r})"
    if any(type(value).__name__ == "DTensor" for state in states for value in state.values()):
        logger.warning("%s has the shards of one rank only, the last that saved it. Write %s", file, instead)
    elif any(cls.__name__ == "DistributedDataParallel" for cls in type(obj).__mro__) or any(
        str(name).startswith("module.") for state in states for name in state
    ):
        _note(f"Rank 1 saved {file}, with names that begin with 'module.'. To save it once, without these: {instead}")


@functools.lru_cache  # each line once
def _note(line: str) -> None:
    notes = getattr(sys.__stdout__, "notes", None)  # the user may have put another stream there
    if notes is not None:
        notes.write(line + "\n")


def _folder_beside(path: str) -> str | None:
    """Make a folder beside a file; return None if the file is no plain one, or nothing may be made there."""
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 - text, as it was given
        return None
    folder, name = os.path.split(path)
    try:
        return tempfile.mkdtemp(prefix=f".{name}-", dir=folder)
    except OSError:
        return None

"""What ranks are sent of the settings of this process: all of them when they start, later the changed ones."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.protocol.changed_modules import changed_here
from nb_accelerate.notebook.protocol.settings import is_same, pack, settings_here

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.notebook.protocol.settings import Key

logger = logging.getLogger("nb_accelerate")

_ENVIRON = ("sys", "environ")
# What a rank gets with its `Setup`, which has more to say about it.
_OF_SETUP = {_ENVIRON, ("sys", "path"), ("sys", "argv"), ("sys", "folder")}

# What ranks on another machine do not follow.
_OF_MACHINE = {_ENVIRON, ("sys", "folder"), ("sys", "limits"), ("sys", "cores"), ("sys", "umask")}

_named: set[Key] = set()  # settings that could not be sent, which the user knows


def set_here(*, at_start: bool = True, is_elsewhere: bool = False) -> dict[Key, Any]:
    """Return what this process is set to, and what it has changed in modules."""
    left_out = (_OF_SETUP if at_start else set()) | (_OF_MACHINE if is_elsewhere else set())
    return {key: value for key, value in (settings_here() | changed_here()).items() if key not in left_out}


def differences(before: Mapping[Key, Any], now: Mapping[Key, Any], *, is_elsewhere: bool) -> dict[Key, Any]:
    """Return the settings that are others now: each with its value, the environment with both values of variables."""
    found = {key: value for key, value in now.items() if not (key in before and is_same(before[key], value))}
    if is_elsewhere:
        found = {key: value for key, value in found.items() if key not in _OF_MACHINE}
    if _ENVIRON in found:
        old, new = ({os.fsdecode(k): os.fsdecode(v) for k, v in each[_ENVIRON].items()} for each in (before, now))
        changed = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
        found[_ENVIRON] = {name: (old.get(name), new.get(name)) for name in changed}
    return found


def pack_settings(values: Mapping[Key, Any]) -> dict[str, bytes]:
    """Return settings for ranks. Settings that cannot be pickled are left out, and named once."""
    try:
        return pack(values)
    except Exception:  # users' code takes part; which of them it is takes longer to find out
        found = dict(values)
        for key, value in values.items():
            try:
                pack({key: value})
            except Exception as error:
                del found[key]
                if key not in _named:
                    _named.add(key)
                    logger.warning(
                        "%s as this notebook has it does not travel to ranks (%s). Set it in the function or cell that "
                        "they run, or start them with start_method='fork'",
                        ".".join(key),
                        error,
                    )
        return pack(found)

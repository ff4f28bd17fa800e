"""Errors about the options of a launch, in the words of the command line: ``--num_machines 2`` for ``num_nodes=2``."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_FLAGS = {
    "num_processes": "num_processes",
    "num_nodes": "num_machines",
    "node_rank": "machine_rank",
    "master_addr": "main_process_ip",
    "use_port": "main_process_port",
    "devices": "gpu_ids",
    "rdzv_backend": "rdzv_backend",
    "max_restarts": "max_restarts",
}
"""Flags by the name of the option of `notebook_launcher`."""

_PHRASES = {
    "devices='cpu'( or None)?": "--cpu",
    "devices='xla'": "--tpu",
    "or None for all devices": "or leave it out for one on each GPU",
    "or 0 or None for a free one": "or 0 for a free one",
    "rdzv_endpoint='HOST:29400'": "--main_process_ip HOST",
    r"rdzv_endpoint='([^']*):(\d+)'": r"--main_process_ip \1 --main_process_port \2",
}
"""What cannot be said option by option, by regular expression."""

_OPTION = re.compile(rf"\b({'|'.join(_FLAGS)})\b(?:=('[^']*'|\[[^\]]*\]|[^\s,;:]*[^\s,;:.]))?")


def _flag(found: re.Match[str]) -> str:
    name, value = found.groups()
    return f"--{_FLAGS[name]}" + ("" if value is None else " " + value.strip("'[]").replace(", ", ","))


def in_flags(text: str) -> str:
    """Return a sentence with flags in place of options."""
    for phrase, flags in _PHRASES.items():
        text = re.sub(phrase, flags, text)
    return _OPTION.sub(_flag, text)


@contextlib.contextmanager
def errors_in_flags() -> Iterator[None]:
    """Raise errors about options, inside of the block, in the words of the command line."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(in_flags(str(error))) from None

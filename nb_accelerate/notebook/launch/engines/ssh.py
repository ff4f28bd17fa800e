"""OpenSSH: ``ssh HOST`` with the user's keys, agent and ``~/.ssh/config``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.notebook.launch.engines.command import start_command
from nb_accelerate.notebook.launch.engines.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.launch.engines.engine import Machine
    from nb_accelerate.notebook.remote.streams import Stream

_OPTIONS = (
    "-T",  # no terminal: it would change bytes
    "-oBatchMode=yes",  # nobody is there to type a password
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
)
"""Before those of ``~/.ssh/config``, as ssh takes what it finds first. All others are the user's."""


class SshEngine(Engine):
    """Starts hosts by ``ssh``."""

    @override
    def start(self, machine: Machine, command: Sequence[str]) -> Stream:
        return start_command(machine.name, ["ssh", *_OPTIONS, "--", machine.name, for_shell(command)])


def for_shell(command: Sequence[str]) -> str:
    """Return a command as the shell of the other machine reads it; ``~/`` is the home there."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in command)

"""A command of the user's that runs another one on a machine: ``kubectl exec``, ``docker exec``, ``srun`` ..."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.errors import StartError
from nb_accelerate.notebook.launch.engines.engine import Engine
from nb_accelerate.notebook.remote.streams import CommandStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.launch.engines.engine import Machine
    from nb_accelerate.notebook.remote.streams import Stream


class CommandEngine(Engine):
    """Starts hosts by a template, such as ``"kubectl exec -i {host} -- {command}"``.

    A word ``{command}`` becomes the words of the command. Inside of a longer word, as in ``sh -c 'cd /data; {command}'``, it
    is the command as a shell reads it.
    """

    @override
    def start(self, machine: Machine, command: Sequence[str]) -> Stream:
        return start_command(machine.name, filled(self.options.command_template or "", machine.name, command))


def start_command(name: str, argv: Sequence[str]) -> CommandStream:
    """Start a command that carries the stream of a machine.

    Raises:
        StartError: it is not there.
    """
    try:
        return CommandStream(name, argv)
    except OSError as error:
        raise StartError(f"{name} cannot be reached: {argv[0]}: {error.strerror}") from None


def filled(template: str, host: str, command: Sequence[str]) -> list[str]:
    """Return the words of a template, with the host and the command in their places."""
    words: list[str] = []
    for word in shlex.split(template):
        if word == "{command}":
            words += command
        else:
            words.append(word.replace("{host}", host).replace("{command}", shlex.join(command)))
    return words

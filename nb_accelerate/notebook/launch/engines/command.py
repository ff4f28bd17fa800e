"""A command of the user's that runs another one on a machine: ``kubectl exec``, ``docker exec``, ``srun`` ..."""

from __future__ import annotations

import shlex
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.errors import StartError
from nb_accelerate.notebook.launch.engines.engine import Engine
from nb_accelerate.notebook.launch.engines.failures import explained
from nb_accelerate.notebook.remote.streams import CommandStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.launch.engines.engine import Machine
    from nb_accelerate.notebook.launch.engines.failures import Failure
    from nb_accelerate.notebook.remote.streams import Stream


class CommandEngine(Engine):
    """Starts hosts by a template, such as ``"kubectl exec -i {host} -- {command}"``.

    A word ``{command}`` becomes the words of the command. After ``-c`` and in a longer word, as in ``sh -c 'cd /data;
    {command}'``, it is the command as a shell reads it.
    """

    failures: Sequence[Failure] = ()

    @override
    def start(self, machine: Machine, command: Sequence[str]) -> Stream:
        argv = self._argv(machine, command)
        explain = partial(
            explained, argv[0], failures=self.failures, host=machine.name, python=self.options.remote_python
        )
        try:
            return CommandStream(machine.name, argv, explain=explain)
        except OSError as error:
            raise StartError(f"machine {machine.name} cannot be reached: {argv[0]}: {error.strerror}") from None

    def _argv(self, machine: Machine, command: Sequence[str]) -> list[str]:
        return filled(self.options.command_template or "", machine.name, command)


def filled(template: str, host: str, command: Sequence[str]) -> list[str]:
    """Return the words of a template, with the host and the command in their places."""
    words: list[str] = []
    for word in shlex.split(template):
        if word == "{command}" and words[-1:] != ["-c"]:
            words += command
        else:
            words.append(word.replace("{host}", host).replace("{command}", shlex.join(command)))
    return words

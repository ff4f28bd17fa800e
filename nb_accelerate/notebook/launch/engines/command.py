"""A command that runs another one on a machine: ``ssh``, or a template, as ``kubectl exec`` or ``docker exec``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.errors import StartError
from nb_accelerate.notebook.launch.engines import Engine
from nb_accelerate.notebook.remote.streams import CommandStream, ended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.launch.engines import Machine
    from nb_accelerate.notebook.remote.streams import Stream


class CommandEngine(Engine):
    """Starts hosts by a template, such as ``"kubectl exec -i {host} -- {command}"``.

    A word ``{command}`` becomes the words of the command. After ``-c`` and in a longer word, as in ``sh -c 'cd /data;
    {command}'``, it is the command as a shell reads it.
    """

    @override
    def start(self, machine: Machine, command: Sequence[str]) -> Stream:
        argv = self._argv(machine, command)

        def explain(code: int | None, said: str) -> str:
            first = self._by_hand(machine, [*self.options.python, "-c", "import nb_accelerate"])
            return f"{ended(argv[0], code, said)}. To check by hand: {first}"

        try:
            return CommandStream(machine.name, argv, explain=explain)
        except OSError as error:
            raise StartError(f"machine {machine.name} cannot be reached: {argv[0]}: {error.strerror}") from None

    def _by_hand(self, machine: Machine, command: Sequence[str]) -> str:
        """Return what runs a command on a machine, for users."""
        return shlex.join(self._argv(machine, command))

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


# ssh takes what it finds first: these come before those of ``~/.ssh/config``, where users set all others.
_OPTIONS = (
    "-T",  # no terminal: it would change bytes
    "-oBatchMode=yes",  # nobody is there to type a password
    "-oConnectTimeout=30",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
    # Of a connection that is there already it may be a client: then a second factor is asked for once. It must not
    # become the master that the user's own logins share, since it is ended when the launch ends.
    "-oControlMaster=no",
    "-oClearAllForwardings=yes",  # no port is opened, and none that is in use is an error
    "-oExitOnForwardFailure=no",
    "-oTunnel=no",
    "-oForwardAgent=no",
    "-oForwardX11=no",
    "-oPermitLocalCommand=no",
    "-oRemoteCommand=none",  # with one, ours would be refused
    # OpenSSH knows these since 8.7: it would go into the background, read no input, or run no command.
    "-oIgnoreUnknown=ForkAfterAuthentication,StdinNull,SessionType",
    "-oForkAfterAuthentication=no",
    "-oStdinNull=no",
    "-oSessionType=default",
)


class SshEngine(CommandEngine):
    """Starts hosts by ``ssh``."""

    @override
    def _by_hand(self, machine: Machine, command: Sequence[str]) -> str:
        return shlex.join(["ssh", "-oBatchMode=yes", machine.name, for_shell(command)])

    @override
    def _argv(self, machine: Machine, command: Sequence[str]) -> list[str]:
        return ["ssh", *_OPTIONS, "--", machine.name, for_shell(command)]


def for_shell(command: Sequence[str]) -> str:
    """Return a command as the shell of the other machine reads it; ``~/`` is the home there."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in command)

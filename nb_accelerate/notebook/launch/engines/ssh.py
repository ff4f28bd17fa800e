"""OpenSSH: ``ssh HOST`` with the user's keys, agent and ``~/.ssh/config``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from typing_extensions import override

from nb_accelerate.notebook.launch.engines.command import CommandEngine
from nb_accelerate.notebook.launch.engines.failures import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nb_accelerate.notebook.launch.engines.engine import Machine

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
"""ssh takes what it finds first: these come before those of ``~/.ssh/config``, where users set all others."""


class SshEngine(CommandEngine):
    """Starts hosts by ``ssh``."""

    failures = (
        Failure(
            r"Could not resolve hostname",
            "there is no machine of the name {host}. Correct it in hosts, or say its address in ~/.ssh/config: "
            "Host {host}, and below it HostName 10.0.0.1",
        ),
        Failure(
            r"REMOTE HOST IDENTIFICATION HAS CHANGED",
            "the key of {host} is another one than before. If the machine was set up again: ssh-keygen -R {host}, then "
            "log in once by hand: ssh {host}. If it was not, somebody may be in between",
        ),
        Failure(
            r"Host key verification failed",
            "the key of {host} is not known yet. Log in once by hand, and accept it: ssh {host}",
        ),
        Failure(
            r"Permission denied|Too many authentication failures",
            "{host} wants a password, or does not know your key, and nobody can type one here. Have it accept your "
            "key: ssh-copy-id {host}. Then this has to work: ssh -oBatchMode=yes {host} true",
        ),
        Failure(
            r"Connection refused",
            "nothing answers at the port of ssh on {host}. Start sshd there, or say its port in ~/.ssh/config: "
            "Host {host}, and below it Port 2222",
        ),
        Failure(
            r"timed out|No route to host|Network is unreachable",
            "{host} does not answer: it is down, in another network, or behind a firewall. This has to work first: "
            "ssh -oBatchMode=yes {host} true",
        ),
        Failure(
            r"No module named '?nb_accelerate",
            "{python} on {host} does not have this package. Install it, in a clone of its repository here: git archive "
            "HEAD | ssh {host} 'mkdir -p nb_accelerate && tar -x -C nb_accelerate && {python} -m pip install "
            "./nb_accelerate'. Or name a Python that has it: remote_python='~/env/bin/python'",
        ),
    )

    @override
    def _argv(self, machine: Machine, command: Sequence[str]) -> list[str]:
        return ["ssh", *_OPTIONS, "--", machine.name, for_shell(command)]


def for_shell(command: Sequence[str]) -> str:
    """Return a command as the shell of the other machine reads it; ``~/`` is the home there."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in command)

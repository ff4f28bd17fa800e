"""The bytes between the kernel and the host process of one machine: over the pipes of a command, or over a socket."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nb_accelerate.notebook.remote.frames import Seal

# Seconds that a command gets to end by itself when its stdin is closed: the host on the other side kills its ranks.
_PATIENCE = 2.0

_MOST_SAID = 1 << 13  # bytes of a command's stderr that are read, at most: the last ones


class Stream(ABC):
    """The two directions of bytes between the kernel and the host of one machine."""

    name: str  # the name of the machine, for messages
    reads: int  # descriptor of what the host sends; it does not block
    writes: int  # descriptor of what is sent to the host; it does not block
    seal: Seal | None = None  # keyed checksums of frames; None where what carries the bytes authenticates them.

    @abstractmethod
    def why_ended(self) -> str:
        """Return in a sentence why the stream has ended, and what to do; "" if that is not known.

        Called when `reads` is at its end.
        """

    @abstractmethod
    def close(self, *, at_once: bool = False) -> None:
        """Close both directions, and end what carried them. Can be called again.

        Args:
            at_once: nobody answers on the other side, so that nothing there is waited for.
        """


class CommandStream(Stream):
    """The standard input and output of a command, such as ``ssh HOST ...``, which carries them to the host.

    The command is in a session of its own, so that Ctrl-C in a terminal does not end it.

    Args:
        explain: returns the sentence for `why_ended`, of the exit code (None: it still runs, negative: a signal) and
            of what the command has written to its stderr. By default both are told as they are.

    Raises:
        OSError: there is no such command here.
    """

    def __init__(
        self, name: str, argv: Sequence[str], *, explain: Callable[[int | None, str], str] | None = None
    ) -> None:
        self.name = name
        self._explain = functools.partial(ended, argv[0]) if explain is None else explain
        # A file and no pipe: nobody has to read it, and a command that writes much never waits.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the stream
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                bufsize=0,
                start_new_session=True,
            )
        except OSError:
            self._said.close()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.reads, self.writes = self._stdout.fileno(), self._stdin.fileno()
        for end in (self.reads, self.writes):
            os.set_blocking(end, False)

    @override
    def why_ended(self) -> str:
        if self._said.closed:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its stdout may end before it does
            self._process.wait(_PATIENCE)
        size = os.fstat(self._said.fileno()).st_size
        # Read by position, because the command shares the offset of this file, where it writes next.
        said = os.pread(self._said.fileno(), _MOST_SAID, max(0, size - _MOST_SAID))
        return self._explain(self._process.returncode, said.decode(errors="replace").strip())

    @override
    def close(self, *, at_once: bool = False) -> None:
        self._stdin.close()
        self._stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if at_once else _PATIENCE)
        with contextlib.suppress(ProcessLookupError):  # what it started may have outlived it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._said.close()


def ended(command: str, code: int | None, said: str) -> str:
    """Return in a sentence how a command has ended, with the last lines of what it has said."""
    if code is None:
        how = "has closed its output"
    elif code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit code {code}"
    lines = [line.strip() for line in said.splitlines() if line.strip()][-5:]
    return f"{command} {how}{': ' if lines else ''}{'; '.join(lines)}".rstrip(".")

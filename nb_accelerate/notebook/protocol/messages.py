"""The messages between the kernel and a rank: frozen dataclasses. Nothing else crosses the channel.

::

    kernel                                       rank
      Setup, then Call ... ----------------------->
      <----------------------------- Ready
      <----------------------------- Result or Failure
      Join, RunCell ... -------------------------->      a persistent rank
      <----------------------------- Display ..., InputRequest
      InputReply --------------------------------->
      <----------------------------- CellEnd
      <----------------------------- ThreadFailed  at any time, from another thread
      Quit --------------------------------------->      leaves its groups, flushes, ends

What is printed does not travel here but through two pipes of its own (see `notebook.worker.streams`), so that
what a rank wrote last is still readable after it was killed. What users' code made (functions, results, exceptions)
travels as a `Parcel`, already pickled, so that reading a message never runs users' code.
"""

from __future__ import annotations

import pickle
import signal
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nb_accelerate.base.seam import StoreSpec


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A pickled object."""

    pickled: bytes = b""  # the pickle stream; empty when it lies in the segment
    # Lengths in bytes of the pickle stream and of each out-of-band buffer behind it in the segment that comes with the
    # message as a descriptor; empty when there is no segment.
    sizes: tuple[int, ...] = ()


NOTHING = Parcel(pickled=pickle.dumps(None))  # the value of most cells


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Set up a rank, before it runs anything."""

    rank: int
    environ: Mapping[str, str]  # its whole environment, not a difference, unless it `keeps_environ`
    cwd: str  # working directory; "" if the kernel's has been deleted
    sys_path: tuple[str, ...]  # the module search path of the kernel as it is now
    argv: tuple[str, ...]
    num_threads: int
    # Its `RandomStates` or None, and its settings; a parcel, since they may be more than a socket's buffer takes.
    notebook: Parcel
    # Through which the ranks meet; its descriptor is the one in `RankEnds`. None if a `Join` will say.
    store: StoreSpec | None = None
    shows_displays: bool = False  # a notebook can show what a launched function displays; else it is printed
    keeps_environ: bool = False  # `environ` is added to the environment that the rank has, on another machine


@dataclass(frozen=True, kw_only=True)
class Call:
    """Run a function."""

    # Holds ``(function, args, kwargs)``; None for a rank that has them in memory since it was forked.
    parcel: Parcel | None


@dataclass(frozen=True, kw_only=True)
class Quit:
    """End the rank. Sent by the kernel when every rank has answered, and by a server that ends."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The rank is set up and will take calls."""

    pid: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """The function returned."""

    parcel: Parcel
    dropped: tuple[str, ...] = ()  # names of models of the notebook that it has trained and not returned


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of a traceback. The kernel has the sources, so text is looked up there."""

    filename: str
    lineno: int
    name: str


@dataclass(frozen=True, kw_only=True)
class ErrorReport:
    """An exception as data."""

    type_name: str
    message: str
    frames: tuple[Frame, ...]  # outermost first; frames of the worker itself are left out
    notes: tuple[str, ...] = ()
    cause: ErrorReport | None = None  # what it was raised from, or while handling
    explicit_cause: bool = False  # true for ``raise ... from``
    last_lines: tuple[str, ...] = ()  # what follows the frames in a plain traceback (several lines for a `SyntaxError`)
    group: tuple[ErrorReport, ...] = ()  # the exceptions in an exception group, or the first of them
    group_size: int = 0
    absent: str = ""  # the variable of ``__main__`` that was looked for in vain; "" if it was raised for another reason
    absent_in: str = ""  # the name of the innermost code of ``__main__`` then


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The function raised, or the rank could not do what it was told."""

    report: ErrorReport
    parcel: Parcel | None  # the exception itself, or None if it cannot be pickled
    when: float  # `time.monotonic` on this machine at which it was caught, to order failures of several ranks
    # The exception only says that another rank went away, so it is a consequence and not a cause.
    peer_lost: bool = False
    result_of_call: bool = True  # the user's function raised it; False if the rank failed before it ran that.
    returned: bool = False  # the function did return, and it is its value that cannot travel


@dataclass(frozen=True, kw_only=True)
class ThreadFailed:
    """A thread of the rank that belongs to this package has failed, so that the rank is of no use any more."""

    name: str
    error: str  # type and text of what it has raised, in one line
    traceback: str


@dataclass(frozen=True, kw_only=True)
class Join:
    """Leave all process groups, and join the other ranks of the pool in a new one. Answered like a `Call`."""

    rendezvous: int  # number of the rendezvous, counted by the pool
    environ: Mapping[str, str]  # variables to set, such as ``MASTER_ADDR``
    store: StoreSpec  # through which the ranks meet; its descriptor comes along


@dataclass(frozen=True, kw_only=True)
class CutOff:
    """Break off the collective that this rank is in. Sent by `RankHandle.cut_off`."""

    rendezvous: int  # number of the rendezvous that made the group of the collective
    peers: tuple[int, ...]  # process ids of the other ranks; connections to them are broken off
    # Addresses and ports of other ranks, in the place of process ids where ranks are on several machines. Port 0 stands
    # for all.
    addresses: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunCell:
    """Run a cell in the rank's shell."""

    code: str
    filename: str  # what tracebacks call it; the kernel knows the text by that name
    source: str  # the text of the whole cell, with the line of the magic
    above: int = 0  # lines of it that come before the body
    is_python: bool = False  # there are no magics in it
    names: Parcel | None = None  # what to define or change first, packed, see `notebook.worker.received`; or None
    wants_value: bool = False
    wants_accelerator: bool = False
    num_ranks: int = 1
    converts: bool = False  # it is written for one process, whose numbers it is to have


@dataclass(frozen=True, kw_only=True)
class Display:
    """Something that a rank displays. Its position among what is printed is marked in the output pipe."""

    kind: str  # ``result``, ``display_data``, ``update_display_data`` or ``clear_output``
    content: str  # content of the Jupyter message, as JSON


@dataclass(frozen=True, kw_only=True)
class CellEnd:
    """A cell has ended."""

    answer: Result | Failure
    bound: tuple[str, ...] = ()  # names that the cell bound, or bound to something else
    unbound: tuple[str, ...] = ()
    steps: Mapping[str, int]  # how many collectives each process group has seen, by the group's name
    trained: tuple[str, ...] = ()  # names of models that it has trained; told by rank 0
    has_names: bool = True  # the names that came with the cell were defined, or there were none
    gone: tuple[int, ...] = ()  # ids of objects that the rank was sent and that it has no more


@dataclass(frozen=True, kw_only=True)
class InputRequest:
    """Ask the user for a line, on behalf of a debugger. The `InputReply` has the same number."""

    number: int
    prompt: str


@dataclass(frozen=True, kw_only=True)
class DebuggerResumed:
    """The debugger lets the code go on. It may ask again at the next line, or never."""


@dataclass(frozen=True, kw_only=True)
class InputReply:
    """The line that was asked for, without its end; None if nobody can be asked."""

    number: int
    text: str | None


NUDGE = signal.SIGURG  # Signal that follows SIGINT. Programs that do not handle it ignore it, and few handle it.


@dataclass(frozen=True, kw_only=True)
class RankEnds:
    """Open file descriptors. The rank owns them."""

    control: int  # its end of the channel
    stdout: int  # write end of the pipe for everything Python prints and C code writes to descriptor 1
    stderr: int  # write end of the pipe for what C code writes to descriptor 2
    stacks: int  # a socket; it takes requests (`notebook.worker.stack_writer`), and stacks of the main thread
    page: int  # the page on which it says how far it is, and reads which call or cell SIGINT is meant for
    store: int = -1  # the file that is the store through which ranks meet, or a listening socket to serve it on; or -1

    def as_tuple(self) -> tuple[int, ...]:
        """Return the open ones in the order of the fields, as they are sent."""
        return tuple(fd for fd in (getattr(self, field.name) for field in fields(self)) if fd >= 0)

    @classmethod
    def from_tuple(cls, fds: tuple[int, ...]) -> RankEnds:
        """Return what `as_tuple` was called on."""
        return cls(**dict(zip((field.name for field in fields(cls)), fds, strict=False)))

"""What can go wrong, as types.

An exception that user code raises in a rank is *not* wrapped: it arrives in the notebook with its own
type. Every error here survives pickling, because it travels from ranks to the kernel. What is shown of one, instead of
all its frames, is in `nb_accelerate.errors.traceback_lines`.
"""

from __future__ import annotations

import signal
from typing import Any

from nb_accelerate.errors.traceback_lines import ShortTraceback


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor, which has rows of many lengths, was left as it is by ``pad_across_processes``."""


class NbAccelerateError(Exception):
    """Base of every error this package defines.

    Subclasses carry fields, not only text. Pickling keeps all of them: an instance is rebuilt without calling
    ``__init__`` again, so that a subclass is free to choose its constructor.
    """

    _render_traceback_ = ShortTraceback()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(cls: type[NbAccelerateError], args: tuple[Any, ...], fields: dict[str, Any]) -> NbAccelerateError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class ConfigError(NbAccelerateError, ValueError):
    """An option was given a value that cannot be.

    Attributes:
        options: names of the arguments of a launch that the text is about. Command lines have other names for some.
    """

    def __init__(self, message: str = "", *, options: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.options = options


class UnknownArgumentError(NbAccelerateError, TypeError):
    """A call has an argument that the function or class does not take."""


class NotATensorError(NbAccelerateError, TypeError):
    """An object is where only tensors, and containers of tensors, can be."""


class MissingDependencyError(NbAccelerateError, ImportError):
    """A package that this call needs is not installed, or an older version than it needs.

    Attributes:
        package: its name on the package index.
    """

    def __init__(
        self, package: str, *, needed_for: str, installed: str | None = None, lowest: str | None = None
    ) -> None:
        if installed is None:
            text = f"the package {package!r}, which is not installed. Run: pip install {package}"
        else:
            text = f"{package} {lowest} or newer, but {installed} is installed. "
            text += f"Run: pip install '{package}>={lowest}', and restart"
        super().__init__(f"{needed_for} needs {text}")
        self.package = package


class NotPreparedError(NbAccelerateError, RuntimeError):
    """A method was called before the objects it works on went through ``prepare``."""


class CollectiveMismatchError(NbAccelerateError, RuntimeError):
    """Ranks handed different structures, shapes or dtypes to the same collective, or called different ones."""


DistributedOperationException = CollectiveMismatchError  # its name in Hugging Face accelerate


class DispatchError(NbAccelerateError, RuntimeError):
    """Rank 0, which reads the data of all ranks, could not go on."""


class CheckpointError(NbAccelerateError, RuntimeError):
    """A checkpoint lacks something, was cut off, or does not fit what it is loaded into."""


class PlacedModelError(NbAccelerateError, RuntimeError):
    """A model that was placed by a device map cannot be moved, or trained, as it was asked to."""


class CellSyntaxError(NbAccelerateError):
    """A cell for the ranks does not compile; no rank has seen it."""


class LaunchError(NbAccelerateError, RuntimeError):
    """Ranks could not be started, or did not end as they should.

    Attributes:
        stacks: what ranks were doing, by rank, as far as it is known.
    """

    def __init__(self, message: str, *, stacks: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.stacks = stacks or {}


class ShippingError(LaunchError, TypeError):
    """Something cannot be pickled, so it cannot travel between the notebook and a rank.

    Attributes:
        path: where the object sits in what was sent, e.g. ``args[0].lock``.
        is_final: no way of starting ranks helps; the message says what to write instead.
    """

    def __init__(self, message: str, *, path: str = "", is_final: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.is_final = is_final


class TooLargeError(ShippingError):
    """Something is so large that it is only copied to every rank when that is asked for.

    Attributes:
        size: in bytes.
    """

    def __init__(self, message: str, *, size: int) -> None:
        super().__init__(message)
        self.size = size


class PoolError(LaunchError):
    """The persistent ranks are not in a state in which this can be done."""


class StartError(LaunchError):
    """A rank could not be started."""


class MachineError(LaunchError):
    """The ranks of another machine have failed, or nothing is heard of that machine any more.

    Attributes:
        address: of that machine.
    """

    def __init__(self, message: str, *, address: str) -> None:
        super().__init__(message)
        self.address = address


class RankError(LaunchError):
    """A rank failed.

    Attributes:
        rank: which one.
        output: the last lines it wrote, as text.
    """

    def __init__(self, message: str, *, rank: int, output: str = "", stacks: dict[int, str] | None = None) -> None:
        super().__init__(message, stacks=stacks)
        self.rank = rank
        self.output = output


class RankDiedError(RankError):
    """A rank's process ended without an answer.

    Attributes:
        exitcode: as in `multiprocessing.Process.exitcode`: the exit code, or minus the signal's number.
    """

    def __init__(self, message: str, *, exitcode: int, **of_rank: Any) -> None:
        super().__init__(message, **of_rank)
        self.exitcode = exitcode

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended the process, or None if it exited by itself."""
        return signal.Signals(-self.exitcode) if self.exitcode < 0 else None


class RemoteError(RankError):
    """A rank raised an exception that cannot be rebuilt here.

    Attributes:
        type_name: the name of its type in the rank.
    """

    def __init__(self, message: str, *, type_name: str, **of_rank: Any) -> None:
        super().__init__(message, **of_rank)
        self.type_name = type_name


class DeadlineError(LaunchError, TimeoutError):
    """A run took longer than the ``timeout`` it was given."""

    def __new__(cls, *args: Any, **_: Any) -> DeadlineError:
        """Made by TimeoutError."""
        # Of the two built-in bases OSError has the larger layout, but RuntimeError comes first in the order.
        return TimeoutError.__new__(cls, *args)


class DeadlockError(LaunchError):
    """Ranks wait in collectives for others that have come to the end, or do not run this cell.

    It is raised when nobody is left who could come, for 30 s: all other ranks run no code of users, no thread of users
    lives in any rank, and no process of any rank has computed meanwhile. Other waits are told, and not ended. On CPUs
    only, because a wait for a device may look the same. PyTorch itself would wait for 30 minutes with gloo, and for 10
    with NCCL (https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group).
    """

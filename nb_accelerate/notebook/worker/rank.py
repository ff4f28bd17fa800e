"""The main loop of a rank: set up the process, answer calls, and leave.

::

    descriptors in hand -> streams -> interrupt gate -> dies with its parent -> Setup -> Ready
        -> Call -> Result or Failure -> Call ... -> Quit -> groups closed, exit handlers, flush, exit

A rank that stays for cells has the same loop; what it does with them is in `notebook.worker.cell`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import override

from nb_accelerate.base.helper_threads import tell_failures
from nb_accelerate.base.imported import imported
from nb_accelerate.base.progress_page import install
from nb_accelerate.base.seam import training_half
from nb_accelerate.errors import StartError
from nb_accelerate.notebook.diagnostics.report import readable
from nb_accelerate.notebook.diagnostics.stacks import DUMP_SIGNAL
from nb_accelerate.notebook.protocol.channel import Channel
from nb_accelerate.notebook.protocol.messages import Call, CellEnd, Failure, InputReply, Quit, Ready, ThreadFailed
from nb_accelerate.notebook.protocol.random_states import RandomStates  # noqa: TC001 - imported before ranks unpickle one
from nb_accelerate.notebook.protocol.settings import begin_settings
from nb_accelerate.notebook.protocol.shipping import unpack
from nb_accelerate.notebook.worker.alarm import Alarm
from nb_accelerate.notebook.worker.call import answer, fail
from nb_accelerate.notebook.worker.groups import has_group
from nb_accelerate.notebook.worker.interrupt import InterruptGate
from nb_accelerate.notebook.worker.patches.bars import bars_in_panel
from nb_accelerate.notebook.worker.patches.loaders import fork_by_default, spawn_by_value
from nb_accelerate.notebook.worker.patches.trainers import trainers_as_loops
from nb_accelerate.notebook.worker.patches.whole_files import save_whole_files
from nb_accelerate.notebook.worker.server.interpreter import imports_from
from nb_accelerate.notebook.worker.server.limits import explain_resource_errors
from nb_accelerate.notebook.worker.server.process_tree import die_with_parent, set_name
from nb_accelerate.notebook.worker.stack_writer import answer_requests
from nb_accelerate.notebook.worker.streams import replace_streams, send_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import ModuleType

    from nb_accelerate.notebook.protocol.messages import RankEnds, Setup
    from nb_accelerate.notebook.protocol.shipping import Packed
    from nb_accelerate.notebook.worker.cell import PersistentRank


def run_rank(
    ends: RankEnds,
    mark: bytes,
    parent: int,
    *,
    scratch: str,
    inherited: tuple[Any, Any, Any] | None = None,
    broken: BaseException | None = None,
    own_path: Sequence[str] | None = None,
) -> NoReturn:
    """Run a rank in a prepared process (see `prepare_process`) until the kernel sends `Quit` or ends.

    Args:
        scratch: a folder for what multiprocessing puts into files; the process that forked this one removes it.
        broken: why this process cannot work (a preloaded module failed to import, say); told to the kernel.
        own_path: `sys.path` for imports of this package; by default the current one, before the kernel's is set.
    """
    # Done before any output and any signal: inherited streams belong to the process that forked this one.
    replace_streams(ends.stdout, ends.stderr, mark)
    if sys.version_info < (3, 11):
        os.register_at_fork(before=functools.partial(time.sleep, _FORK_PAUSE))
    page = install(ends.page, functools.partial(send_record, mark))
    gate = InterruptGate(page)
    channel = Channel.from_fd(ends.control)
    tell_failures(functools.partial(_tell_failure, channel, os.getpid()))
    # Done before the first wait: nothing else would end a rank whose server was killed meanwhile.
    die_with_parent(parent)
    multiprocessing.current_process()._config["tempdir"] = scratch  # type: ignore[attr-defined] # noqa: SLF001
    faulthandler.register(DUMP_SIGNAL, file=ends.stacks, all_threads=False)
    alarm = Alarm()
    answer_requests(ends.stacks, alarm)
    atexit._clear()  # noqa: SLF001 - what runs at the end of this process is what is registered from here on
    sys.path[:] = own_path = list(own_path or sys.path)
    store: object = None
    is_usable = False
    rank = os.getpid()
    persistent: PersistentRank | None = None
    try:
        setup, fds = channel.recv()
        try:
            set_name(f"nb-rank{setup.rank}")
            if broken is not None:
                raise broken
            with explain_resource_errors():
                random, settings, modules = unpack(setup.notebook, fds)
                sys.meta_path.append(SentModules(modules))
                store = _set_up(setup, random, settings, ends.store)
        except Exception as error:
            # The rank goes on, and answers nothing but `Quit`: the kernel reads why it is of no use.
            _send(channel, *fail(error, result_of_call=False))
        else:
            is_usable = True
            channel.send(Ready(pid=os.getpid()))
        while True:
            message, fds = channel.recv()
            if isinstance(message, Quit):
                break
            if isinstance(message, InputReply):  # to a debugger that an interrupt has ended meanwhile
                continue
            if isinstance(message, Call):
                if not is_usable:  # the kernel sent it before it read the Failure
                    continue
                load = functools.partial(_load, message, fds, inherited)
                # A rank that runs cells shows displays by its shell.
                shows = setup.shows_displays and persistent is None
                with _displays(channel, mark, own_path) if shows else contextlib.nullcontext():
                    answered, packed = answer(load, gate, fds)
                    _end_if_forked(rank, answered)
                _send(channel, answered, packed)
                continue
            if persistent is None:
                # Imported for the first cell, because a launched function does not need IPython.
                with imports_from(own_path):
                    from nb_accelerate.notebook.worker.cell import PersistentRank

                    persistent = PersistentRank(channel, gate, mark, alarm)
            end, packed = persistent.answer(message, fds)
            _end_if_forked(rank, end)
            _send(channel, end, packed)
    except (EOFError, BrokenPipeError):
        os._exit(1)  # the kernel is gone; nobody is left to tell
    _leave()
    del store  # until here: the other ranks may have needed it to leave
    os._exit(0)


@contextlib.contextmanager
def _displays(channel: Channel, mark: bytes, own_path: Sequence[str]) -> Iterator[None]:
    """Send what a function displays to the notebook, and show its figures when it has returned; stop at breakpoints."""
    with imports_from(own_path):
        from nb_accelerate.notebook.worker.debugger import InputRequests, debug_with
        from nb_accelerate.notebook.worker.shell import DisplayPort, send_displays, show_figures
    send_displays(DisplayPort(channel, mark))
    debug_with(InputRequests(channel))
    yield
    show_figures()


def _load(message: Call, fds: tuple[int, ...], inherited: tuple[Any, Any, Any] | None) -> tuple[Any, Any, Any]:
    call = inherited if message.parcel is None else unpack(message.parcel, fds)
    assert call is not None
    return call


def _send(channel: Channel, message: object, packed: Packed | None) -> None:
    # The cell ends with the answer: what it has printed goes before.
    _flush()
    channel.send(message, packed.fds if packed else ())
    if packed:
        packed.close()


def _tell_failure(channel: Channel, rank: int, name: str, error: BaseException) -> None:
    """Tell the kernel that a helper thread of this rank has failed, for which the kernel ends the rank."""
    if os.getpid() != rank:  # users' code has forked it from the rank, and it has the same channel
        raise error
    try:
        text = " ".join("".join(traceback.format_exception_only(error)).split())
        lines = readable("".join(traceback.format_exception(error)))
        channel.send(ThreadFailed(name=name, error=readable(text), traceback=lines))
    except BaseException:  # nothing can be told any more, and the kernel notices when the rank ends
        os._exit(os.EX_SOFTWARE)


def patch_libraries() -> None:
    """Change what libraries do on ranks: spawned workers, progress bars, trainers, saved files.

    A server of warm ranks calls it once; what is forked from that has the changes.
    """
    fork_by_default()
    spawn_by_value()
    bars_in_panel()
    trainers_as_loops()
    save_whole_files()


# Seconds before a rank forks, on Python 3.10. There, a process that is forked while a thread of C++ enters Python waits
# for ever for a lock of the interpreter. Threads of gloo enter it when a collective has ended, to free its tensors, and
# workers of a loader are often forked just then.
_FORK_PAUSE = 0.01


def prepare_process(*, is_fork: bool, is_patched: bool = False) -> Exception | None:
    """Do what every rank needs, whichever it becomes. Return what has failed, for `run_rank` to tell, or None."""
    try:
        if not is_patched:
            patch_libraries()
        if not is_fork:
            main = types.ModuleType("__main__")
            main.__builtins__ = __builtins__  # type: ignore[attr-defined]
            sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the second: see `pack_call`
    except Exception as error:
        return error
    return None


def _set_up(setup: Setup, random: RandomStates | None, settings: dict[str, bytes], store_fd: int) -> object:
    """Set this process as `setup` says. Return the access to the store, which must live as long as the rank."""
    for name in [name for name in os.environ if not setup.keeps_environ and name not in setup.environ]:
        del os.environ[name]
    for name, value in setup.environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    try:
        os.chdir(setup.cwd)
    except OSError as error:
        why = f"{setup.cwd}: {error.strerror}" if setup.cwd else "it has been deleted"
        raise StartError(
            f"ranks cannot work in the working directory of this process ({why}). Change to another one first, with "
            f"os.chdir('/path/of/a/folder') or %cd"
        ) from None
    sys.argv[:] = setup.argv
    torch = imported("torch")
    if torch is not None:
        # OMP_NUM_THREADS is read once, when torch is loaded; in a forked rank that was long ago.
        torch.set_num_threads(setup.num_threads)
    distributed = imported("torch.distributed")
    if distributed is not None and distributed.is_available():
        distributed.set_debug_level_from_env()  # TORCH_DISTRIBUTED_DEBUG too is read once
    store = None if setup.store is None else training_half().reach_store(setup.store, store_fd)
    if random is not None:
        random.use()
    sys.path[:] = setup.sys_path  # now that what this package needs has been imported; what follows is users' code
    begin_settings(settings)
    return store


def _end_if_forked(rank: int, answer: object) -> None:
    """End this process if users' code has forked it from the rank: it neither answers nor takes the next call."""
    if os.getpid() == rank:
        return
    outcome = answer.answer if isinstance(answer, CellEnd) else answer
    code = 0
    if isinstance(outcome, Failure):
        report, code = outcome.report, 1
        if report.type_name == "SystemExit" and report.message.isascii() and report.message.removeprefix("-").isdigit():
            code = int(report.message) & 0xFF
        else:
            print(f"in a process forked from a rank: {report.type_name}: {report.message}", file=sys.stderr)  # noqa: T201
    _flush()
    os._exit(code)


def _leave() -> None:
    """Do what Python does at the end of a script: destroy groups, end children, run exit handlers, flush."""
    if has_group():
        # A process that leaves without destroying every gloo group sometimes aborts while it is torn down.
        with contextlib.suppress(Exception):
            training_half().close_groups()
    util = imported("multiprocessing.util")
    if util is not None:
        with contextlib.suppress(Exception):
            util._exit_function()  # noqa: SLF001 - its atexit hook was registered before this process was forked
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # noqa: SLF001 - os._exit does not
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None:
            with contextlib.suppress(Exception):  # users' code may have put anything there
                stream.flush()


class SentModules(importlib.abc.MetaPathFinder, importlib.abc.ExecutionLoader):
    """Finds modules that were sent. It stands behind all other finders: what a machine has itself comes first.

    Args:
        modules: the file of each, on the machine of the notebook, and its text.
    """

    def __init__(self, modules: Mapping[str, tuple[str, str]]) -> None:
        self._modules = modules

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname in self._modules else None

    @override
    def get_filename(self, fullname: str) -> str:
        return self._modules[fullname][0]

    @override
    def get_source(self, fullname: str) -> str:
        return self._modules[fullname][1]

    @override
    def is_package(self, fullname: str) -> bool:
        return Path(self.get_filename(fullname)).name == "__init__.py"

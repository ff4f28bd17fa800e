"""IPython's shell in a rank: magics, ``await``, displays and plots as in a notebook, without a kernel."""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import json
import linecache
import os
import sys
import threading
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core import page
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.events import EventManager, available_events
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config
from typing_extensions import override

from nb_accelerate.base.imported import imported
from nb_accelerate.errors import PoolError
from nb_accelerate.errors.out_of_memory import says_out_of_memory
from nb_accelerate.notebook.diagnostics.report import text_of
from nb_accelerate.notebook.protocol.messages import Display
from nb_accelerate.notebook.protocol.output import frame
from nb_accelerate.notebook.worker.debugger import RankDebugger

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from IPython.core.interactiveshell import ExecutionResult

    from nb_accelerate.notebook.protocol.channel import Channel
    from nb_accelerate.notebook.protocol.messages import RunCell


class DisplayPort:
    """Sends displays of this process to the kernel."""

    def __init__(self, channel: Channel, mark: bytes) -> None:
        self._channel = channel
        self._mark = mark
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def show(self, kind: str, content: dict[str, Any]) -> None:
        """Send the content of a Jupyter message."""
        if os.getpid() != self._pid:  # a loader's worker: the channel is not its own
            print((content.get("data") or {}).get("text/plain", ""))  # noqa: T201 - it is users' output
            return
        text = json.dumps(content, default=_encode, skipkeys=True)
        with self._lock:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            self._channel.send(Display(kind=kind, content=text))
            os.write(1, frame(self._mark, b"", "display"))


def _encode(value: object) -> object:
    """Return what JSON can hold in the place of an object: base64 for bytes, such as an image, else its text."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    return str(value)


def make_shell(port: DisplayPort, names: dict[str, Any] | None = None) -> RankShell:
    config = Config()
    config.HistoryManager.enabled = False  # no database, and no thread that writes to it
    config.InteractiveShell.cache_size = 0  # Out[...] would keep every tensor that was shown
    config.InteractiveShell.colors = "nocolor"
    config.Completer.use_jedi = False  # slower than an answer may take
    config.IPCompleter.use_jedi = False
    RankShell.port = port
    if InteractiveShell.initialized():
        InteractiveShell.clear_instance()
    # IPython's advice after sys.exit(), for a terminal.
    warnings.filterwarnings("ignore", message="To exit: use 'exit'")
    shell = RankShell.instance(config=config, user_module=sys.modules["__main__"], user_ns=names)
    assert isinstance(shell, RankShell)
    for kind in ("cell", "line"):
        shell.magics_manager.register_function(_not_here, magic_kind=kind, magic_name="distributed")
    return shell


def _not_here(*_: str) -> NoReturn:
    raise PoolError("this runs on a rank already: %distributed and %%distributed are for the notebook")


_WIDGET = "application/vnd.jupyter.widget-view+json"

_NO_WIDGETS = (
    "A widget of a rank cannot be shown: widgets belong to the notebook's process. On ranks, use tqdm or "
    "nb_accelerate.progress for a bar, display(HTML(...)) or matplotlib for the rest."
)


class DisplaySender(DisplayPublisher):
    """Sends what ``display``, ``update_display`` and ``clear_output`` are given."""

    @override
    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: object = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        kind = "update_display_data" if update else "display_data"
        content = {"data": _without_widgets(data), "metadata": metadata or {}, "transient": transient or {}}
        RankShell.port.show(kind, content)

    @override
    def clear_output(self, wait: bool = False) -> None:
        RankShell.port.show("clear_output", {"wait": wait})


class _ValueHook(DisplayHook):
    """Sends the value of a cell's last expression."""

    _shown = 0  # the id of the value that _ was bound to

    @override
    def __call__(self, result: object = None) -> None:
        super().__call__(result)  # type: ignore[no-untyped-call]
        if result is not None:
            # IPython keeps no value after a semicolon, which is to hide it from the page and not from --out.
            self.fill_exec_result(result)  # type: ignore[no-untyped-call]

    def update_user_ns(self, result: object) -> None:
        """Bind ``_`` to a value, unless the user has a variable of that name. No earlier value is kept."""
        variables = RankShell.instance().user_ns
        present = variables.get("_", "")
        if id(present) == self._shown or (isinstance(present, str) and present == ""):
            variables["_"] = result
            self._shown = id(result)

    def quiet(self) -> bool:
        try:
            return bool(super().quiet())  # type: ignore[no-untyped-call]
        except Exception:  # a magic that Python cannot read
            return False

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        data = _without_widgets(format_dict)
        RankShell.port.show("result", {"data": data, "metadata": md_dict or {}, "transient": {}})


def _without_widgets(data: dict[str, Any]) -> dict[str, Any]:
    """Return what is displayed; of a widget, which the front end looks for in the notebook's process, what to write."""
    # Users may give `display` what is no dictionary, which the notebook is told of.
    return {"text/plain": _NO_WIDGETS} if isinstance(data, dict) and _WIDGET in data else data


class _CellCompiler(CachingCompiler):
    """Compiles a cell under the name and with the line numbers that it has in the notebook."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.filename = ""
        self.source = ""
        self.above = 0

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return self.filename or str(super().get_code_name(raw_code, transformed_code, number))

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        name: str = super().cache(transformed_code, number, raw_code)
        if name == self.filename:
            lines = self.source.splitlines(keepends=True)
            linecache.cache[name] = (len(self.source), None, lines, name)
        return name

    def ast_parse(self, source: str, filename: str = "<unknown>", symbol: str = "exec") -> Any:
        tree = super().ast_parse(source, filename, symbol)
        # The body starts below the line of the magic.
        return ast.increment_lineno(tree, self.above) if filename == self.filename and self.above else tree


class _Events(EventManager):
    """Calls what is registered for before and after a cell. Unlike IPython's, an interrupt of it ends the cell."""

    @override
    def trigger(self, event: str, *args: Any, **kwargs: Any) -> None:
        for function in list(self.callbacks[event]):
            try:
                function(*args, **kwargs)
            except Exception:
                print(f"Error in callback {function} (for {event}):")  # noqa: T201 - in the cell, as IPython does
                self.shell.showtraceback()


class RankShell(InteractiveShell):
    """The shell of a rank. `make_shell` creates it."""

    port: DisplayPort
    is_rank = True
    compiler_class = Type(_CellCompiler)
    displayhook_class = Type(_ValueHook)
    display_pub_class = Type(DisplaySender)

    def __init__(self, **options: Any) -> None:
        self._is_plain = False
        self._event_loop: asyncio.AbstractEventLoop | None = None
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self.loop_runner = self._run_coroutine
        self.InteractiveTB.debugger_cls = RankDebugger
        self.set_hook("show_in_pager", page.as_hook(page.display_page), 99)  # type: ignore[no-untyped-call]

    @override
    def init_events(self) -> None:
        super().init_events()  # type: ignore[no-untyped-call]
        registered = self.events.callbacks
        self.events = _Events(self, available_events)
        self.events.callbacks.update(registered)

    def run(self, cell: RunCell) -> ExecutionResult:
        """Run a cell. What it raises is in the result, and is not printed."""
        compiler = self.compile
        assert isinstance(compiler, _CellCompiler)
        compiler.filename, compiler.source, compiler.above = cell.filename, cell.source, cell.above
        # A display hook looks there whether the cell ends with a semicolon.
        assert self.history_manager is not None
        self.history_manager.input_hist_parsed = [cell.code]
        self._is_plain = cell.is_python
        try:
            result: ExecutionResult = self.run_cell(cell.code, store_history=False)  # type: ignore[no-untyped-call]
            return result
        finally:
            # Code that the cell runs later, %timeit's say, has no place in the notebook.
            compiler.filename = ""

    def python_of(self, cell: RunCell) -> str:
        """Return a cell with its magics as calls of functions; as it was written if that fails."""
        try:
            return cell.code if cell.is_python else self.transform_cell(cell.code)
        except Exception:  # of a transformer that users' code has registered
            return cell.code

    @override
    def transform_cell(self, raw_cell: str) -> str:
        if self._is_plain:
            self._is_plain = False  # what the cell has IPython run is another text
            return raw_cell
        return str(super().transform_cell(raw_cell))  # type: ignore[no-untyped-call]

    @override
    def should_run_async(self, raw_cell: str, **options: Any) -> bool:
        """Return whether a cell awaits: IPython compiles it once more to know, which is needless for most."""
        text = options.get("transformed_cell") or raw_cell
        if "await" not in text and "async" not in text:
            return False
        return bool(super().should_run_async(raw_cell, **options))

    @override
    def init_virtualenv(self) -> None:
        """Do nothing: the path of a rank is the kernel's."""

    @override
    def enable_gui(self, gui: str | None = None) -> None:
        """Do nothing, and let ``%matplotlib``, which calls it, go on: a rank opens no windows."""

    def ask_exit(self) -> None:
        """Answer ``exit`` and ``quit``, which call it."""
        print("A rank ends with %distributed stop.", file=sys.stderr)  # noqa: T201 - an answer to users' code

    @override
    def showtraceback(self, *args: Any, **options: Any) -> None:
        # An error that ends a cell is raised in the notebook; one that a magic such as %run caught is shown here.
        if options.get("running_compiled_code") or options.get("exception_only"):
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
            if sys.version_info >= (3, 12):
                sys.last_exc = sys.last_value
            return
        super().showtraceback(*args, **options)

    @override
    def debugger(self, force: bool = False) -> None:
        if force and getattr(sys, "last_value", None) is None:
            print("No cell has failed on this rank.", file=sys.stderr)  # noqa: T201 - an answer to users' code
            return
        try:
            super().debugger(force)  # type: ignore[no-untyped-call]
        finally:
            self.InteractiveTB.pdb = None  # it would keep every frame it has seen

    @override
    def _showtraceback(self, etype: type[BaseException], evalue: BaseException, stb: list[str]) -> None:
        print("\n".join(stb), file=sys.stderr)  # noqa: T201 - it is users' output

    @override
    def showsyntaxerror(self, *args: Any, **options: Any) -> None:
        """Print nothing: the error is raised in the notebook."""

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a cell that awaits. An interrupt cancels it, or it would go on in the next cell that awaits."""
        loop = self._event_loop
        if loop is None or loop.is_closed():
            loop = self._event_loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)  # asyncio.run() in an earlier cell leaves none
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except KeyboardInterrupt:
            if not task.done():
                task.cancel()
                loop.run_until_complete(task)
            raise


def clear_frames_out_of_memory() -> None:
    """Free the variables of functions in which memory did not suffice, or a smaller batch would not fit either."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None and says_out_of_memory(type(error).__qualname__, text_of(error)):
        for raised in (error, error.__cause__, error.__context__):
            traceback.clear_frames(None if raised is None else raised.__traceback__)


def send_displays(port: DisplayPort) -> None:
    """Send to the notebook what a launched function displays."""
    if not InteractiveShell.initialized():
        _make_when_asked_for(port)
        return
    # This process is a fork of the kernel, and the shell the kernel's.
    RankShell.port = port
    InteractiveShell.instance().display_pub = DisplaySender(parent=None)  # type: ignore[no-untyped-call]
    # The kernel's figures, which the kernel shows.
    helpers: Any = imported("matplotlib._pylab_helpers")
    inline: Any = imported("matplotlib_inline.backend_inline")
    if helpers is not None:
        helpers.Gcf.figs.clear()
    if inline is not None:
        inline.show._draw_called = False  # noqa: SLF001 - set when the kernel drew; nothing public resets it
        inline.show._to_draw = []  # noqa: SLF001 - as above


def _make_when_asked_for(port: DisplayPort) -> None:
    lock = threading.RLock()  # several threads may show something first

    def initialized(_: type[InteractiveShell]) -> bool:
        with lock:
            if "initialized" in vars(InteractiveShell):
                del InteractiveShell.initialized  # the one of its base class shows again
                make_shell(port, names={})  # or its own would take the place of the function's globals
        return True

    # `display` and `get_ipython` ask this before anything else.
    InteractiveShell.initialized = classmethod(initialized)  # type: ignore[assignment, method-assign]


def show_figures() -> None:
    """Show the figures that a function has drawn and not shown, as a notebook does at the end of a cell."""
    inline: Any = imported("matplotlib_inline.backend_inline")
    if inline is not None:
        with contextlib.suppress(Exception):  # the function has returned, and its value is what matters
            inline.flush_figures()

"""Run a notebook from top to bottom in a new kernel of this Python, with its progress as text."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import nbformat
import zmq
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from typing_extensions import override

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.display.drawing.block import Block, can_redraw
from nb_accelerate.notebook.display.drawing.lines import PANEL
from nb_accelerate.notebook.display.frontend import FROM_TERMINAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import TextIO

    from nbformat import NotebookNode


class CellProgress:
    """Print number and title of each cell, its output, and its seconds. On a terminal panels stay at the bottom."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_fresh_line = True
        self._block = Block(out) if can_redraw(out) else None
        self._panels: dict[str, Sequence[str]] = {}
        self._where = ""

    @property
    def is_live(self) -> bool:
        """Whether panels are shown."""
        return self._block is not None

    @contextlib.contextmanager
    def cell(self, number: int, total: int, title: str) -> Iterator[None]:
        """Print the title of a cell, run the block, and print its seconds."""
        self.lines(f"[{number}/{total}] {title}")
        self._where = f"cell {number} of {total}"
        began = time.monotonic()
        try:
            yield
        finally:
            # A launch that continues in the background, or whose kernel has died, sends no more lines.
            self._panels.clear()
            self._draw()
            self.lines(f"{time.monotonic() - began:.1f} s")

    def text(self, text: str) -> None:
        """Write a piece of output, which may end in the middle of a line."""
        if not text:
            return
        self._is_fresh_line = text.endswith("\n")
        if self._block is not None:
            self._block.hide()
        self._out.write(text)
        self._out.flush()
        if self._block is not None and self._is_fresh_line:
            self._block.show()

    def lines(self, text: str) -> None:
        """Write some lines, on lines of their own."""
        self.text(f"{text}\n" if self._is_fresh_line else f"\n{text}\n")

    def panel(self, name: str, lines: Sequence[str]) -> None:
        """Replace the lines last shown under this name; an empty list removes them."""
        self._panels[name] = lines
        self._draw()

    def _draw(self) -> None:
        if self._block is not None:
            lines = [line for panel in self._panels.values() for line in panel]
            self._block.draw_lines([f"{self._where} · {lines[0]}", *lines[1:]] if lines else [])


_COLOR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class FailedCell:
    """The cell and the error that ended a notebook early."""

    number: int | None  # of the code cell that failed, counted from 1; None if it was none of them
    title: str
    traceback: str

    def render(self, *, color: bool) -> str:
        where = f"cell {self.number} failed: {self.title}" if self.number else f"failed: {self.title}"
        return f"{where}\n{self.traceback if color else _COLOR.sub('', self.traceback)}"


@dataclass(frozen=True, kw_only=True)
class NotebookRun:
    """The result of running a notebook."""

    name: str
    notebook: NotebookNode  # the executed copy, complete up to where it stopped
    failure: FailedCell | None = None
    interrupted: bool = False


def execute(
    path: Path,
    *,
    progress: TextIO,
    env: Mapping[str, str] | None = None,
    change: Callable[[NotebookNode], None] | None = None,
) -> NotebookRun:
    """Run a notebook in a new kernel, whose folder is its own, and return the result, also when a cell fails.

    The kernel always runs in the current Python, even if the notebook names another kernel: a package that can be
    imported here can be imported there. The file is not changed.

    Args:
        progress: where each cell, what it prints, and its seconds are shown while it runs.
        env: the kernel's whole environment; by default it is this process's.
        change: changes the copy that is executed.
    """
    try:
        notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is not a notebook that Jupyter can read: {error}") from error
    if change is not None:
        change(notebook)
    return asyncio.run(_Session(path, notebook, progress, env).run())


def write_notebook(run: NotebookRun, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{run.name}.executed.ipynb"
    nbformat.write(run.notebook, path)  # type: ignore[no-untyped-call]
    return path


def write_page(run: NotebookRun, directory: Path) -> Path:
    """Write the executed notebook as one HTML page into ``directory`` and return its path."""
    from nbconvert import HTMLExporter

    exporter: Any = HTMLExporter(template_name="lab")  # type: ignore[no-untyped-call]
    page, _ = exporter.from_notebook_node(run.notebook, resources={"metadata": {"name": run.name}})
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{run.name}.html"
    path.write_text(page, encoding="utf-8")
    return path


class _Session(NotebookClient):
    """nbclient with a kernel from start to shutdown, that tells what a cell prints and how far its ranks are.

    The first Ctrl-C interrupts the running cell and skips the others, the second ends the kernel. A kernel lives in a
    session of its own, so that the terminal's signal reaches only this process. What the cell started gets its chance
    to clean up, because the kernel gets a real KeyboardInterrupt.
    """

    def __init__(self, path: Path, notebook: NotebookNode, progress: TextIO, env: Mapping[str, str] | None) -> None:
        # With no folders to look in, what is left is the kernel of this very Python; one of the same name
        # that somebody installed for themselves may belong to another environment.
        specs = KernelSpecManager(kernel_dirs=[])
        # The kernel's sockets listen on loopback, which other users of the machine can reach. Newer versions of
        # jupyter_client and of ZeroMQ can encrypt them, and newer kernels warn where that is not done.
        can_encrypt = "transport_encryption" in AsyncKernelManager.class_trait_names() and zmq.has("curve")
        encryption = {"transport_encryption": "auto"} if can_encrypt else {}
        self._manager = AsyncKernelManager(kernel_spec_manager=specs, **encryption)
        super().__init__(notebook, self._manager, resources={"metadata": {"path": str(path.parent)}})
        self.coalesce_streams = True  # since nbclient 0.9; before, a saved notebook has a gap at each message
        self._path = path
        self._progress = CellProgress(progress)
        self._start_options = {} if env is None else {"env": dict(env)}
        if self._progress.is_live:
            self._manager.session.metadata = dict(FROM_TERMINAL)  # of every request
        self._is_stopped = False
        self._is_in_cell = False
        self._actions: list[asyncio.Future[None]] = []

    async def run(self) -> NotebookRun:
        for cell in self.nb.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        self._progress.lines(f"{self._path.name}")
        try:
            with self._signals():
                failure = await self._start() or await self._cells()
        finally:
            for action in self._actions:
                # The kernel ended before it could be told to, or nbclient, which noticed its death, has cleaned up
                # after it at the same time: jupyter_client then sets its own future twice.
                with contextlib.suppress(RuntimeError, asyncio.InvalidStateError):
                    await action
            if self.kc is not None:
                self.kc.stop_channels()
            if self._manager.has_kernel:
                await self._manager.shutdown_kernel()
        self.set_widgets_metadata()
        if self._is_stopped:
            self._progress.lines("interrupted")
            failure = None  # an interrupted cell fails because it was told to
        return NotebookRun(name=self._path.stem, notebook=self.nb, failure=failure, interrupted=self._is_stopped)

    async def _start(self) -> FailedCell | None:
        try:
            await self.async_start_new_kernel(**self._start_options)
            await self.async_start_new_kernel_client()
            reply = await self.async_wait_for_reply(self.kc.kernel_info())  # type: ignore[union-attr]
        except RuntimeError as error:  # what they raise for a kernel that dies while it starts
            return FailedCell(number=None, title="the kernel did not start", traceback=str(error))
        if reply is not None:
            self.nb.metadata["language_info"] = reply["content"]["language_info"]
        return None

    async def _cells(self) -> FailedCell | None:
        indices = [
            index for index, cell in enumerate(self.nb.cells) if cell.cell_type == "code" and cell.source.strip()
        ]
        for number, index in enumerate(indices, start=1):
            if self._is_stopped:
                return None
            cell = self.nb.cells[index]
            title = next(line.strip() for line in cell.source.splitlines() if line.strip()).lstrip("# ")
            with self._progress.cell(number, len(indices), title):
                try:
                    await self.async_execute_cell(cell, index)
                except CellExecutionError as error:
                    return FailedCell(number=number, title=title, traceback=_traceback(cell, error))
                except DeadKernelError:
                    text = "The kernel's process ended while this cell was running."
                    return FailedCell(number=number, title=title, traceback=text)
                finally:
                    self._is_in_cell = False
        return None

    @override
    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        if msg["msg_type"] == "execute_input":
            # A kernel that is interrupted after it received a cell and before it runs it never answers: so wait.
            self._is_in_cell = True
            if self._is_stopped:
                self._interrupt_kernel()
        return super().process_message(msg, cell, cell_index)

    @override
    def output(
        self, outs: list[NotebookNode], msg: dict[str, Any], display_id: str | None, cell_index: int
    ) -> NotebookNode | None:
        content = msg["content"]
        if msg["msg_type"] == "stream":
            self._progress.text(content["text"])
        panel = content["data"].pop(PANEL, None) if msg["msg_type"] == "display_data" else None
        if panel is not None:
            self._progress.panel(panel["id"], panel["lines"])
            if not content["data"]:
                return None
            self._progress.lines(content["data"]["text/plain"])
        return super().output(outs, msg, display_id, cell_index)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        installed = []
        # Threads may not set handlers: there, KeyboardInterrupt ends the run.
        with contextlib.suppress(RuntimeError, ValueError):
            for number, handler in ((signal.SIGINT, self._interrupt), (signal.SIGTERM, self._end)):
                loop.add_signal_handler(number, handler)
                installed.append(number)
        try:
            yield
        finally:
            for number in installed:
                loop.remove_signal_handler(number)

    def _interrupt(self) -> None:
        if self._is_stopped:
            self._end()
        elif self._is_in_cell:
            self._interrupt_kernel()
        self._is_stopped = True

    def _interrupt_kernel(self) -> None:
        self._actions.append(asyncio.ensure_future(self._manager.interrupt_kernel()))

    def _end(self) -> None:
        self._is_stopped = True
        if self._manager.has_kernel:
            self._actions.append(asyncio.ensure_future(self._manager.shutdown_kernel(now=True)))


def _traceback(cell: NotebookNode, error: CellExecutionError) -> str:
    for output in cell.outputs:
        if output.output_type == "error":
            return "\n".join(output.traceback)
    return f"{error.ename}: {error.evalue}"


# Tags of papermill (https://papermill.readthedocs.io): a cell with defaults, and one with the values of a run.
_DEFAULTS, _INJECTED = "parameters", "injected-parameters"


def read_parameters(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the values of pairs such as ``lr=0.1`` by name. They are YAML."""
    import yaml

    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"-p {pair!r} says no value. Write -p {pair}=VALUE")
        try:
            values[name.strip()] = yaml.safe_load(text)
        except yaml.YAMLError:
            values[name.strip()] = text
    for name in values:
        if not str(name).isidentifier():
            raise ConfigError(f"-p {name!r} is not a name that a cell could assign to")
    return values


def set_parameters(notebook: NotebookNode, values: Mapping[str, Any]) -> None:
    """Add the cell with the values of this run, in place of one that an earlier run has added."""
    cells = notebook.cells
    defaults = next((index for index, cell in enumerate(cells) if _DEFAULTS in _tags(cell)), None)
    if defaults is None:
        raise ConfigError(
            "the notebook has no parameters: none of its cells has the tag 'parameters'. Add the tag to the cell that "
            "assigns the defaults"
        )
    parameters = sorted(_assigned(cells[defaults].source))
    for name in values:
        if name not in parameters:
            raise ConfigError(
                f"the notebook has no parameter {name!r}.{suggest(name, parameters)} It has: "
                f"{', '.join(parameters) or 'none'}"
            )
    cells[:] = [cell for cell in cells if _INJECTED not in _tags(cell)]
    lines = ["# Parameters", *(f"{name} = {value!r}" for name, value in values.items())]
    cell = nbformat.v4.new_code_cell("\n".join(lines), metadata={"tags": [_INJECTED]})  # type: ignore[no-untyped-call]
    cells.insert(defaults + 1, cell)


def _tags(cell: NotebookNode) -> Sequence[str]:
    tags: Sequence[str] = cell.metadata.get("tags", ())
    return tags


def _tree(source: str) -> ast.Module:
    """Parse a cell. Lines that are not Python, such as magics, are replaced by empty ones."""
    try:
        return ast.parse(source)
    except SyntaxError:
        lines = ("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
        try:
            return ast.parse("\n".join(lines))
        except SyntaxError:
            return ast.Module([], [])


def _assigned(source: str) -> Iterator[str]:
    for statement in _tree(source).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            yield from (part.id for part in ast.walk(target or ast.Pass()) if isinstance(part, ast.Name))

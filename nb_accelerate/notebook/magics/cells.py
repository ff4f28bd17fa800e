"""``%%distributed``, ``%%rank`` and ``%%local``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import traceback
import uuid
from typing import TYPE_CHECKING, Any

from nb_accelerate.errors import CellSyntaxError, ConfigError, NbAccelerateError, PoolError
from nb_accelerate.errors.traceback_lines import cell_name, lines_instead, show_instead, text_lines
from nb_accelerate.notebook.magics import args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from IPython.core.interactiveshell import InteractiveShell

    from nb_accelerate.errors.traceback_lines import Style
    from nb_accelerate.notebook.magics.auto import AutoMode
    from nb_accelerate.notebook.pool.handle import CellHandle
    from nb_accelerate.notebook.pool.pool import Pool
    from nb_accelerate.notebook.pool.source import CellSource
    from nb_accelerate.rehearsing import Rehearsal


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Show errors about what was asked for, raised inside the block, without a traceback.

    Raises:
        CellSyntaxError: instead of a SyntaxError, which IPython always shows with all frames.
    """
    try:
        yield
    except SyntaxError as error:
        plain = CellSyntaxError(str(error.msg))
        _show_as(plain, lines_instead(error) or functools.partial(_syntax_lines, error))  # a rank's has some
        raise plain from None
    except (NbAccelerateError, NameError) as error:
        _show_as(error, functools.partial(text_lines, error))
        raise


def _show_as(error: BaseException, lines: Callable[[Style], list[str]]) -> None:
    if "_render_traceback_" not in vars(error):  # an error of a rank has one, for the frames there
        show_instead(error, lines)


def _syntax_lines(error: SyntaxError, style: Style) -> list[str]:
    """Return Python's own drawing, with the cell's name in place of a file's."""
    _, *drawing = traceback.format_exception_only(type(error), error)
    cell_label = cell_name(error.filename or "") or error.filename
    return [
        f"{style.where}{cell_label}, line {error.lineno}{style.end}",
        *(line.rstrip("\n") for line in drawing[:-1]),
        f"{style.error}SyntaxError{style.end}: {error.msg}",
    ]


_POOL = args.names_of(args.POOL)
_ENGINE = args.names_of(args.ENGINE)

# ``torch.manual_seed(0)``, ``np.random.seed(0)``, ``set_seed(0)``, ``seed_everything(0)`` ... States are not compared:
# when the same seed is set again, the state can be equal to the one that ranks began with.
_SEEDS = re.compile(r"seed\w*\s*\(")


class Cells:
    """The cell magics."""

    def __init__(self, shell: InteractiveShell, auto: AutoMode, defaults: dict[str, Any]) -> None:
        self._shell = shell
        self._auto = auto
        self._defaults = defaults
        self._autoreloads = False
        # Whether a cell of the notebook has seeded random numbers since ranks were given their states.
        self._is_seeded = False
        # Of each cell that runs now, from the outermost: whether it runs in the notebook.
        self._running: list[bool] = []
        self._has_run_here = True  # whether code of the notebook may have run since ranks were given its settings

    def distributed(self, line: str, cell: str) -> CellHandle | Rehearsal | None:
        """Run the cell on every rank; replaced below by the whole help."""
        return self._run(args.DISTRIBUTED_CELL, f"%%distributed {line}".rstrip(), line, cell)

    def rank(self, line: str, cell: str) -> CellHandle | Rehearsal | None:
        """Run the cell on one rank; replaced below by the whole help."""
        return self._run(args.RANK_CELL, f"%%rank {line}".rstrip(), line, cell)

    def local(self, line: str, cell: str) -> None:
        """Run the cell here; only reached where the input transformer was not asked."""
        with plain_errors():
            if args.LOCAL_CELL.parse(line) is None:
                return
        with self._auto.paused():
            self._shell.run_cell(cell).raise_error()  # type: ignore[no-untyped-call]

    def begin_cell(self, info: Any) -> None:
        """Note, before a cell, where it runs."""
        self._running.append(self._auto.runs_here(info.raw_cell or ""))

    def end_callback(self) -> None:
        """Note, after a callback of a widget, that it has run in the notebook. Cells come here too, and are no news."""
        self._has_run_here = self._has_run_here or not self._running

    def end_cell(self, result: Any) -> None:
        """Note, after a cell that ran in the notebook, whether it has seeded random numbers: they are for ranks too."""
        if not self._running or self._running.pop():  # none: the extension was loaded amid this cell
            self._has_run_here = True
            lines = (result.info.raw_cell or "").splitlines()
            self._is_seeded = self._is_seeded or any(_SEEDS.search(line.partition("#")[0]) for line in lines)

    distributed.__doc__ = args.DISTRIBUTED_CELL.format_help()
    rank.__doc__ = args.RANK_CELL.format_help()
    local.__doc__ = args.LOCAL_CELL.format_help()

    @plain_errors()
    def _run(self, parser: args.LineParser, written: str, line: str, cell: str) -> CellHandle | Rehearsal | None:
        from nb_accelerate.notebook import pool as pools
        from nb_accelerate.notebook.pool.options import CellOptions
        from nb_accelerate.notebook.pool.source import read_cell
        from nb_accelerate.notebook.protocol.changed_modules import not_of_notebook

        parsed = parser.parse(line)
        if parsed is None:
            return None
        # Read here, once, before any rank sees it. Where auto mode has inserted the magic, there is no line above it.
        head = None if "inserted" in parsed else written
        filename = self._shell.compile.cache(f"{head}\n{cell}" if head else cell, _cell_number(self._shell))
        with self._auto.paused():
            source = read_cell(cell, filename=filename, head=head, transform=self._shell.transform_cell)
        if "rehearse" in parsed:
            return self._rehearse(source, parsed)
        option_names = {field.name for field in dataclasses.fields(CellOptions)}
        not_of_notebook(filename)
        options = CellOptions(
            wants_values="out" in parsed or "background" in parsed,
            **{name: value for name, value in {**self._defaults, **parsed}.items() if name in option_names},
        )
        pool = pools.current()
        display_id = self._have_ranks(pool, parsed)
        if options.converts and pool.options.mixed_precision != "no":
            raise ConfigError(
                "--mixed-precision is the default of Accelerator(), which a cell with --convert does not have. Write "
                "torch.autocast in the cell, and start the ranks without it: %distributed stop"
            )
        replaced = offer(pool, options.ranks)
        if replaced:
            say(replaced)
        self._bring_up_to_date(pool)
        variables = self._shell.user_ns
        request = pool.begin(
            source, options, variables=variables, in_background="background" in parsed, display_id=display_id
        )
        if "background" in parsed:
            return pools.CellHandle(pool, request)
        values = pool.finish(request)
        if "out" in parsed:
            variables[parsed["out"]] = values
        return None

    def _rehearse(self, source: CellSource, parsed: dict[str, Any]) -> Rehearsal:
        """Run a cell with the notebook's names, which stay as they are, as ranks of many."""
        from nb_accelerate.notebook.pool.source import as_function
        from nb_accelerate.rehearsing import rehearse_cell

        variables = self._shell.user_ns
        if "converts" in parsed or "background" in parsed:
            raise ConfigError("A cell is rehearsed without --convert and --background. Leave them out.")
        options = {"num_processes": 8, **self._defaults, **parsed}
        of_rehearsal = {name: options[name] for name in ("num_processes", "mixed_precision") if name in options}
        function = as_function(source, self._shell.transform_cell, variables)
        rehearsal = rehearse_cell(function, wants_accelerator=source.wants_accelerator, **of_rehearsal)
        if "out" in parsed:
            variables[parsed["out"]] = rehearsal
        return rehearsal

    def _bring_up_to_date(self, pool: Pool) -> None:
        """Give ranks the settings, the modules and the seeds of the notebook; busy ones with a later cell."""
        if not pool.accepts_cells or pool.lost:
            return
        from nb_accelerate.notebook.protocol.changed_modules import reloaded_here
        from nb_accelerate.notebook.protocol.random_states import RandomStates
        from nb_accelerate.notebook.worker.namespace import Autoreload, reload, use_autoreload

        autoreload = Autoreload.of(self._shell)
        if self._autoreloads or autoreload != Autoreload():  # each time, as some of the modules may be new
            pool.call(use_autoreload, autoreload)
            self._autoreloads = autoreload != Autoreload()
        # Cells of the ranks in a row change nothing here. One that a cell of the notebook runs, in a loop say, may.
        if self._has_run_here or self._autoreloads or self._running != [False]:
            reloaded = reloaded_here()
            if reloaded and not self._autoreloads:
                pool.call(reload, reloaded)
            pool.follow_settings()
            self._has_run_here = False
        if self._is_seeded:
            pool.call(RandomStates.here().use)
            self._is_seeded = False

    def _have_ranks(self, pool: Pool, parsed: dict[str, Any]) -> str:
        """Start ranks if there are none. Returns the id of the display that says so, which a panel replaces, or ""."""
        from nb_accelerate.notebook.display.frontend import choose_front_end
        from nb_accelerate.notebook.pool.options import PoolOptions

        asked_options = {name: value for name, value in parsed.items() if name in (*_POOL, *_ENGINE)}
        if not pool.has_ranks:
            defaults = {name: value for name, value in self._defaults.items() if name in _POOL}
            pending = None if asked_options else pool.pending
            options = pending or PoolOptions(**{**defaults, **asked_options})
            self._is_seeded = False
            if choose_front_end(parsed.get("progress", self._defaults.get("progress", "auto"))) == "widget":
                transient = {"display_id": uuid.uuid4().hex}
                publish = self._shell.display_pub.publish
                publish({"text/plain": "starting ranks"}, transient=transient)
                pool.start(options)
                publish({"text/plain": pool.brief}, transient=transient, update=True)
                return transient["display_id"]
            pool.start(options)
            say(pool.brief)
            return ""
        for name, value in asked_options.items():
            running = pool.world_size if name == "num_processes" else _of_running(pool, name)
            if value != running:
                flag = "-n" if name == "num_processes" else {**_POOL, **_ENGINE}[name]
                shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
                started = f"without {flag}" if running is None else f"with {flag} {running}"
                raise PoolError(
                    f"{flag} {shown}: the ranks that run were started {started}. To start others, and lose what these "
                    f"have: %distributed stop, then this cell again"
                )
        return ""


def _of_running(pool: Pool, name: str) -> object:
    """Return the value that an option of the running ranks has, as it is written behind its flag."""
    if name not in _ENGINE:
        return getattr(pool.options, name)
    value = getattr(pool.options.placing, name)
    return ",".join(value) if name == "hosts" else value


def say(text: str) -> None:
    """Print a line under the cell."""
    print(text)  # noqa: T201 - it was asked for


def _cell_number(shell: InteractiveShell) -> int:
    # Newer shells count up before they run it, older ones after; both store its text before.
    history = shell.history_manager
    return (len(history.input_hist_raw) - 1 if history is not None else 0) or shell.execution_count


def replace(pool: Pool, rank: int | None) -> str:
    """Replace a rank and all that have ended, or what `Pool.restart` does; return a line on what they lack."""
    new = pool.restart(rank)
    if rank is None and len(new) == pool.world_size:
        return pool.brief
    lacking = sorted(
        set[str]().union(*(pool.variables.own_names - pool.variables.syncs[rank].own_names.keys() for rank in new))
    )
    whose = f"rank {new[0]} is" if len(new) == 1 else f"ranks {', '.join(map(str, new))} are"
    return f"{whose} new" + (
        f"; {'it lacks' if len(new) == 1 else 'they lack'} {', '.join(lacking)}" if lacking else ""
    )


def offer(pool: Pool, ranks: Sequence[int] | None) -> str:
    """Ask whether ranks that a cell needs, and that have ended, are to be replaced; gives a line if they were.

    Where nobody can be asked, or the answer is no, nothing happens: the pool then says what to do.
    """
    if not pool.lost:
        return ""
    pool.wait()
    lost = [rank for rank in pool.lost if ranks is None or rank in ranks]
    if not lost or pool.group is None:
        return ""
    whose, new = ("Its", "a new rank in its place") if len(lost) == 1 else ("Their", "new ranks")
    ends = pool.group.how_they_ended(lost)
    question = f"{ends}. {whose} variables are lost. Start {new}, and run this cell? [Y/n] "
    try:
        reply = input(question)
    except (EOFError, NotImplementedError):  # nobody is there, or IPython's StdinNotImplementedError
        return ""
    return replace(pool, min(lost)) if reply.strip().lower() in ("", "y", "yes") else ""

"""Run a script, a module or any program in a rank, in place of a function."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any

from nb_accelerate.notebook.protocol.main_module import main_globals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a Python file as ``python path arguments`` would, in this process."""
    with io.open_code(os.path.abspath(path)) as file:  # noqa: PTH100 - as Python does; a link stays a link
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.path[:1] = [os.path.dirname(os.path.realpath(path))]  # noqa: PTH120 - as Python does
    _run_as_main(code, path, arguments, __file__=path, __spec__=None, __loader__=SourceFileLoader("__main__", path))


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module as ``python -m name arguments`` would, in this process; of a package its ``__main__``.

    Raises:
        ImportError: there is no such module, or it is a package that cannot be run.
    """
    sys.path[:1] = [os.getcwd()]  # noqa: PTH109 - text, as Python has it there
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(spec.name) if get_code is not None and spec is not None else None
    if spec is None or code is None:
        raise ImportError(f"there is no module {name} that can be run", name=name)
    more = {"__file__": spec.origin, "__package__": spec.parent, "__spec__": spec, "__loader__": spec.loader}
    _run_as_main(code, spec.origin or name, arguments, **more)


def run_program(command: Sequence[str]) -> None:
    """Run a program of any kind and wait for its end.

    Raises:
        SystemExit: it ended with another exit code than 0; 128 and the number of the signal that ended it.
    """
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
    if code:
        sys.exit(128 - code if code < 0 else code)


def _run_as_main(code: CodeType, path: str, arguments: Sequence[str], **names: object) -> None:
    sys.argv[:] = [path, *arguments]
    # It has no namespace of its own, because pickle looks in `__main__` for what the script defines, until the end.
    main = main_globals()
    main.update({"__name__": "__main__", "__package__": None, "__cached__": None, **names})
    exec(code, main)  # noqa: S102 - the script that the user asked for


@dataclass(frozen=True, kw_only=True)
class Job:
    """The program that each rank runs."""

    target: str  # path of a script, name of a module, or a program
    arguments: tuple[str, ...] = ()
    kind: str = "script"  # ``script``, ``module`` or ``program``

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command line that would start one rank by hand."""
        python = {"script": (sys.executable,), "module": (sys.executable, "-m"), "program": ()}[self.kind]
        return (*python, self.target, *self.arguments)

    @property
    def call(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """Return the function that a rank calls, and its arguments."""
        if self.kind == "program":
            return run_program, (self.command,)
        return (run_module if self.kind == "module" else run_script), (self.target, self.arguments)

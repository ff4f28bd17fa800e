"""Start a fresh interpreter like this one, which imports nothing from the current folder unless PYTHONPATH names it.

``python -c`` puts the current folder in front of the path, so a file there, in a folder that several people share,
would run with the rights of the launching user. Users' code may import from there: a rank takes over the kernel's path,
with the current folder if it is in it, before it runs any of that code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from nb_accelerate.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# The path is set first. Before Python 3.11, which knows ``-P``, it has the current folder in it until then.
_ENTER = (
    "import sys; cut = sys.argv.index('--'); sys.path[:] = sys.argv[cut + 1:]; del sys.argv[cut:]; "
    "from {module} import {function}; {function}()"
)

_HERE = Path(__file__).resolve().parents[3]

# Packages that a rank must find. What they import themselves is installed beside them.
_NEEDED = ("nb_accelerate", "torch")


def command(entry: str, arguments: Sequence[str], path: Sequence[str]) -> list[str]:
    module, _, function = entry.partition(":")
    flags = {
        "-P": sys.version_info >= (3, 11),
        "-I": sys.flags.isolated,
        "-E": sys.flags.ignore_environment,
        "-s": sys.flags.no_user_site,
    }
    code = _ENTER.format(module=module, function=function)
    return [sys.executable, *(flag for flag, is_set in flags.items() if is_set), "-c", code, *arguments, "--", *path]


def safe_environ() -> Mapping[str, str]:
    """Return the environment to start it with, without relative entries of PYTHONPATH: the folder may have changed."""
    environ = dict(os.environ)
    if "PYTHONPATH" in environ:
        entries = environ["PYTHONPATH"].split(os.pathsep)
        environ["PYTHONPATH"] = os.pathsep.join(filter(os.path.isabs, entries))
    return environ


def own_path() -> list[str]:
    """Return the path from which a rank imports this package and torch: `sys.path` without the current folder.

    That stays if PYTHONPATH has its whole path: who started this process trusts it. If a package is nowhere else,
    because it was copied to where the notebook is, its folder comes last.

    Raises:
        StartError: ranks would import another copy of this package.
    """
    is_read = not (sys.flags.ignore_environment or sys.flags.isolated)
    named = set(filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep) if is_read else ()))
    own = {*named, *sysconfig.get_paths().values()}
    entries = [entry for entry in sys.path if isinstance(entry, str) and (entry in own or not _is_same(entry, Path()))]
    try:
        path = [str(Path.cwd() / entry) for entry in entries]
    except FileNotFoundError:  # the current folder was deleted
        path = [entry for entry in entries if Path(entry).is_absolute()]
    for name in _NEEDED:
        if PathFinder.find_spec(name, path) is None:
            with contextlib.suppress(ValueError):  # a module that says nothing of where it is from
                spec = importlib.util.find_spec(name)
                if spec is not None and spec.origin is not None:
                    path.append(str(Path(spec.origin).parents[1]))
    found = PathFinder.find_spec("nb_accelerate", path)
    theirs = _HERE if found is None or found.origin is None else Path(found.origin).parent
    if not _is_same(str(theirs), _HERE) and _sources(theirs) != _sources(_HERE):
        raise StartError(
            f"This process has nb_accelerate of {_HERE}, and ranks would have {theirs}: they import "
            f"no package from the current folder. Start Jupyter, or Python, with PYTHONPATH={_HERE.parent}"
        )
    return path


@contextlib.contextmanager
def imports_from(path: Sequence[str]) -> Iterator[None]:
    """Import from `path` inside the block, in a process whose `sys.path` is the user's already."""
    users = list(sys.path)
    sys.path[:] = path
    try:
        yield
    finally:
        sys.path[:] = users


def _sources(package: Path) -> dict[Path, int]:
    """Return the sizes of the sources of a package: an installed copy of the same sources may be imported as well."""
    return {file.relative_to(package): file.stat().st_size for file in package.rglob("*.py")}


def _is_same(entry: str, path: Path) -> bool:
    try:
        return path.samefile(entry)
    except OSError:  # there is no such folder
        return False

"""Set the parameters of a notebook. Pure functions of notebooks as data.

Conventions are those of papermill (https://papermill.readthedocs.io): a cell with the tag ``parameters`` has defaults,
and a cell with the tag ``injected-parameters`` that follows it has the values of this run.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nbformat import NotebookNode

_DEFAULTS, _INJECTED = "parameters", "injected-parameters"


def read_parameters(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the values of pairs such as ``lr=0.1`` by name. They are YAML."""
    import yaml

    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"-p {pair!r} says no value. Write -p {pair}=VALUE")
        try:
            found[name.strip()] = yaml.safe_load(text)
        except yaml.YAMLError:
            found[name.strip()] = text
    for name in found:
        if not str(name).isidentifier():
            raise ConfigError(f"-p {name!r} is not a name that a cell could assign to")
    return found


def set_parameters(notebook: NotebookNode, values: Mapping[str, Any]) -> None:
    """Add the cell with the values of this run, in place of one that an earlier run has added."""
    import nbformat

    cells = notebook.cells
    defaults = next((index for index, cell in enumerate(cells) if _DEFAULTS in _tags(cell)), None)
    if defaults is None:
        raise ConfigError(
            "the notebook has no parameters: none of its cells has the tag 'parameters'. Add the tag to the cell that "
            "assigns the defaults"
        )
    known = sorted(_assigned(cells[defaults].source))
    for name in values:
        if name not in known:
            raise ConfigError(
                f"the notebook has no parameter {name!r}.{suggest(name, known)} It has: {', '.join(known) or 'none'}"
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

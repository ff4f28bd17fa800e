from __future__ import annotations

import ast
import enum
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from structure.public_api import SNAPSHOT, describe

import nb_accelerate


def test_the_public_names_and_signatures_are_those_of_the_snapshot():
    assert describe(nb_accelerate) == SNAPSHOT.read_text(encoding="utf-8"), (
        "The public interface changed. If that is meant, say so in CHANGELOG.md and run:\n"
        "  .venv/bin/python tests/structure/public_api.py"
    )


def _module(**names: object) -> ModuleType:
    module = ModuleType("sample")
    module.__dict__.update(names, __all__=sorted(names))
    return module


def test_a_changed_default_changes_the_description():
    def before(steps: int = 1) -> None: ...

    def after(steps: int = 2) -> None: ...

    assert describe(_module(run=before)) == "run(steps: int = 1) -> None\n"
    assert describe(_module(run=after)) == "run(steps: int = 2) -> None\n"


def test_a_description_holds_what_a_caller_can_rely_on():
    class Colour(enum.Enum):
        RED = 1
        BLUE = 2

    @dataclass(kw_only=True)
    class Options:
        size: int = 3

        @property
        def area(self) -> int:
            return self.size**2

        @classmethod
        def small(cls, *rest: int, strict: bool, **more: int) -> Options:
            raise NotImplementedError

        def _hidden(self) -> None: ...

    assert describe(_module(Colour=Colour, Options=Options, limit=3)).splitlines() == [
        "Colour: RED, BLUE",
        "Options(*, size: int = 3) -> None",
        "Options.area  (property)",
        "Options.small(cls, *rest: int, strict: bool, **more: int) -> Options  (classmethod)",
        "limit: int",
    ]


def test_a_description_names_no_address():
    def function(marker: object = object()) -> None: ...

    assert describe(_module(function=function)) == "function(marker: object = <object>) -> None\n"


def test_the_names_are_sorted_and_each_has_a_home():
    names = nb_accelerate.__all__
    assert names == sorted(names)
    assert set(names) - {"__version__"} == set(nb_accelerate._HOME)
    assert set(names) <= set(dir(nb_accelerate))


def test_type_checkers_see_the_names_that_the_table_has():
    tree = ast.parse(Path(nb_accelerate.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module.removeprefix("nb_accelerate.")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert seen == nb_accelerate._HOME


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'nb_accelerate' has no attribute 'Accelerater'"):
        nb_accelerate.Accelerater  # noqa: B018


@pytest.mark.parametrize("name", ["Accelerator", "set_seed"])
def test_without_torch_the_training_half_says_what_to_install(name: str):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import nb_accelerate\n"
        f"try: nb_accelerate.{name}\n"
        "except nb_accelerate.MissingDependencyError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == (
        f"nb_accelerate.{name} needs the package 'torch', which is not installed. Run: pip install torch\n"
    )


def test_without_torch_the_notebook_half_can_be_imported():
    code = "import sys; sys.modules['torch'] = None\nfrom nb_accelerate import notebook_launcher"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)

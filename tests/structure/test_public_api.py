from __future__ import annotations

import enum
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from structure.public_api import SNAPSHOT, _own_members, describe

import nb_accelerate
import nb_accelerate.utils
from nb_accelerate.base import lazy


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


def test_the_names_are_sorted_and_completed():
    names = nb_accelerate.__all__
    assert names == sorted(names)
    assert set(names) <= set(dir(nb_accelerate))


@pytest.mark.parametrize("package", [nb_accelerate, nb_accelerate.utils])
def test_each_name_of_a_table_can_be_imported_and_is_what_its_line_says(package: ModuleType):
    for name, (module, attribute) in lazy.table(package.__name__).items():
        imported = importlib.import_module(module)
        assert getattr(package, name) is (getattr(imported, attribute) if attribute else imported)


def test_what_is_public_says_what_it_does():
    for name in nb_accelerate.__all__:
        value = getattr(nb_accelerate, name)
        members = sorted(_own_members(value)) if isinstance(value, type) else []
        callables = [value, *(getattr(value, member) for member in members)]
        silent = [each for each in callables if callable(each) and not inspect.getdoc(each)]
        assert silent == [], name


def test_an_editor_completes_the_names_and_goes_to_their_definitions():
    jedi = pytest.importorskip("jedi")
    here = jedi.InterpreterEnvironment()  # any other one is a process
    offered = jedi.Script("import nb_accelerate\nnb_accelerate.", environment=here).complete()
    assert set(nb_accelerate.__all__) <= {one.name for one in offered}
    script = jedi.Script("from nb_accelerate.utils import str_to_bool\nstr_to_bool", environment=here)
    (found,) = script.goto(2, 1, follow_imports=True, prefer_stubs=False)
    assert found.module_path.name == "environ.py"


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a_strict_type_checker_accepts_each_public_name(tmp_path: Path):
    lines = [
        f"from {package.__name__} import {name}"
        for package in (nb_accelerate, nb_accelerate.utils)
        for name in package.__all__
    ]
    script = tmp_path / "script.py"
    launches = ("reveal_type(notebook_launcher(print))", "reveal_type(notebook_launcher(print, block=False))")
    text = [*lines, "reveal_type(Accelerator)", *launches, "from nb_accelerate import Accelerater"]
    script.write_text("\n".join(text))
    # With the options of `make lint`, whose cache it fills or finds.
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", script],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=Path(nb_accelerate.__file__).parents[1],
    )
    # Its cache may name the script by the folder of an earlier run.
    said = [line.partition(": ")[2] for line in run.stdout.splitlines() if "/script.py:" in line]
    assert len(said) == 4, run.stdout
    assert "nb_accelerate.training.accelerator.accelerator.Accelerator" in said[0]
    assert [line.rpartition(".")[2].strip('"') for line in said[1:3]] == ["Values", "Launch"]
    assert "Accelerater" in said[3]


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Accelerater'"):
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
    assert re.fullmatch(rf"nb_accelerate\.{name} .*: pip install torch\n", run.stdout)


def test_without_torch_the_notebook_half_can_be_imported():
    code = "import sys; sys.modules['torch'] = None\nfrom nb_accelerate import notebook_launcher"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_help_of_the_package_shows_the_ways_in_and_where_the_documentation_is():
    text = pydoc.plain(pydoc.render_doc(nb_accelerate))
    for way_in in ("Accelerator()", "notebook_launcher(", "%%distributed -n 2", "nb-accelerate launch", "README.md"):
        assert way_in in text
    assert "level  training half" not in text

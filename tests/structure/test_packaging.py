"""What is declared for installing the package, and what is published of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fixtures.limits import PATIENCE
from packaging.requirements import Requirement
from structure.layers import imports_of

from nb_accelerate.base.config.versions import LOWEST

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fixtures.distributions import Distributions

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

OTHER_NAMES = {"PIL": "pillow", "yaml": "pyyaml", "zmq": "pyzmq"}
"""Packages that are not imported by their name."""

MADE_BY_TESTS = {"package_of_user", "some_trainer"}
"""Modules that a test writes before it imports them."""


def name_of(requirement: str) -> str:
    return Requirement(requirement).name.lower().replace("_", "-")


def declared(*extras: str) -> set[str]:
    """The names of what the package needs, and of what extras bring."""
    found = set()
    for requirement in [*PROJECT["dependencies"], *(one for extra in extras for one in EXTRAS[extra])]:
        if name_of(requirement) == name_of(PROJECT["name"]):
            found |= declared(*Requirement(requirement).extras)
        else:
            found.add(name_of(requirement))
    return found


def imported(folder: Path) -> set[str]:
    """The names of what the sources below a folder import, at any time."""
    files = sorted(folder.rglob("*.py"))
    own = {"nb_accelerate", *MADE_BY_TESTS, *sys.stdlib_module_names, "tomllib"}  # which Python 3.11 has
    own |= {part for file in (ROOT / "tests").rglob("*.py") for part in (file.stem, file.parent.name)}
    modules = {one.module.partition(".")[0] for file in files for one in imports_of(file, ROOT)}
    return {OTHER_NAMES.get(module, module).lower().replace("_", "-") for module in modules - own}


def test_what_the_package_imports_is_declared():
    found = imported(ROOT / "nb_accelerate")
    assert {"torch", "ipython", "pyzmq", "nbformat"} <= found
    assert found - declared(*EXTRAS) == set()


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("xla", ["tpu"]),
        ("with_deepspeed", ["deepspeed", "torchao", "bitsandbytes"]),
        ("with_ray", ["ray"]),
        ("benchmarks", ["bench", "deepspeed", "tpu"]),
    ],
)
def test_what_tests_of_an_extra_import_is_declared(folder: str, extras: list[str]):
    assert imported(ROOT / "tests" / folder) - declared("test", *extras) == set()


def test_what_tests_of_trainers_import_is_installed_for_them():
    listed = (ROOT / "tests" / "requirements-trainers.txt").read_text(encoding="utf-8").splitlines()
    installed = {name_of(line) for line in listed if not line.startswith("#")}
    assert imported(ROOT / "tests" / "with_trainers") - declared("test") - installed == set()


def test_what_the_other_tests_import_is_in_the_extra_test():
    others = ("xla", "with_deepspeed", "with_trainers", "with_ray", "benchmarks")
    folders = [one for one in (ROOT / "tests").iterdir() if one.name not in others]
    found = set().union(*map(imported, folders))
    assert {"pytest", "accelerate", "playwright"} <= found
    assert found - declared("test") == set()


def test_the_lowest_versions_are_the_same_wherever_they_are_written():
    bounds = {}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        (bound,) = requirement.specifier
        assert bound.operator == ">=", requirement
        bounds[requirement.name] = bound.version
    assert bounds == LOWEST
    listed = (ROOT / "tests" / "places" / "lowest.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in listed if not line.startswith("#")] == [f"{name}=={low}" for name, low in bounds.items()]


def test_the_pythons_that_are_named_begin_with_the_oldest_that_is_allowed():
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: Python :: 3." in line]
    assert PROJECT["requires-python"] == f">={named[0]}"


def committed() -> set[str]:
    """The files of the repository."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}


@pytest.mark.slow
def test_the_wheel_has_all_files_of_the_package_and_no_others(distributions: Distributions):
    with zipfile.ZipFile(distributions.wheel) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {name for name in committed() if name.startswith("nb_accelerate/")}
    assert {"nb_accelerate/py.typed", "nb_accelerate/__init__.pyi", "nb_accelerate/cli/flags.md"} <= packed


@pytest.mark.slow
def test_the_source_distribution_is_the_repository(distributions: Distributions):
    with tarfile.open(distributions.sdist) as sdist:
        packed = {name.partition("/")[2] for name in sdist.getnames()}
    assert packed == {*committed(), "PKG-INFO"}


@pytest.mark.slow
def test_a_page_of_an_index_would_show_no_link_that_leads_nowhere(distributions: Distributions):
    with zipfile.ZipFile(distributions.wheel) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(path).decode())
    description = metadata.get_payload()
    assert isinstance(description, str)
    assert "notebook" in description
    assert [link for link in re.findall(r"\]\(([^)]+)\)", description) if "://" not in link] == []


@pytest.mark.slow
@pytest.mark.limit(120)
def test_the_source_distribution_passes_tests_of_its_own(distributions: Distributions, tmp_path: Path):
    with tarfile.open(distributions.sdist) as sdist:
        sdist.extractall(tmp_path)
    (root,) = tmp_path.iterdir()
    tests = ["test_repo.py", "test_readme.py", "test_contributing.py", "test_layers.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--basetemp", str(tmp_path / "inner")]
    command += ["-k", "not run_as_cells", *(f"tests/structure/{name}" for name in tests)]  # which start a kernel
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE * 100, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr
    assert (root / ".ci" / "run").stat().st_mode & 0o111


INSTALLS = re.compile(
    r"\b(?:pip3?|pipx|uv|conda|mamba|poetry)\b[^\n]*?(?<!un)(?:install|add|run|download)\b([^\n`&|;]*)"
)
OUR_NAME = re.compile(
    r"""["'\s](nb[-_.]accelerate(?:\[[^\]]*\]|[<>=!~@][^\s"']*)*)(?=["'\s,;:.)]*(?:\s|$))""", re.IGNORECASE
)


def from_an_index(text: str) -> list[str]:
    """The places of a text that say to install the package by its name.

    It is on no index: whoever registers it there would run code on the machines of all who follow.
    """
    return [found[1] for command in INSTALLS.findall(text) for found in OUR_NAME.finditer(f"{command} ")]


def texts() -> Iterator[tuple[str, str]]:
    """What can be read in the repository: files, and strings of sources, which may go over several lines."""
    tops = ["nb_accelerate", "notebooks", "tests", "binder", ".ci"]
    files = [*ROOT.glob("*.*"), ROOT / "Makefile", *(file for top in tops for file in (ROOT / top).rglob("*"))]
    for file in files:
        if not file.is_file() or file == Path(__file__):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture, or what Python has compiled
            continue
        name = file.relative_to(ROOT).as_posix()
        yield name, text.replace("\\n", "\n").replace('\\"', '"')
        if file.suffix == ".py" and "install" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield name, node.value
        if file.suffix == ".txt":
            yield name, "\n".join(f"pip install {line}" for line in text.splitlines() if not line.startswith("#"))


def test_nothing_says_to_install_the_package_from_an_index():
    read = list(texts())
    assert {"README.md", "notebooks/10_tpu_colab.ipynb", "nb_accelerate/errors/__init__.py"} <= {
        name for name, _ in read
    }
    assert [(name, found) for name, text in read if (found := from_an_index(text))] == []


@pytest.mark.parametrize(
    "command",
    [
        "%pip install -q nb_accelerate",
        "pip install 'nb-accelerate[{extra}]'",
        "python -m pip install --upgrade nb-accelerate.",
        "`pip install nb_accelerate[deepspeed]`);",
        "uv add NB.Accelerate>=1",
        "!pip install torch nb-accelerate==1.0",
    ],
)
def test_an_installation_from_an_index_is_found(command: str):
    assert len(from_an_index(command)) == 1


@pytest.mark.parametrize(
    "command",
    [
        "pip uninstall nb-accelerate",
        "pip install --no-deps ./nb_accelerate-1.0-py3-none-any.whl",
        "pip install --no-deps nb_accelerate-*.whl",
        "pip install /content/nb_accelerate",
        "pip install '.[deepspeed]' && nb-accelerate env",
        "pip install .",
    ],
)
def test_an_installation_from_a_file_is_not(command: str):
    assert from_an_index(command) == []

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "binder",
    "nb_accelerate",
    "notebooks",
    "pyproject.toml",
    "tests",
}
SOMEBODYS_FOLDER = re.compile(r"(?<![\w.:/])/(home|root|opt|work|Users)/\w+")


def _files() -> list[Path]:
    """What is committed, or would be with the next commit."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def strange_entries(files: list[Path]) -> set[str]:
    tops = {file.parts[0] for file in files}
    return {top for top in tops if top not in ALLOWED and not top.startswith(".")}


def test_the_top_of_the_repository_holds_nothing_but_what_belongs_there():
    assert strange_entries(_files()) == set()


def test_a_strange_entry_at_the_top_is_reported():
    assert strange_entries([Path("notes.txt"), Path("docs/a.md"), Path(".ci/run"), Path("tests/a.py")]) == {
        "notes.txt",
        "docs",
    }


def test_no_file_names_a_folder_of_somebodys_machine():
    found = [
        f"{file}: {match[0]}"
        for file in _files()
        for match in SOMEBODYS_FOLDER.finditer((ROOT / file).read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


@pytest.mark.parametrize("text", ["open('/" + "home/me/x')", "see /" + "opt/data", "cd /" + "Users/me"])
def test_a_folder_of_somebodys_machine_is_recognised(text: str):
    assert SOMEBODYS_FOLDER.search(text)
    assert not SOMEBODYS_FOLDER.search("https://example.org/home/index and ./opt/x and tests/opt/y")


def _pins(text: str) -> dict[str, str]:
    found = re.finditer(r"^([\w-]+)==([^\s+;]+)", text, re.MULTILINE)
    return {pin[1]: pin[2] for pin in found}


def test_binder_installs_the_versions_that_the_tests_run_with():
    binder = _pins((ROOT / "binder" / "requirements.txt").read_text(encoding="utf-8"))
    development = _pins((ROOT / "tests" / "requirements-dev.txt").read_text(encoding="utf-8"))
    assert "torch" in binder
    assert binder.items() <= development.items()


@pytest.mark.parametrize("script", [".ci/run", "binder/postBuild"])
def test_a_script_can_be_executed_and_is_valid_shell(script: str):
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(path)], timeout=30, check=True)


def names_that_other_tests_lack(tests: Path, folders: str) -> list[str]:
    """Return uses of names of another module of tests that it does not define."""
    lacking = []
    for path in tests.glob(f"{folders}/*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        modules = {
            alias.asname or alias.name: tests / (node.module or "").replace(".", "/") / f"{alias.name}.py"
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        lacking += [
            f"{path.name}: {node.value.id}.{node.attr}"
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if (module := modules.get(node.value.id))
            and module.is_file()
            and not re.search(rf"^(def |class |from .* import .*)?{node.attr}\b", module.read_text(), re.MULTILINE)
        ]
    return lacking


def test_suites_of_other_environments_use_only_names_that_other_tests_define(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "two.py").write_text("x = 1\ndef f(): return y")
    (tmp_path / "sub" / "three.py").write_text("from sub import two\ntwo.x, two.f, two.y")
    assert names_that_other_tests_lack(tmp_path, "sub") == ["three.py: two.y"]
    assert names_that_other_tests_lack(ROOT / "tests", "with_*") == []


def test_modules_of_tests_that_others_name_are_there():
    files = [file for file in (ROOT / "tests").rglob("*") if file.suffix in {".py", ".md"}]
    there = {str(file) for file in files}
    named = {name for file in files for name in re.findall(r"[\w/]+/test_\w+\.py", file.read_text(encoding="utf-8"))}
    assert not [name for name in named if not any(path.endswith(f"/{name.strip('/')}") for path in there)]

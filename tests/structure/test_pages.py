"""The pages of the documentation: all of their code is run, and all of them are reached."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from fixtures.kernels import Cell, Kernel
from fixtures.page_code import Code, code_of, not_shown, run_commands, shown_below

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
PAGES = sorted(path for path in NOTEBOOKS.rglob("*.md") if "site" not in path.parts)

ELSEWHERE = {"git", "jupyter", "jupyter-repo2docker", "make", "pip", "ray", "srun", "ssh", "ssh-copy-id"}
"""Commands that install, serve or need other machines: they are not run here."""

WITH_TRAINERS = NOTEBOOKS / "how_to" / "trainer.md"
"""Needs packages that `make test-trainers` has: it is run there."""

OF_A_SESSION = [path for path in PAGES if "runs(" in path.read_text(encoding="utf-8")]
"""Pages with `runs()`, which has the runs of the whole session: others share a kernel."""


def with_(kind: str) -> list[Path]:
    """Pages with a block of a kind that is run here."""
    return [path for path in PAGES if f"```{kind}\n" in path.read_text(encoding="utf-8") and path != WITH_TRAINERS]


def _name(path: Path) -> str:
    return str(path.relative_to(NOTEBOOKS))


def test_code_is_found_in_pages_by_kind_and_title():
    page = '```python\n%pip\n```\n\n```python title="a.py"\n1\n```\n```console\n$ x y\nshown\n```\n```sh\nz\n```\n'
    assert code_of(page) == Code(cells=["%pip"], files={"a.py": "1\n"}, commands=["x y"], unknown=["sh"])


@pytest.mark.parametrize("path", [path for path in PAGES if "```" in path.read_text(encoding="utf-8")], ids=_name)
def test_every_block_of_a_page_is_of_a_kind_that_is_run(path: Path):
    code = code_of(path.read_text(encoding="utf-8"))
    assert code.unknown == []
    assert {shlex.split(command)[0] for command in code.commands} <= ELSEWHERE | {"nb-accelerate"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {command.split()[1] for command in code.commands if command.startswith("make ")} <= targets
    for name, text in code.files.items():
        if name.endswith(".sbatch"):
            subprocess.run(["bash", "-n"], input=text, text=True, timeout=30, check=True)


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
@pytest.mark.parametrize("path", [path for path in with_("python") if path not in OF_A_SESSION], ids=_name)
def test_the_cells_of_a_page_run_and_show_what_stands_below_them(shared_kernel: Kernel, path: Path, tmp_path: Path):
    assert _not_shown_in(shared_kernel, path, tmp_path) == []


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.may_leave("files")  # as above
@pytest.mark.parametrize("path", OF_A_SESSION, ids=_name)
def test_a_page_with_all_runs_of_a_session_shows_its_own(kernel: Kernel, path: Path, tmp_path: Path):
    assert _not_shown_in(kernel, path, tmp_path) == []


def _not_shown_in(kernel: Kernel, path: Path, folder: Path) -> list[list[str]]:
    """Run the cells of a page in a folder, where other pages may have been run. Returns lines that did not come."""
    # Ranks are forked from the kernel, and each would import what an optimizer needs.
    kernel.run(f"import os, torch._dynamo\nos.chdir({str(folder)!r})\n%reset -f").ok()
    cells = shown_below(path.read_text(encoding="utf-8"))
    missing = [not_shown(_shown_by(kernel.run(code, 100).ok()), shown) for code, shown in cells]
    kernel.run("%unload_ext nb_accelerate").ok()
    return [lines for lines in missing if lines]


def _shown_by(cell: Cell) -> str:
    displayed = [one.get("text/plain", "") for one in cell.displays]
    return "\n".join([cell.stdout, cell.stderr, *displayed, cell.value or ""])


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.may_leave("files")  # as above
@pytest.mark.usefixtures("python_template")
@pytest.mark.parametrize("path", with_("console"), ids=_name)
def test_the_commands_of_a_page_run(path: Path, tmp_path: Path):
    run_commands(code_of(path.read_text(encoding="utf-8")), tmp_path)


def test_the_page_of_benchmarks_is_made_of_what_was_printed():
    spec = importlib.util.spec_from_file_location("page", ROOT / "tests" / "benchmarks" / "page.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)

    printed = "launch\n  nb_accelerate  0.23 x\n[IPKernelApp] WARNING | a word\n  \nimport time\n  1.2 s\n"
    sections = page.sections_of(printed)
    assert sections == {"launch": ["nb_accelerate  0.23 x", ""], "import time": ["1.2 s"]}
    text = page.render(sections, date=0.0)
    assert "| date | 01 January 1970 |" in text
    assert "## Launch\n\nLaunching: from the call" in text
    assert "```text\nnb_accelerate  0.23 x\n```" in text
    committed = (NOTEBOOKS / "benchmarks.md").read_text(encoding="utf-8")
    assert committed.startswith(text[: text.index("| date")])


def _nav(entries: list[object]) -> list[str]:
    """The files of a part of the navigation."""
    found: list[str] = []
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            found += _nav(value) if isinstance(value, list) else [value]
    return found


def test_the_navigation_has_every_page_and_no_other():
    settings = yaml.safe_load((NOTEBOOKS / "site" / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = _nav(settings["nav"])
    hook = (NOTEBOOKS / "site" / "pages.py").read_text(encoding="utf-8")
    elsewhere = dict(re.findall(r'"([\w/.]+\.md)": "([\w/.]+\.md)"', hook))
    assert set(elsewhere.values()) <= set(listed)
    assert all((ROOT / source).is_file() for source in elsewhere)
    assert {str(path.relative_to(NOTEBOOKS)) for path in PAGES} == {
        name for name in listed if name.endswith(".md") and name not in elsewhere.values()
    }
    assert all((NOTEBOOKS / name).is_file() for name in listed if name.endswith(".ipynb"))


def test_links_of_notebooks_and_pages_lead_somewhere():
    hook = (NOTEBOOKS / "site" / "pages.py").read_text(encoding="utf-8")
    generated = set(re.findall(r': "([\w/.]+\.md)"', hook))
    lost = []
    for path in [*PAGES, *NOTEBOOKS.glob("*.ipynb")]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            target = os.path.relpath((path.parent / link).resolve(), NOTEBOOKS)
            if "://" not in link and target not in generated and not (NOTEBOOKS / target).exists():
                lost.append(f"{path.name}: {link}")
    assert lost == []

from __future__ import annotations

import io
import re
from pathlib import Path

import nbformat
import pytest

from nb_accelerate.cli import notebook

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROMPT = re.compile(r"^(?:>>> |\.\.\. ?)", re.MULTILINE)


def _sessions() -> list[tuple[list[str], str]]:
    """The sessions of the README: the cells that are typed, and what the last of them shows."""
    found = []
    for block in re.findall(r"```pycon\n(.*?)```", README, re.DOTALL):
        typed = re.match(r"(?:(?:>>> |\.\.\.).*\n)+", block)
        assert typed is not None
        cells = [PROMPT.sub("", cell).strip() for cell in re.split(r"^(?=>>> )", typed[0], flags=re.MULTILINE) if cell]
        found.append((cells, block[typed.end() :].strip()))
    return found


def _without_numbers(text: str) -> list[str]:
    """Lines without what differs from run to run: which rank was the first, and how cells are counted."""
    return [re.sub(r"rank \d|In\[\d+\]", "", line) for line in text.splitlines()]


@pytest.mark.limit(120)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_the_sessions_show_what_really_comes_out(tmp_path: Path):
    (setup, shown), (failing, error) = _sessions()
    path = tmp_path / "readme.ipynb"
    cells = [nbformat.v4.new_code_cell(cell) for cell in setup + failing]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    run = notebook.execute(path, progress=io.StringIO())

    *printed, value = run.notebook.cells[len(setup) - 1].outputs
    lines = "".join(one.get("text", "") for one in printed).splitlines()
    lines = [line for line in lines if not line.startswith(("train: ", "time: "))]  # progress, on a busy machine
    assert [*lines, value.data["text/plain"]] == shown.splitlines()

    assert run.failure is not None
    said = "".join(output.get("text", "") for output in run.notebook.cells[-1].outputs)
    came = _without_numbers(said + run.failure.render(color=False))
    assert [line for line in _without_numbers(error) if line not in came] == []


def test_every_make_target_it_names_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(
        re.findall(r"make ([a-z-]+)\b", "\n".join(re.findall(r"```console.*?```|`[^`\n]+`", README, re.DOTALL)))
    )
    assert {"demo", "test"} <= named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_every_file_it_links_to_exists():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_block_is_a_session_that_is_run_or_an_installation():
    kinds = re.findall(r"^```(\w+)$", README, re.MULTILINE)
    assert kinds.count("pycon") == len(_sessions())
    installing = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    assert len(kinds) == len(_sessions()) + len(installing)
    assert all(line.startswith("$ pip install .") for block in installing for line in block.splitlines())


def test_it_is_two_screens_long_and_its_picture_small():
    assert len(README.splitlines()) <= 130
    assert (ROOT / "notebooks" / "images" / "run.webp").stat().st_size < 1_000_000

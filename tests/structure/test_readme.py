from __future__ import annotations

import re
from pathlib import Path

import pytest
from fixtures.page_code import not_shown, run_cells, shown_below

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CELLS = shown_below(README)


@pytest.mark.contract("README: its blocks")
@pytest.mark.limit(120)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_its_blocks_run_as_cells_and_show_what_stands_below_them(tmp_path: Path):
    outputs = run_cells([code for code, _ in CELLS], tmp_path)
    missing = [not_shown(came, shown) for came, (_, shown) in zip(outputs, CELLS, strict=True)]
    assert [lines for lines in missing if lines] == []


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


def test_every_block_is_a_cell_an_output_or_an_installation():
    kinds = re.findall(r"^```(\w+)$", README, re.MULTILINE)
    installing = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    assert all(line.startswith("$ pip install ") for block in installing for line in block.splitlines())
    assert kinds.count("python") == len(CELLS)
    assert kinds.count("text") == sum(bool(shown) for _, shown in CELLS)
    assert len(kinds) == kinds.count("python") + kinds.count("text") + len(installing)


def test_it_is_two_screens_long_and_its_picture_small():
    assert len(README.splitlines()) <= 130
    assert (ROOT / "notebooks" / "images" / "run.webp").stat().st_size < 1_000_000

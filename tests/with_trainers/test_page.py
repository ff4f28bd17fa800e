"""The page about trainers shows what its cells and commands really do."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.page_code import code_of, not_shown, run_cells, run_commands, shown_below

PAGE = (Path(__file__).parents[2] / "notebooks" / "how_to" / "trainer.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _no_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide PyPI's torchvision, which fails beside a torch without CUDA: transformers takes what it finds."""
    folder = tmp_path / "hides_torchvision"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text('import sys\n\nsys.modules["torchvision"] = None\n', encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.limit(300)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_the_cells_show_what_stands_below_them(tmp_path: Path) -> None:
    cells = shown_below(PAGE)
    outputs = run_cells([code for code, _ in cells], tmp_path)
    missing = [not_shown(came, shown) for came, (_, shown) in zip(outputs, cells, strict=True)]
    assert [lines for lines in missing if lines] == []


@pytest.mark.limit(240)
@pytest.mark.may_leave("files")  # as above
def test_the_script_runs(tmp_path: Path) -> None:
    run_commands(code_of(PAGE), tmp_path)

from __future__ import annotations

import io
import re

import pytest
from fixtures.screens import Stream

from nb_accelerate.cli.notebook import CellProgress


def shown(*pieces: str) -> str:
    out = io.StringIO()
    progress = CellProgress(out)
    with progress.cell(2, 5, "x = 1"):
        for piece in pieces:
            progress.text(piece)
    return re.sub(r"\d+\.\d s", "0.0 s", out.getvalue())


def test_a_cell_shows_its_number_its_title_and_its_seconds():
    assert shown() == "[2/5] x = 1\n0.0 s\n"


def test_a_last_line_without_an_end_does_not_run_into_the_seconds():
    assert shown("o", "ne").splitlines() == ["[2/5] x = 1", "one", "0.0 s"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Stream:
    for name, value in {"TERM": "xterm", "COLUMNS": "40", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    return Stream()


def test_panels_of_a_cell_are_below_what_it_prints_and_gone_when_it_ends(terminal: Stream):
    progress = CellProgress(terminal)
    assert progress.is_live
    with progress.cell(2, 5, "x = 1"):
        progress.panel("a", ["train 1 %", "rank 0"])
        progress.panel("b", ["test 1 %"])
        progress.text("one\n")
        progress.panel("a", ["train 2 %", "rank 0"])
        both = ["cell 2 of 5 · train 2 %", "rank 0", "test 1 %", ""]
        assert terminal.screen.lines == ["[2/5] x = 1", "one", *both]
        progress.panel("a", [])
        progress.lines("done")
        assert terminal.screen.lines == ["[2/5] x = 1", "one", "done", "cell 2 of 5 · test 1 %", ""]
    assert terminal.screen.lines[:3] == ["[2/5] x = 1", "one", "done"]
    assert re.fullmatch(r"\d+\.\d s\n", "\n".join(terminal.screen.lines[3:]))


@pytest.mark.parametrize("piece", ["two", "\r1/2", "1/2\r"])
def test_panels_wait_for_the_end_of_a_line(terminal: Stream, piece: str):
    progress = CellProgress(terminal)
    with progress.cell(2, 5, "x = 1"):
        progress.panel("a", ["train 1 %"])
        progress.text(piece)
        progress.panel("a", ["train 2 %"])
        assert terminal.screen.lines == ["[2/5] x = 1", piece.strip()]
        progress.text("\n")
        assert terminal.screen.lines[2:] == ["cell 2 of 5 · train 2 %", ""]


def test_what_is_no_terminal_has_no_panels():
    stream = Stream(is_terminal=False)
    progress = CellProgress(stream)
    assert not progress.is_live
    with progress.cell(2, 5, "x = 1"):
        progress.panel("a", ["train 1 %"])
    assert stream.getvalue().splitlines() == ["[2/5] x = 1", "0.0 s"]

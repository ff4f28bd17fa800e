from __future__ import annotations

import io
import re

from nb_accelerate.cli.progress import CellProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(*pieces: str, out: io.StringIO | None = None) -> str:
    out = out or io.StringIO()
    progress = CellProgress(out)
    with progress.cell(2, 5, "x = 1"):
        for piece in pieces:
            progress.text(piece)
    return re.sub(r"\d+\.\d s", "0.0 s", out.getvalue())


def test_a_cell_shows_its_number_its_title_and_its_seconds():
    assert shown() == "[2/5] x = 1\n      0.0 s\n"


def test_what_a_cell_prints_is_indented_wherever_its_pieces_are_cut():
    whole = shown("one\ntwo\n")
    assert whole == "[2/5] x = 1\n      one\n      two\n      0.0 s\n"
    assert shown("o", "ne\nt", "wo", "\n") == whole


def test_a_last_line_without_an_end_does_not_run_into_the_seconds():
    assert shown("one") == "[2/5] x = 1\n      one\n      0.0 s\n"


def test_a_progress_bar_overwrites_itself_on_a_terminal_and_takes_lines_in_a_log():
    assert "\r      1/2\r      2/2\n" in shown("\r1/2", "\r2/2", out=Terminal())
    assert shown("\r1/2", "\r2/2") == "[2/5] x = 1\n      1/2\n      2/2\n      0.0 s\n"

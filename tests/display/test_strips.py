"""The line that says where the time of all ranks goes, and the strips whose colours it explains."""

from __future__ import annotations

import re

from nb_accelerate.base.progress_page import Phase
from nb_accelerate.notebook.display.drawing.strips import kinds_named, legend, strip
from nb_accelerate.notebook.display.phase_times import parts

TIMES = parts({Phase.DATA: 1.0, Phase.FORWARD: 33.3, Phase.BACKWARD: 33.3, Phase.STEP: 0.9, Phase.RUNNING: 31.5})


def said(line: str) -> str:
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", "", line)).strip()


def test_the_line_has_a_subject_and_its_percents_are_100_together() -> None:
    line = said(legend(TIMES))
    assert line == "time of all ranks: forward 33 % backward 33 % between steps 32 % other 2 %"
    assert legend(()) == ""


def test_what_was_named_once_is_named_however_small_it_becomes() -> None:
    named = kinds_named(TIMES)
    assert named == {"forward", "backward", "running", "other"}
    later = parts({Phase.FORWARD: 100.0, Phase.BACKWARD: 0.1})
    assert said(legend(later, named)) == "time of all ranks: forward 100 % backward 0 % between steps 0 %"
    assert said(legend(later)) == "time of all ranks: forward 100 %"
    assert kinds_named(later, named) == named - {"other"}


def test_a_strip_has_its_parts_as_words_too() -> None:
    assert 'aria-label="time of rank 3: loading data 1 %, forward 33 %' in strip(TIMES, "rank 3")
    assert strip((), "rank 3") == '<div class="nba-times"></div>'

"""tqdm in a rank, in all its forms, is drawn in the panel; and where there is no panel stays as it is."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nb_accelerate import notebook_launcher


def on_a_rank(function: Any, *args: Any, progress: str = "text") -> Any:
    return notebook_launcher(function, args, 1, progress=progress, devices="cpu", timeout=40)[0]


def _bars() -> list[tuple[str, float, float | None, bool, int]]:
    from nb_accelerate.base.progress_page import here
    from nb_accelerate.base.progress_page.sample import read

    return [(bar.label, bar.count, bar.total, bar.ended, bar.level) for bar in read(here().buffer).bars]


def _forms(path: str) -> dict[str, Any]:
    import tqdm
    import tqdm.auto
    import tqdm.notebook

    from nb_accelerate.base.progress_page import here

    seen: dict[str, Any] = {}
    page = here()

    def again() -> None:
        page.begin_request()

    makers = {
        "tqdm": lambda: tqdm.tqdm(range(3), desc="a", mininterval=0),
        "trange": lambda: tqdm.trange(3, desc="a", mininterval=0),
        "auto": lambda: tqdm.auto.tqdm(range(3), desc="a", mininterval=0),
        "auto trange": lambda: tqdm.auto.trange(3, desc="a", mininterval=0),
        "notebook": lambda: tqdm.notebook.tqdm(range(3), desc="a", mininterval=0),
        "notebook trange": lambda: tqdm.notebook.trange(3, desc="a", mininterval=0),
    }
    for name, make in makers.items():
        again()
        inside = [_bars() for _ in make()]
        seen[name] = (inside[-1], _bars())

    again()
    for _ in tqdm.trange(2, desc="outer"):
        for _ in tqdm.trange(2, desc="inner", leave=False, mininterval=0):
            seen["nested"] = _bars()
    seen["after nested"] = _bars()

    again()
    for _ in tqdm.trange(2, desc="gone", leave=False):
        tqdm.tqdm.write("written between bars")
    seen["leave=False"] = _bars()

    again()
    with open(path, "w") as file:
        for _ in tqdm.trange(2, desc="in a file", file=file, mininterval=0):
            pass
    seen["file"] = _bars()

    again()
    many = [tqdm.tqdm(total=9, desc=str(number)) for number in range(10)]
    seen["ten"] = _bars()
    for bar in reversed(many):
        bar.update(9)
        bar.close()
    seen["ten closed"] = _bars()

    again()
    left = tqdm.tqdm(total=5, desc="left open by a cell")
    left.update(1)
    again()
    other = tqdm.tqdm(total=5, desc="of the next")
    del left
    seen["next cell"] = _bars()
    other.close()

    again()
    with contextlib.suppress(KeyError):
        for _ in tqdm.trange(5, desc="left"):
            raise KeyError
    seen["raised"] = _bars()

    again()
    bar = tqdm.tqdm(total=None, desc="é\udc80")
    bar.update(2.5)
    bar.refresh()
    seen["odd"] = _bars()
    bar.reset(total=8)
    seen["reset"] = _bars()
    bar.close()
    bar.set_postfix(loss=1.0)
    seen["after its end"] = _bars()
    again()
    list(tqdm.trange(3, disable=True))
    seen["disabled"] = _bars()
    return seen


def test_every_form_of_tqdm_is_in_the_panel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = on_a_rank(_forms, str(tmp_path / "bar"))
    for name in ("tqdm", "trange", "auto", "auto trange", "notebook", "notebook trange"):
        inside, after = seen[name]
        assert inside[0][:1] + inside[0][2:] == ("a", 3.0, False, 0), name
        assert inside[0][1] == 2.0, name
        assert after == [("a", 3.0, 3.0, True, 0)], name
    outer, inner = seen["nested"]
    assert (outer[0], inner[0], outer[4], inner[4]) == ("outer", "inner", 0, 1)
    assert seen["after nested"] == [("outer", 2.0, 2.0, True, 0)]
    assert seen["leave=False"] == []
    assert seen["file"] == [], "a file of the user's is no cell"
    assert "in a file: 100%" in (tmp_path / "bar").read_text()
    assert [bar[0] for bar in seen["ten"]] == [str(number) for number in range(8)]
    assert all(bar[3] for bar in seen["ten closed"])
    assert seen["next cell"] == [("of the next", 0.0, 5.0, False, 0)] or seen["next cell"][0][4] == 1
    assert seen["raised"] == [("left", 0.0, 5.0, True, 0)]
    assert seen["odd"] == [("é?", 2.5, None, False, 0)]
    assert seen["reset"] == [("é?", 0.0, 8.0, False, 0)]
    assert seen["after its end"] == [("é?", 0.0, 8.0, True, 0)]
    assert seen["disabled"] == []
    out, err = capsys.readouterr()
    assert out.count("written between bars") == 2
    assert "it/s]" not in out + err, "no bar is printed as well"
    assert "\n\n" not in err, "nor an empty line for one without a place"


def _texts() -> list[str]:
    from tqdm import tqdm

    from nb_accelerate.base.progress_page import here
    from nb_accelerate.base.progress_page.sample import read

    def text(**options: Any) -> str:
        here().begin_request()
        with tqdm(desc="a", mininterval=0, **options) as bar:
            bar.update(1500)
            bar.set_postfix(loss=0.5, lr="1e-3")
            (seen,) = read(here().buffer).bars
        return seen.text

    return [
        text(total=3000),
        text(),
        text(total=3000, unit="B", unit_scale=True),
        text(total=3000, bar_format="{l_bar}{bar:10}{r_bar}"),
        text(total=3000, bar_format="{desc}: {n} of {total}{postfix}"),
    ]


def test_what_stands_beside_a_bar_is_what_tqdm_writes_there() -> None:
    plain, without_total, bytes_, with_bar, without_bar = on_a_rank(_texts)
    assert plain.startswith("1500/3000 [00:00<00:00, ")
    assert plain.endswith("it/s, loss=0.5, lr=1e-3]")
    assert without_total.startswith("1500it [00:00, ")
    assert bytes_.startswith("1.50k/3.00k [00:00<00:00, ")
    assert with_bar.startswith("1500/3000 [00:00<00:00, ")
    assert without_bar == "1500 of 3000, loss=0.5, lr=1e-3"


def _prints() -> None:
    from tqdm import tqdm
    from tqdm.notebook import tqdm as in_notebooks

    for kind in (tqdm, in_notebooks):
        for _ in kind(range(3), desc="plain"):
            pass


def test_where_there_is_no_panel_bars_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    on_a_rank(_prints, progress="off")
    assert capsys.readouterr().err.count("plain: 100%") == 2


def test_output_that_is_redirected_gets_the_panel(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as error:
        on_a_rank(_prints)
    assert "_prints: done in 0:0" in error.getvalue()
    assert "it/s]" not in error.getvalue() + capsys.readouterr().out


SCRIPT = """
import time
from nb_accelerate import notebook_launcher
from tqdm import trange

def work():
    for _ in trange(4, desc="rows"):
        time.sleep(0.3)
    return 1

if __name__ == "__main__":
    print(notebook_launcher(work, num_processes=2, devices="cpu"))
"""


@pytest.mark.slow
def test_a_script_whose_output_is_a_pipe_prints_lines_without_control_characters(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "TERM": "xterm"},
    )
    assert done.returncode == 0, done.stderr
    assert "work: done in 0:0" in done.stderr
    assert done.stdout.endswith("[1, 1]\n")
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr


def _steps_of_ours() -> list[float]:
    from nb_accelerate import progress

    return [_bars()[0][1] for _ in progress(range(4), "steps")]


def test_a_bar_of_ours_tells_every_step_however_quick_it_was() -> None:
    assert on_a_rank(_steps_of_ours) == [0.0, 1.0, 2.0, 3.0]

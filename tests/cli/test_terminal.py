"""A notebook that `nb-accelerate launch` runs in a terminal, as one sees it there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from fixtures.screens import Terminal

# Ranks go on when the test says so, by making a file.
SETUP = """
import os, time
from nb_accelerate import notebook_launcher, progress

def go_on_with(name):
    while not os.path.exists(name):
        time.sleep(0.01)

def train(end=None):
    for step in progress(range(2), "steps"):
        print("rank", os.environ["RANK"], "begins", step)
        go_on_with(str(step))
    if end is not None:
        end()

def fail():
    if os.environ["RANK"] == "1":
        raise ValueError("not today")
"""
LAUNCH = "notebook_launcher(train, ({end},), num_processes=2, start_method='fork')"


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "nb_accelerate", "launch", str(folder / "a.ipynb"), "--output-dir", str(folder)]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def write(folder: Path, end: str) -> None:
    cells = [nbformat.v4.new_code_cell(code) for code in (SETUP, LAUNCH.format(end=end), "print('the last cell')")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "a.ipynb")


def outputs(folder: Path) -> list[nbformat.NotebookNode]:
    notebook = nbformat.read(folder / "a.executed.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook.cells[1].outputs


def tables(folder: Path) -> list[str]:
    return [output.data["text/plain"] for output in outputs(folder) if output.output_type == "display_data"]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal in which the notebook runs."""
    terminal = Terminal(command(tmp_path), environment())
    try:
        yield terminal
    finally:
        terminal.close()


def wait_for_step(terminal: Terminal, step: int) -> list[str]:
    """Until the block says so; its lines."""
    return block(terminal.wait_for(lambda text: any(f"{step}/2" in line for line in block(text))))


def block(text: str) -> list[str]:
    _, found, rest = text.partition("cell 2 of 3 · ")
    return (found + rest).splitlines()


@pytest.fixture
def plain(tmp_path: Path) -> None:
    write(tmp_path, "None")


@pytest.fixture
def failing(tmp_path: Path) -> None:
    write(tmp_path, "fail")


@pytest.fixture
def deadly(tmp_path: Path) -> None:
    write(tmp_path, f"lambda kernel=os.getpid(): os.kill(kernel, {int(signal.SIGKILL)})")


@pytest.mark.slow
def test_ranks_of_a_cell_are_a_block_below_what_they_print_and_then_a_table(
    plain: None, launched: Terminal, tmp_path: Path
) -> None:
    first = wait_for_step(launched, 0)
    assert re.match(r"cell 2 of\b.*● train\b", first[0])
    assert "steps" in first[-1]
    (tmp_path / "0").touch()
    wait_for_step(launched, 1)
    # What the ranks print next is above a block that is still one.
    awaited = ("rank 0 begins 1", "rank 1 begins 1", "cell 2 of 3")
    shown = launched.wait_for(lambda text: all(piece in text for piece in awaited))
    assert shown.count("cell 2 of 3") == 1
    assert shown.index("rank 1 begins 1") < shown.index("cell 2 of 3")

    (tmp_path / "1").touch()
    assert launched.finish() == 0
    last = launched.screen.text
    assert "cell 2 of 3" not in last
    assert last.count("2/2") == 1
    assert last.index("✓ train ·") < last.index("2/2") < last.index("[3/3] print('the last cell')")
    assert [line for line in launched.screen.lines if line.strip() == ""] == [""]  # nothing but the last
    (table,) = tables(tmp_path)
    assert "2/2" in table
    assert "application/vnd" not in (tmp_path / "a.executed.ipynb").read_text(encoding="utf-8")


@pytest.mark.slow
def test_where_output_is_redirected_there_are_lines_and_nothing_else(plain: None, tmp_path: Path) -> None:
    for step in range(2):
        (tmp_path / str(step)).touch()
    env = environment() | {"TERM": "xterm"}
    ended = subprocess.run(command(tmp_path), env=env, capture_output=True, timeout=45, check=False)
    text = ended.stdout.decode()
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert "\x1b" not in text
    assert "cell 2 of 3" not in text
    assert "[rank 1] rank 1 " in text
    (table,) = tables(tmp_path)
    assert "2/2" in table


@pytest.mark.slow
def test_ctrl_c_leaves_how_far_the_ranks_were(plain: None, launched: Terminal, tmp_path: Path) -> None:
    wait_for_step(launched, 0)
    (tmp_path / "0").touch()
    wait_for_step(launched, 1)
    launched.press("\x03")
    assert launched.finish() == 130
    last = launched.screen.text
    assert "cell 2 of 3" not in last
    assert last.index("■ train ·") < last.index("1/2") < last.index("interrupted\nwrote ")
    (table,) = tables(tmp_path)
    assert "1/2" in table


@pytest.mark.slow
def test_a_rank_that_fails_is_in_the_table_and_its_traceback_below(
    failing: None, launched: Terminal, tmp_path: Path
) -> None:
    wait_for_step(launched, 0)
    for step in range(2):
        (tmp_path / str(step)).touch()
    assert launched.finish() == 1
    last = launched.screen.text
    assert "cell 2 of 3" not in last
    assert last.index("✗ train") < last.index("ValueError") < last.index("cell 2 failed: ")
    assert "2/2" in tables(tmp_path)[0]


@pytest.mark.slow
def test_of_a_kernel_that_dies_no_block_is_left(deadly: None, launched: Terminal, tmp_path: Path) -> None:
    wait_for_step(launched, 0)
    launched.wait_for(lambda text: "rank 0 begins 0" in text and "rank 1 begins 0" in text)
    for step in range(2):
        (tmp_path / str(step)).touch()
    assert launched.finish() == 1
    last = launched.screen.text
    assert "cell 2 of 3" not in last
    assert "rank 1 begins 0" in last
    assert "kernel's process ended" in last
    assert {output.output_type for output in outputs(tmp_path)} == {"stream"}

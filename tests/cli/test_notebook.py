from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import psutil
import pytest

from nb_accelerate.cli import notebook
from nb_accelerate.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path):
    """Write a notebook of code cells and return its path."""

    def write(*cells: str) -> Path:
        path = tmp_path / "sample.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)
        return path

    return write


def streams(run: notebook.NotebookRun) -> list[str]:
    return [output.text for cell in run.notebook.cells for output in cell.outputs if output.output_type == "stream"]


def test_a_notebook_runs_in_its_folder_with_this_python(write):
    path = write(
        "# what we need\nimport os, sys",
        "for i in range(3):\n    print('line', i, flush=True)",
        "print(os.getcwd(), sys.executable, sep='|')",
    )
    progress = io.StringIO()
    run = notebook.execute(path, progress=progress)

    assert run.failure is None
    lines, places = streams(run)
    assert lines.splitlines() == [f"line {i}" for i in range(3)]  # one output, although they came one by one
    folder, python = places.strip().split("|")
    assert Path(folder) == path.parent.resolve()
    assert Path(python).samefile(sys.executable)
    shown = progress.getvalue()
    assert "[1/3] what we need\n" in shown
    assert f"in range(3):\n{lines}" in shown


def test_a_failing_cell_ends_the_run_and_everything_so_far_can_be_written(write, tmp_path: Path):
    run = notebook.execute(write("print('fine')", "1 / 0", "print('never')"), progress=io.StringIO())

    assert run.failure is not None
    assert (run.failure.number, run.failure.title) == (2, "1 / 0")
    assert "ZeroDivisionError: division by zero" in run.failure.render(color=False)
    assert "\x1b[" in run.failure.render(color=True)
    assert "\x1b[" not in run.failure.render(color=False)
    assert streams(run) == ["fine\n"]

    written = nbformat.read(notebook.write_notebook(run, tmp_path / "out"), as_version=4)
    nbformat.validate(written)
    assert [cell.execution_count for cell in written.cells] == [1, 2, None]
    page = notebook.write_page(run, tmp_path / "out")
    assert page.name == "sample.html"
    assert "ZeroDivisionError" in page.read_text(encoding="utf-8")


def test_a_kernel_that_dies_is_a_failure_of_the_running_cell(write):
    run = notebook.execute(write("x = 1", "import os; os._exit(3)", "x"), progress=io.StringIO())
    assert run.failure is not None
    assert run.failure.render(color=False) == (
        "cell 2 failed: import os; os._exit(3)\nThe kernel's process ended while this cell was running."
    )


def test_a_progress_bar_is_saved_as_a_terminal_would_show_it(write):
    run = notebook.execute(
        write("for i in range(5): print(f'\\r{i}/4', end='', flush=True)\nprint(' done')"), progress=io.StringIO()
    )
    assert streams(run) == ["4/4 done\n"]


def test_what_is_not_a_notebook_is_refused_with_its_name(tmp_path: Path):
    path = tmp_path / "broken.ipynb"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.ipynb"):
        notebook.execute(path, progress=io.StringIO())


def test_a_launch_reads_a_notebook_without_a_parser_that_takes_seconds_to_build(tmp_path: Path):
    path = tmp_path / "broken.ipynb"
    path.write_text("{")
    command = [sys.executable, "-X", "importtime", "-m", "nb_accelerate", "launch", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert "Jupyter can read" in run.stderr
    assert re.search(r"\bjsonschema$", run.stderr, re.MULTILINE)
    assert not re.search(r"\blark\b", run.stderr)


# They sleep in small pieces: one long sleep may begin just after the signal has come, and never hear of it.
SLEEPY = "import time\nprint('asleep', flush=True)\nwhile True: time.sleep(0.1)"
STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print('no', flush=True))
print('asleep', flush=True)
while True: time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("cell", "answers"),
    [
        (SLEEPY, {"asleep": signal.SIGINT}),
        pytest.param(STUBBORN, {"asleep": signal.SIGINT, "no": signal.SIGINT}, marks=pytest.mark.slow),
        pytest.param(STUBBORN, {"asleep": signal.SIGTERM}, marks=pytest.mark.slow),
    ],
    ids=["interrupt", "interrupt twice", "terminate"],
)
def test_a_stopped_run_ends_its_kernel_and_writes_what_there_is(write, cell: str, answers: dict[str, int]):
    path = write("print('before')", cell, "print('never')")
    env = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    command = [sys.executable, "-m", "nb_accelerate", "launch", str(path), "--output-dir", str(path.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        kernels = []
        for line in process.stdout:
            if line.strip() in answers:
                kernels = kernels or psutil.Process(process.pid).children(recursive=True)
                process.send_signal(answers[line.strip()])
    assert process.returncode == 130
    assert kernels
    assert not any(kernel.is_running() for kernel in kernels)
    written = nbformat.read(path.parent / "sample.executed.ipynb", as_version=4)
    assert written.cells[0].outputs[0].text == "before\n"
    assert "asleep\n" in written.cells[1].outputs[0].text
    assert written.cells[2].outputs == []

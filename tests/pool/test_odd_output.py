"""Output that cannot be shown as it is: it is shown as well as can be, and the next cell runs."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.kernels import Cell, Kernel


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.run("%load_ext nb_accelerate").ok()
    shared_kernel.run("%distributed config --progress off").ok()
    shared_kernel.run("%distributed start -n 3").ok()
    return shared_kernel


@pytest.fixture(autouse=True)
def _cells_still_run(notebook: Kernel) -> Iterator[None]:
    yield
    cell = notebook.run("%%distributed\nprint('fine')", timeout=10.0).ok()
    assert "fine\n" in cell.stdout


def run(notebook: Kernel, code: str, *, magic: str = "%%distributed") -> Cell:
    return notebook.run(f"{magic}\n{textwrap.dedent(code)}")


def shown(cell: Cell) -> str:
    return cell.stdout + cell.stderr + "".join(data.get("text/plain", "") for data in cell.displays)


def test_a_loop_may_be_left_early_at_the_top_of_a_cell(notebook: Kernel):
    notebook.run("numbers = [1, 2, 3]").ok()
    cell = run(notebook, "for i in numbers:\n    if i == 2:\n        break\nelse:\n    i = 0\nprint('left at', i)").ok()
    assert cell.stdout == "left at 2\n"


@pytest.mark.parametrize("ranks", ["0,1", "0"])
def test_a_rank_that_does_not_run_the_cell_may_print_draw_bars_and_show_things(
    notebook: Kernel, ranks: str, tmp_path: Path
):
    begin, end = str(tmp_path / "begin"), str(tmp_path / "end")
    os.mkfifo(begin)
    os.mkfifo(end)
    run(
        notebook,
        f"""
        import threading
        def speak():
            open({begin!r}).close()
            print("from a thread")
            print("10%\\r20%", end="", flush=True)
            print("\\r30%")
            display({{"text/plain": "a figure"}}, raw=True)
            print("all said")
        if rank == 2:
            threading.Thread(target=speak, daemon=True).start()
        """,
    ).ok()
    cell = notebook.start(f"%%rank {ranks}\nif rank == 0:\n    open({begin!r}, 'w').close(); open({end!r}).close()")
    seen = notebook.wait_for_output(cell, "all said")
    open(end, "w").close()
    assert "[rank 2] from a thread\n" in seen
    assert re.search(r"\[rank 2\] +\n", seen)  # above the figure
    assert "[rank 2] 30%\n" in seen
    notebook.finish(cell).ok()


def test_half_a_letter_is_shown_as_an_escape(notebook: Kernel):
    half = "'a\\ud800b'"
    cell = run(notebook, f"print({half})\ndisplay({{'text/plain': {half}, {half}: 1}}, raw=True)\n{half}").ok()
    assert cell.stdout == "a\\ud800b\n"
    assert [data["text/plain"] for data in cell.displays] == ["a\\ud800b", "'a\\ud800b'"]
    failed = run(notebook, f"raise ValueError({half})")
    assert (failed.error, failed.message) == ("ValueError", "a\\ud800b")
    assert "a\\ud800b" in failed.traceback


def test_displays_that_are_no_displays_are_shown_as_far_as_they_go(notebook: Kernel):
    cell = run(
        notebook,
        """
        publish = get_ipython().display_pub.publish
        publish(data=None)
        publish(data=None, metadata=3, transient=[1])
        publish(data={"text/plain": None, 3: float("nan")}, transient={"display_id": ["x"]})
        publish(data={"text/plain": "no place"}, update=True)
        publish(data={"text/plain": "another"}, update=True, transient={"display_id": 7})
        publish(data=["text/plain"])
        print("after")
        """,
    ).ok()
    assert cell.stdout == "after\n"
    circular = run(notebook, "a = {}\na['a'] = a\npublish(data=a)")
    assert circular.error == "ValueError"


def test_what_is_too_much_is_counted_where_no_log_can_be_written(notebook: Kernel):
    notebook.run("import tempfile; _before = tempfile.gettempdir(); tempfile.tempdir = '/no/such/folder'").ok()
    cell = run(notebook, "for i in range(6000): print('line', i)").ok()
    notebook.run("tempfile.tempdir = _before").ok()
    assert cell.stdout.count("\n") == 5000
    assert re.match(r"\W+1,000 .*no log", cell.displays[-1]["text/plain"])
    assert cell.displays[-1]["text/plain"].endswith("line 5999")


@pytest.mark.may_leave("files")  # the log, which the cell names
def test_what_is_too_much_by_its_size_goes_to_a_log_too(notebook: Kernel):
    cell = run(notebook, "print('x' * 3_000_000, end='')", magic="%%rank 1").ok()
    assert len(cell.stdout) == 1 << 20
    text = cell.displays[-1]["text/plain"]
    match = re.match(r"\.\.\. 1,951,424 more characters; all 3,000,000 are in (\S+)\. ", text)
    assert match, text[:200]
    assert len(text) < 30_000
    Path(match[1]).unlink()


CAPTURED = """
import contextlib, io
out, err = io.StringIO(), io.StringIO()
def show():
    import sys
    print("printed"); print("complained", file=sys.stderr)
"""


def test_output_of_launches_and_cells_is_captured_where_a_cell_captures_its_own(notebook: Kernel):
    notebook.run(CAPTURED).ok()
    launch = "from nb_accelerate import notebook_launcher\nnotebook_launcher(show, (), 1, progress='off')"
    cell = notebook.run(f"%%capture held\n{launch}").ok()
    assert (cell.stdout, cell.stderr, cell.displays) == ("", "", [])
    assert notebook.run("held.stdout, held.stderr").ok().value == r"('printed\n', 'complained\n')"
    cell = notebook.run(f"with contextlib.redirect_stdout(out):\n    {launch.replace(chr(10), '; ')}").ok()
    assert (cell.stdout, cell.stderr) == ("", "complained\n")
    assert notebook.run("out.getvalue()").ok().value == r"'printed\n'"
    magic = "get_ipython().run_cell_magic('distributed', '', 'show(); display({\"text/plain\": \"rich\"}, raw=True)')"
    cell = notebook.run(f"%%capture held\n{magic}").ok()
    assert (cell.stdout, cell.stderr, cell.displays) == ("", "", [])
    assert notebook.run("held.stdout, held.stderr, [one.data for one in held.outputs]").ok().value == (
        r"('printed\n', 'complained\n', [{'text/plain': 'rich'}])"
    )
    cell = notebook.run(f"with contextlib.redirect_stderr(err):\n    {magic}").ok()
    assert (cell.stdout, cell.stderr, cell.displays) == ("printed\n", "", [{"text/plain": "rich"}])


def test_a_widget_of_a_rank_says_what_to_use_instead(notebook: Kernel):
    cell = run(notebook, "import ipywidgets\nslider = ipywidgets.IntSlider()\ndisplay(slider)\nslider")
    said = [data for data in cell.ok().displays if "nb_accelerate.progress" in data.get("text/plain", "")]
    assert len(said) == 2
    assert not any("widget-view" in kind for data in said for kind in data)

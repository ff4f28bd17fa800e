"""What ranks print: complete, in order, and never more than a cell can show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fixtures.kernels import Kernel

from nb_accelerate.notebook.protocol.output import StreamName
from nb_accelerate.notebook.ranks.output.request_output import RequestOutput
from nb_accelerate.notebook.ranks.output.sinks import Sink

SETUP = """
import ctypes, functools, os, subprocess, sys, time
from nb_accelerate import notebook_launcher
launch = functools.partial(notebook_launcher, progress="off", fold_output=False)

def rank():
    return int(os.environ["RANK"])

def counts(lines):
    for i in range(lines):
        print(f"rank {rank()} line {i}")
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.run(SETUP).ok()
    shared_kernel.run("launch(rank)").ok()
    return shared_kernel


def text_of(cell_displays: list[dict[str, str]]) -> str:
    return cell_displays[-1]["text/plain"]


@pytest.mark.may_leave("files")  # the log, which the cell names
def test_a_flood_is_complete_in_a_file_and_a_bounded_tail_in_the_cell(notebook: Kernel) -> None:
    cell = notebook.run("launch(counts, (100_000,), 2)").ok()
    assert cell.stdout.count("\n") == 5000
    assert len(cell.displays) < 60
    match = re.match(r"\.\.\. 195,000 more lines; all 200,000 are in (\S+)\. The last ones:\n", text_of(cell.displays))
    assert match, text_of(cell.displays)
    assert len(text_of(cell.displays).splitlines()) == 21
    path = Path(match[1])
    lines = path.read_text().splitlines()
    for number in (0, 1):
        own = [line for line in lines if line.startswith(f"rank {number} ")]
        assert own == [f"rank {number} line {i}" for i in range(100_000)]
    path.unlink()


def test_as_many_lines_as_a_cell_shows_need_no_file(notebook: Kernel) -> None:
    cell = notebook.run("launch(counts, (5000,))").ok()
    assert cell.stdout.count("\n") == 5000
    assert not cell.displays


def test_python_c_and_subprocesses_keep_their_order_within_a_stream(notebook: Kernel) -> None:
    notebook.run(
        "def mixed():\n"
        "    libc = ctypes.CDLL(None)\n"
        "    for i in range(50):\n"
        "        print('python', i)\n"
        "        libc.write(1, b'c\\n', 2)\n"
        "        print('error', i, file=sys.stderr)\n"
        "    subprocess.run(['echo', 'sub'])\n"
        "    subprocess.run(['echo', 'given'], stdout=sys.stdout)\n"
    ).ok()
    cell = notebook.run("launch(mixed, (), 1)").ok()
    assert cell.stdout.split("\n") == [*(w for i in range(50) for w in (f"python {i}", "c")), "sub", "given", ""]
    assert cell.stderr.split("\n") == [*(f"error {i}" for i in range(50)), ""]


def test_lines_printed_by_several_threads_stay_whole(notebook: Kernel) -> None:
    notebook.run(
        "def threads():\n"
        "    import threading\n"
        "    def count(name):\n"
        "        for i in range(300): print(name, i)\n"
        "    all_of_them = [threading.Thread(target=count, args=(name,)) for name in 'abcd']\n"
        "    for one in all_of_them: one.start()\n"
        "    for one in all_of_them: one.join()\n"
    ).ok()
    lines = notebook.run("launch(threads, (), 1)").ok().stdout.splitlines()
    assert sorted(lines) == sorted(f"{name} {i}" for name in "abcd" for i in range(300))


def test_bytes_and_text_keep_their_order_and_a_forked_process_prints_while_a_thread_does(notebook: Kernel) -> None:
    notebook.run(
        "def both():\n"
        "    import threading\n"
        "    sys.stdout.write('a'); sys.stdout.buffer.write(b'b'); print('c'); sys.stderr.buffer.write(b'd\\n')\n"
        "    over = threading.Event()\n"
        "    def go_on():\n"
        "        while not over.is_set(): print('x' * 100_000)\n"
        "    thread = threading.Thread(target=go_on); thread.start()\n"
        "    import warnings; warnings.simplefilter('ignore', DeprecationWarning)  # of os.fork(), of Python 3.12\n"
        "    for number in range(20):\n"
        "        child = os.fork()\n"
        "        if not child: print('child', number); os._exit(0)\n"
        "        os.waitpid(child, 0)\n"
        "    over.set(); thread.join()\n"
    ).ok()
    notebook.run("%%capture held\nlaunch(both, (), 1)").ok()  # a cell would not show all of it
    assert notebook.run("held.stdout[:4], held.stderr").ok().value == r"('abc\n', 'd\n')"
    said = notebook.run("import re\n' '.join(re.findall(r'child \\d+', held.stdout))").ok().value
    assert said == repr(" ".join(f"child {number}" for number in range(20)))
    notebook.run("del held").ok()


def test_print_takes_what_it_always_takes(notebook: Kernel) -> None:
    notebook.run(
        "def prints():\n"
        "    print('a', 1, sep='-', end='!\\n')\n"
        "    print('b', 2, sep=None, end=None)\n"
        "    print()\n"
        "    print('c', file=sys.stderr, flush=True)\n"
        "    print('surrogate \\ud800', flush=True)\n"
        "    try: print('d', sep=1)\n"
        "    except TypeError as error: print(error)\n"
        "    try: sys.stdout.write(b'bytes')\n"
        "    except TypeError: print('no bytes')\n"
        "    return print\n"
    ).ok()
    cell = notebook.run("import builtins\nlaunch(prints, (), 1) == [builtins.print]").ok()
    assert cell.stdout.splitlines()[:4] == ["a-1!", "b 2", "", r"surrogate \ud800"]
    assert cell.stdout.splitlines()[4:] == ["sep must be None or a string, not int", "no bytes"]
    assert cell.stderr == "c\n"
    assert cell.value == "True"


def test_one_rank_shows_a_line_that_is_not_finished(notebook: Kernel) -> None:
    cell = notebook.start("launch(lambda: (print('half', end=''), time.sleep(600)))")
    assert notebook.wait_for_output(cell, "half") == "half"
    notebook.interrupt()
    notebook.finish(cell)


def test_lines_get_the_prefix_that_was_asked_for(notebook: Kernel) -> None:
    cell = notebook.run("launch(counts, (2,), 2, log_line_prefix_template='[${role_name}${local_rank}] ')").ok()
    expected = [f"[default{rank}] rank {rank} line {line}" for rank in (0, 1) for line in (0, 1)]
    assert sorted(cell.stdout.splitlines()) == expected


def test_one_rank_gets_its_prefix_also_if_equal_lines_are_folded(notebook: Kernel) -> None:
    cell = notebook.run("launch(counts, (1,), 1, log_line_prefix_template='[${rank}] ', fold_output=True)").ok()
    assert cell.stdout == "[0] rank 0 line 0\n"


def test_equal_lines_are_shown_once_and_others_with_their_rank(notebook: Kernel) -> None:
    notebook.set_timeouts(
        "nb_accelerate.notebook.launch.Launch", fold=600.0
    )  # a line may be this late and is still equal
    notebook.run("def mostly_equal():\n    print('same'); print('differs by', rank()); print('same again')").ok()
    cell = notebook.run("notebook_launcher(mostly_equal, (), 3, progress='off')").ok()
    assert sorted(cell.stdout.splitlines()) == [
        *(f"[rank {rank}] differs by {rank}" for rank in range(3)),
        "same",
        "same again",
    ]


def test_what_accelerator_prints_has_no_rank_and_stays_in_its_place(notebook: Kernel) -> None:
    notebook.set_timeouts("nb_accelerate.notebook.launch.Launch", fold=600.0)
    code = """\
def talk():
    from nb_accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    print("begins")
    accelerator.print("rank", accelerator.process_index, "tells")
    print("same")
    accelerator.print("half", end=" ")
    accelerator.print("a line")
    print("same again")
    print("on", accelerator.process_index)
    accelerator.print("ends")
    accelerator.print("to a file", file=sys.stderr)
import sys
notebook_launcher(talk, (), {ranks}, progress='off'{more})"""
    cell = notebook.run(code.format(ranks=2, more="")).ok()
    lines = "begins\nrank 0 tells\nsame\nhalf a line\nsame again\n[rank 0] on 0\nends\n[rank 1] on 1\n"
    assert (cell.stdout, cell.stderr) == (lines, "[rank 0] to a file\n")
    one = notebook.run(code.format(ranks=1, more="")).ok()
    assert one.stdout == "begins\nrank 0 tells\nsame\nhalf a line\nsame again\non 0\nends\n"
    template = notebook.run(code.format(ranks=2, more=", log_line_prefix_template='<${rank}> '")).ok()
    assert "<0> rank 0 tells" in template.stdout.splitlines(), "who asks for a prefix gets it"


def test_text_of_any_kind_arrives(notebook: Kernel) -> None:
    cell = notebook.run("launch(lambda: (print('grüße 你好 🎉'), os.write(1, b'\\xff bytes\\n')))").ok()
    assert cell.stdout == "grüße 你好 🎉\n� bytes\n"


def test_reading_input_ends_at_once(notebook: Kernel) -> None:
    assert notebook.run("launch(lambda: input())").error == "EOFError"


class Page(Sink):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.due = float("inf")
        self.seen: list[tuple[str, str]] = []

    def write(self, stream: StreamName, text: str) -> None:
        self.seen.append((stream, text))


def test_folding_waits_for_every_rank_but_not_for_ever() -> None:
    page = Page()
    fold = RequestOutput([0, 1], page, hold=600.0)
    assert fold.due == float("inf")
    fold.text(0, "stdout", "a\nb\n")
    assert page.seen == []
    assert fold.due < float("inf")
    fold.text(1, "stdout", "a\n")
    assert page.seen == [("stdout", "a\n")]
    fold.finish()
    assert page.seen[1:] == [("stdout", "[rank 0] b\n")]
    assert fold.due == float("inf")

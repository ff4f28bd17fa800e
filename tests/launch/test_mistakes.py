"""The commonest mistakes, and what the notebook shows of each: the user's line, what was wrong, and what to write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, NamedTuple

import IPython
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from fixtures.kernels import Kernel

_MAX_LINES = 12
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

SETUP = """
import os, signal, threading, time
import torch
from nb_accelerate import Accelerator, notebook_launcher

def ok():
    return 1

class Holder:
    def __init__(self):
        self.rows = (x for x in ())

%load_ext nb_accelerate
"""


class Mistake(NamedTuple):
    """A mistake.

    Attributes:
        code: of the cell. The line that is to be shown ends in ``# here``; none for a magic, which is its own line.
        says: what is to be read, in this order.
    """

    code: str
    says: tuple[str, ...]


BEFORE_RANKS = {
    "an unknown start method": Mistake(
        "notebook_launcher(ok, num_processes=2, start_method='thread')  # here",
        ("ConfigError: start_method='thread'", "'forkserver'"),
    ),
    "a misspelt name of the package": Mistake(
        "import nb_accelerate\nnb_accelerate.notebook_luncher  # here",
        ("AttributeError: module 'nb_accelerate' has no", "'notebook_luncher'. Did you mean 'notebook_launcher'?"),
    ),
    "no ranks": Mistake("notebook_launcher(ok, num_processes=0)  # here", ("ConfigError: num_processes=0",)),
    "a misspelt precision": Mistake(
        "notebook_launcher(ok, num_processes=2, mixed_precision='fp61')  # here",
        ("ConfigError: mixed_precision='fp61'", "'fp16'"),
    ),
    "one argument that is no tuple": Mistake(
        "notebook_launcher(ok, 3, num_processes=2)  # here", ("ConfigError: args=3", "args=(3,)")
    ),
    "an argument that notebook_launcher does not take": Mistake(
        "notebook_launcher(ok, num_process=2)  # here",
        ("UnknownArgumentError:", "'num_process'. Did you mean 'num_processes'?"),
    ),
    "an argument of the function, given to notebook_launcher": Mistake(
        "notebook_launcher(lambda lr: lr, lr=0.1)  # here",
        (
            "UnknownArgumentError:",
            "'lr'. It is an argument of <lambda>: notebook_launcher(<lambda>, kwargs=dict(lr=0.1))",
        ),
    ),
    "a function that was called": Mistake(
        "notebook_launcher(ok(), num_processes=2)  # here", ("ConfigError: function=1", "notebook_launcher(train")
    ),
    "a device that is not there": Mistake(
        "notebook_launcher(ok, devices='xpu')  # here", ("ConfigError: devices='xpu'", "devices='cpu'")
    ),
    "an option of the Accelerator": Mistake(
        "def train():\n    Accelerator(mixed_precision='fp61')  # here\ntrain()",
        ("line 3\n", "train()", "in train", "ConfigError: mixed_precision='fp61'"),
    ),
    "an argument that the Accelerator does not take": Mistake(
        "Accelerator(cpu=True, project='x')  # here", ("UnknownArgumentError:", "'project'", "'project_dir'")
    ),
    "gathering what is no tensor": Mistake(
        "Accelerator(cpu=True).gather({'a': 'x'})  # here", ("NotATensorError:", "'x'", "gather_object")
    ),
    "a checkpoint that is not there": Mistake(
        "import tempfile\nwith tempfile.TemporaryDirectory() as folder:\n    one = Accelerator(cpu=True)\n"
        "    one.save_state(folder + '/checkpoint_4')\n    one.load_state(folder + '/checkpoint_5')  # here",
        ("ConfigError: There is no folder", "checkpoint_5"),
    ),
    "a tracker that there is not": Mistake("Accelerator(log_with='wandbb')  # here", ("ConfigError:", "'wandb'")),
    "accumulation over no steps": Mistake(
        "Accelerator(gradient_accumulation_steps=0)  # here", ("ConfigError:", "gradient_accumulation_steps=0")
    ),
    "an argument that cannot be pickled": Mistake(
        "notebook_launcher(lambda x: x, (Holder(),), num_processes=2, start_method='spawn')  # here",
        ("ShippingError: args[0].rows", "inside the function", "start_method='fork'"),
    ),
    "an Accelerator from outside": Mistake(
        "acc = Accelerator()\ndef use():\n    return acc.device\nnotebook_launcher(use, num_processes=2)  # here",
        ("ShippingError: use -> global 'acc'", "inside of the function"),
    ),
    "an async function": Mistake(
        "async def later():\n    return 1\nnotebook_launcher(later, num_processes=2)  # here",
        ("ConfigError:", "is an async function", "Pass a plain function"),
    ),
    "a generator": Mistake(
        "def each():\n    yield 1\nnotebook_launcher(each, num_processes=2)  # here",
        ("ConfigError:", "is a generator function", "Pass a plain function"),
    ),
    "a misspelt option of a cell": Mistake("%%distributed --rank 1\n1", ("ConfigError:", "'--ranks'")),
    "a cell that does not compile": Mistake("%%distributed\nfor x in\n", ("line 2", "for x in", "SyntaxError:")),
    "a misspelt command": Mistake("%distributed stpo", ("ConfigError:", "'stop'")),
    "sending a name that there is not": Mistake(
        "%distributed push nosuch", ("NameError: name 'nosuch'", "in the notebook")
    ),
    "asking ranks that do not run": Mistake("%distributed pull x", ("PoolError:", "%distributed start")),
}

WITH_RANKS = {
    "a value that cannot be pickled": Mistake(
        "def gives():\n    return (x for x in ())\nnotebook_launcher(gives, num_processes=2)  # here",
        ("ShippingError", "all 2 ranks", "the returned value"),
    ),
    "too little time": Mistake(
        "def wait():\n    time.sleep(60)\nnotebook_launcher(wait, num_processes=2, timeout=1)  # here",
        ("DeadlineError:", "timeout=1 s", "in wait, cell "),
    ),
    "a rank that is killed": Mistake(
        "def die():\n    if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n    time.sleep(60)\n"
        "notebook_launcher(die, num_processes=2)  # here",
        ("RankDiedError: rank 1 was ended by SIGKILL", "rank 0 was in die, cell "),
    ),
    "an error on every rank": Mistake(
        "def fail():\n    raise ValueError('no')  # here\nnotebook_launcher(fail, num_processes=2)",
        ("ValueError", "all 2 ranks", "in fail", "ValueError: no"),
    ),
    "an error on one rank": Mistake(
        "def fail():\n    if Accelerator().process_index == 1: raise ValueError('no')  # here\n"
        "notebook_launcher(fail, num_processes=2)",
        ("ValueError", "rank 1 of 2", "in fail", "ValueError: no"),
    ),
    "CUDA on ranks that have none": Mistake(
        "def move():\n    torch.ones(1, device='cuda')  # here\nnotebook_launcher(move, num_processes=2)",
        ("all 2 ranks", "in move", "Write accelerator.device where the code names one"),
    ),
    "parameters that get no gradient": Mistake(
        "class Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.used, self.unused = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)\n"
        "    def forward(self, x):\n        return self.used(x)\n"
        "def train():\n    a, model = Accelerator(), Model()\n"
        "    model, optimizer = a.prepare(model, torch.optim.SGD(model.parameters()))\n"
        "    a.backward(model(torch.ones(1)).sum())\n    optimizer.step()  # here\n"
        "notebook_launcher(train, num_processes=2)",
        ("all 2 ranks", "got no gradient", "find_unused_parameters"),
    ),
    "a loss that is a number": Mistake(
        "def train():\n    a = Accelerator()\n    model = a.prepare(torch.nn.Linear(1, 1))\n"
        "    a.backward(model(torch.ones(1)).sum().item())  # here\nnotebook_launcher(train, num_processes=2)",
        ("all 2 ranks", "takes the loss as a tensor, not as float"),
    ),
    "an argument too many": Mistake(
        "notebook_launcher(ok, (1,), num_processes=2)  # here", ("TypeError", "all 2 ranks", "0 positional arguments")
    ),
    "an option of the Accelerator, in ranks": Mistake(
        "def train():\n    Accelerator(mixed_precision='fp61')  # here\nnotebook_launcher(train, num_processes=2)",
        ("ConfigError", "all 2 ranks", "in train", "ConfigError: mixed_precision='fp61'"),
    ),
    "tensors of unequal shape": Mistake(
        "def uneven():\n    a = Accelerator()\n    a.gather(torch.ones(2 + a.process_index))  # here\n"
        "notebook_launcher(uneven, num_processes=2)",
        ("CollectiveMismatchError", "all 2 ranks", "(2,)", "(3,)", "pad_across_processes"),
    ),
}

IN_CELLS = {
    "an error in a cell, on one rank": Mistake(
        "%%distributed\nif rank == 1:\n    raise ValueError('no')  # here", ("rank 1 of 2", "ValueError: no")
    ),
    "a name that no rank has": Mistake("%%distributed\nprnt(rank)  # here", ("all 2 ranks", "NameError: name 'prnt'")),
    "another number of ranks": Mistake("%%distributed -n 3\n1", ("PoolError: -n 3", "%distributed stop")),
    "a rank that is killed in a cell": Mistake(
        "%%distributed\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)",
        ("RankDiedError: rank 1 was ended by SIGKILL", "%distributed restart 1"),
    ),
    "a cell without the rank that was killed": Mistake("%%distributed\n1", ("PoolError:", "%distributed restart 1")),
}


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.run(SETUP).ok()
    return shared_kernel


def check_what_is_shown(notebook: Kernel, mistake: Mistake) -> None:
    cell = notebook.run(mistake.code)
    shown = _COLOURS.sub("", cell.traceback)
    assert cell.error is not None
    assert shown != cell.traceback, "no colours"
    assert len(shown.splitlines()) <= _MAX_LINES, shown
    assert "nb_accelerate/" not in shown, "frames of the package"
    assert cell.stderr == "", "told twice"
    rest = shown
    for part in mistake.says:
        assert part in rest, shown
        rest = rest[rest.index(part) + len(part) :]
    if "# here" in mistake.code:
        assert any("--->" in line and line.endswith("# here") for line in shown.splitlines()), shown


@pytest.mark.parametrize("name", BEFORE_RANKS)
def test_a_mistake_that_is_seen_before_ranks_start_is_told_in_a_few_lines(notebook: Kernel, name: str) -> None:
    check_what_is_shown(notebook, BEFORE_RANKS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_RANKS)
def test_a_mistake_that_a_rank_makes_is_told_in_a_few_lines(notebook: Kernel, name: str) -> None:
    check_what_is_shown(notebook, WITH_RANKS[name])


def test_a_module_that_does_not_compile_is_told_with_its_line_and_that_of_the_import(
    notebook: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "mistaken.py").write_text("def f(:\n")
    notebook.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\ndef use():\n    import mistaken").ok()
    try:
        shown = _COLOURS.sub("", notebook.run("notebook_launcher(use, num_processes=1)").traceback)
        in_a_cell = _COLOURS.sub("", notebook.run("%%distributed -n 1\nimport mistaken").traceback)
    finally:
        notebook.run(f"sys.path.remove({str(tmp_path)!r})\n%distributed stop").ok()
    # IPython adds the lines that led there to a SyntaxError, whatever the error says: a frame of ours.
    assert shown.count("nb_accelerate/") == 1, shown
    for lines in (shown, in_a_cell):
        assert lines.count("mistaken.py") == 1
        assert lines.count("SyntaxError: invalid syntax") == 1
    if IPython.version_info >= (8,):  # IPython 7 shows no notes of a SyntaxError
        assert re.search(r"rank 0\b.* use,.*line 3\.$", shown.strip())
    assert re.search(r"Cell In\[\d+\], line 2\n", in_a_cell)


def test_a_variable_brings_all_frames_back(notebook: Kernel) -> None:
    code = BEFORE_RANKS["no ranks"].code
    try:
        notebook.run("%env NB_ACCELERATE_FULL_TRACEBACK=1").ok()
        assert "nb_accelerate/notebook/launch/launcher.py" in notebook.run(code).traceback
    finally:
        notebook.run("del os.environ['NB_ACCELERATE_FULL_TRACEBACK']").ok()


@pytest.mark.slow
def test_a_mistake_in_a_cell_is_told_in_a_few_lines_and_an_interrupt_tells_where_ranks_were(notebook: Kernel) -> None:
    try:
        for mistake in IN_CELLS.values():
            check_what_is_shown(notebook, mistake)
        notebook.run("%distributed restart").ok()
        cell = notebook.start("%%distributed\nimport time\nprint('there')\ntime.sleep(60)")
        notebook.wait_for_output(cell, "there")
        notebook.interrupt()
        shown = _COLOURS.sub("", notebook.finish(cell).traceback)
        assert re.fullmatch(r"KeyboardInterrupt\b.*\n.*\b0 and 1\b.*line 4", shown), shown
    finally:
        notebook.run("%distributed stop").ok()


SCRIPT = """
import sys
from nb_accelerate import notebook_launcher

def fail():
    raise ValueError("no")

def main():
    notebook_launcher(fail, num_processes=2, **eval(sys.argv[1]))

main()
"""


def lines_of_script(tmp_path: Path, options: str, **environment: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, script, options]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=50, check=False, env={**os.environ, **environment}
    )
    assert ran.returncode == 1
    return ran.stderr.splitlines()


def test_a_script_shows_the_lines_of_the_user_and_not_those_of_the_package(tmp_path: Path) -> None:
    *places, gap, message = lines_of_script(tmp_path, "{'start_method': 'thread'}")
    assert [line.strip() for line in places[1::2]] == [
        "main()",
        "notebook_launcher(fail, num_processes=2, **eval(sys.argv[1]))",
    ]
    assert [re.sub(r".*/", "", line) for line in places[::2]] == ["script.py:11", "script.py:9, in main"]
    assert gap == ""
    assert message.startswith("ConfigError: start_method='thread'")


def test_a_script_shows_all_frames_when_it_is_asked_to(tmp_path: Path) -> None:
    shown = lines_of_script(tmp_path, "{'start_method': 'thread'}", NB_ACCELERATE_FULL_TRACEBACK="1")
    assert shown[0].startswith("Traceback (most recent")
    assert any("nb_accelerate/notebook/launch/launcher.py" in line for line in shown)


@pytest.mark.slow
def test_a_script_shows_where_a_rank_failed(tmp_path: Path) -> None:
    about, head, place, line, gap, message = lines_of_script(tmp_path, "{}")
    assert about == "2 processes on CPU"
    assert head.split() == ["ValueError", "all", "2", "ranks"]
    assert place.endswith("script.py:6, in fail")
    assert line.strip() == 'raise ValueError("no")'
    assert (gap, message) == ("", "ValueError: no")

"""`notebook_launcher` in a real kernel, cell after cell, as a user would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fixtures.kernels import Kernel

SETUP = """
import functools, os, sys, time
from dataclasses import dataclass
import torch
from nb_accelerate import notebook_launcher

@dataclass
class Settings:
    lr: float

class NoLoss(Exception):
    def __init__(self, step, *, rank):
        super().__init__(f"no loss at step {step}")
        self.step, self.rank = step, rank

SCALE = 10

launch = functools.partial(notebook_launcher, progress='off')

def rank():
    return int(os.environ["RANK"])

def train(settings, factor=1):
    return Settings(settings.lr * factor * SCALE + rank())
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.wait_for_server()
    shared_kernel.run(SETUP).ok()
    shared_kernel.run(
        f"sys.path.append({str(Path(__file__).parents[1])!r})\n"
        "from fixtures.deadlines import every_rank_is_heard, log_of, overdue_when\n"
        "sys.path.pop()"
    ).ok()
    shared_kernel.run("launch(rank, (), 2)").ok()  # the warm server is there from here on
    # A fork of a kernel that did this would hang in its first matmul.
    shared_kernel.run("x = torch.randn(1500, 1500); y = (x @ x).sum().item()").ok()
    return shared_kernel


@pytest.fixture(autouse=True)
def _nothing_is_left(notebook: Kernel) -> Iterator[None]:
    before = notebook.counts()
    yield
    assert before["processes"] == 0, notebook.processes()
    assert notebook.settles_at(before), (before, notebook.counts(), notebook.processes())


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.contract("a launch: values come back")
def test_values_of_classes_and_globals_from_cells_come_back_in_rank_order(notebook: Kernel) -> None:
    cell = notebook.run("launch(train, (Settings(0.5),), 3, kwargs={'factor': 2})").ok()
    assert "Settings(lr=10.0), Settings(lr=11.0), Settings(lr=12.0)" in cell.displays[0]["text/plain"]
    assert notebook.run("type(launch(train, (Settings(1.),), 1)[0]) is Settings").ok().value == "True"


def test_one_line_says_what_was_chosen(notebook: Kernel) -> None:
    cell = notebook.run("notebook_launcher(lambda: None, (), 2, 'bf16')").ok()
    assert re.fullmatch(r"2 processes.*, bf16\n", cell.stdout)
    assert notebook.run("notebook_launcher(lambda: None)").ok().stdout == "1 process on CPU\n"


def test_a_cell_that_ends_in_a_launch_shows_nothing_when_every_value_is_none(notebook: Kernel) -> None:
    cell = notebook.run("launch(lambda: None, (), 2)").ok()
    assert (cell.value, cell.displays) == (None, [])


def test_two_then_one_then_two_ranks_in_one_kernel(notebook: Kernel) -> None:
    for number in (2, 1, 2):
        cell = notebook.run(f"len(launch(rank, (), {number}))").ok()
        assert cell.value == str(number)


@pytest.mark.contract("a launch: after a matrix product")
def test_after_a_large_matmul_in_the_kernel_ranks_can_do_one_too(notebook: Kernel) -> None:
    cell = notebook.run("len(launch(lambda: (x @ x).sum().item(), (), 2))").ok()
    assert cell.value == "2"


def test_a_closure_is_launched_and_edited_and_launched_again(notebook: Kernel) -> None:
    notebook.run("def make(k):\n    def inner():\n        return k * rank()\n    return inner").ok()
    assert notebook.run("print(launch(make(3), (), 2))").ok().stdout == "[0, 3]\n"
    notebook.run("def rank():\n    return int(os.environ['RANK']) + 100").ok()
    assert notebook.run("print(launch(make(3), (), 2))").ok().stdout == "[300, 303]\n"
    notebook.run(SETUP).ok()


def test_what_ranks_print_is_in_the_cell_in_whole_lines(notebook: Kernel) -> None:
    notebook.run(
        "def talk():\n"
        "    for i in range(300):\n"
        "        print(f'rank {rank()}', end=' '); print(f'line {i}')\n"
        "    print('oops', rank(), file=sys.stderr)\n"
        "    os.system('echo from a subprocess')\n"
        "    os.write(2, b'from C\\n')\n"
    ).ok()
    cell = notebook.run("launch(talk, (), 2, fold_output=False)").ok()
    lines = cell.stdout.splitlines()
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"rank {rank} ")]
        assert own == [f"rank {rank} line {i}" for i in range(300)]
    assert lines.count("from a subprocess") == 2
    assert sorted(cell.stderr.splitlines()) == ["from C", "from C", "oops 0", "oops 1"]


@pytest.mark.contract("a launch: an exception")
def test_an_exception_has_its_own_type_the_rank_and_the_lines_of_the_cell(notebook: Kernel) -> None:
    notebook.run(
        "import tempfile\n"
        "there = tempfile.mktemp()\n"
        "def fails(step):\n"
        "    if rank() == 1:\n"
        "        while not os.path.exists(there):\n"
        "            time.sleep(0.01)\n"
        "        raise NoLoss(step, rank=rank())\n"
        "    open(there, 'w').close()\n"
        "    time.sleep(60)\n"
    ).ok()
    cell = notebook.run("with every_rank_is_heard():\n    launch(fails, (7,), 2)")
    assert (cell.error, cell.message) == ("NoLoss", "no loss at step 7")
    shown = plain(cell.traceback)
    assert "rank 1 of 2" in shown
    assert re.search(r"Cell In\[\d+\], line 7, in fails", shown)
    assert "---> 7         raise NoLoss(step, rank=rank())" in shown
    assert "ranks/loop.py" not in shown
    caught = notebook.run(
        "try:\n    launch(fails, (7,), 2)\nexcept NoLoss as error:\n    print(error.step, error.rank)\nos.remove(there)"
    ).ok()
    assert caught.stdout == "7 1\n"


def test_a_chained_exception_shows_its_cause(notebook: Kernel) -> None:
    notebook.run(
        "def chained():\n"
        "    try:\n        {}['x']\n"
        "    except KeyError as error:\n        raise ValueError('bad') from error"
    ).ok()
    shown = plain(notebook.run("launch(chained, (), 2)").traceback)
    assert shown.index("KeyError: 'x'") < shown.index("direct cause") < shown.index("ValueError: bad")


@pytest.mark.contract("a launch: a killed rank")
def test_a_rank_that_dies_is_named_with_its_signal_and_its_last_words(notebook: Kernel) -> None:
    notebook.run(
        "import signal\n"
        "def dies():\n"
        "    import torch.distributed as dist\n"
        "    dist.init_process_group('gloo')\n"
        "    if rank() == 1:\n"
        "        print('last words', end='')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    dist.barrier()\n"
    ).ok()
    cell = notebook.run("launch(dies, (), 2)")
    assert cell.error == "RankDiedError"
    assert re.search("rank 1 .*SIGKILL", cell.message)
    assert "last words" in cell.message


@pytest.mark.parametrize(
    ("call", "said"),
    [("sys.exit(3)", "rank 0 called sys.exit(3)"), ("os._exit(4)", "0 ended with exit code 4")],
)
def test_a_rank_that_exits_is_named_with_its_exit_code(notebook: Kernel, call: str, said: str) -> None:
    cell = notebook.run(f"launch(lambda: {call}, (), 1)")
    assert cell.error == "RankDiedError"
    assert said in cell.message


def test_exiting_with_code_0_is_returning(notebook: Kernel) -> None:
    assert notebook.run("print(launch(lambda: sys.exit(0), (), 2))").ok().stdout == "[None, None]\n"


@pytest.mark.contract("a launch: an interrupt")
def test_an_interrupt_ends_the_cell_and_the_ranks_and_the_kernel_goes_on(notebook: Kernel) -> None:
    cell = notebook.start(
        "def waits():\n    print('here', rank(), flush=True)\n    time.sleep(600)\nlaunch(waits, (), 2)"
    )
    printed = notebook.wait_for_output(cell, "here 0")
    if "here 1" not in printed:
        notebook.wait_for_output(cell, "here 1")
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"
    assert notebook.run("len(launch(rank, (), 2))").ok().value == "2"


def test_an_accelerator_made_in_the_kernel_before_is_no_obstacle(notebook: Kernel) -> None:
    notebook.run("from nb_accelerate import Accelerator\naccelerator = Accelerator()").ok()
    notebook.run("def sees():\n    a = Accelerator()\n    return a.process_index, a.num_processes").ok()
    assert notebook.run("print(launch(sees, (), 2))").ok().stdout == "[(0, 2), (1, 2)]\n"
    assert notebook.run("accelerator.num_processes").ok().value == "1"


BAD = {
    "num_processes=0": ("ConfigError", "num_processes=0 is too small. Write an integer of at least 1"),
    "num_processes='2'": ("ConfigError", "num_processes='2' is of type str, not a whole number"),
    "args=(5)": ("ConfigError", r"^args=5 is of type int, but must be a tuple.*Write args=\(5,\)$"),
    "args=[5]": ("ConfigError", r"^args=\[5\] is of type list, but must be a tuple.*Write args=tuple\(\.\.\.\)$"),
    "num_process=2": ("UnknownArgumentError", "'num_process'. Did you mean 'num_processes'"),
    "mixed_precision='fp61'": ("ConfigError", "mixed_precision='fp61' is not a choice. Did you mean 'fp16'"),
    "start_method='forksrver'": ("ConfigError", "Did you mean 'forkserver'"),
    "env={'A': 1}": ("ConfigError", "Write 'A': '1'"),
    "timeout=-1": ("ConfigError", "timeout=-1"),
    "args=(FILE,)": ("ShippingError", r"^args\[0\] cannot be sent.*send its path"),
}


@pytest.mark.parametrize("argument", BAD)
def test_an_argument_that_cannot_be_is_one_clear_error(notebook: Kernel, argument: str) -> None:
    notebook.run("FILE = open('/dev/null', 'w')").ok()
    cell = notebook.run(f"launch(train, {argument})")
    kind, text = BAD[argument]
    assert cell.error == kind
    assert re.search(text, cell.message), cell.message


@pytest.mark.parametrize("shows_all", [False, True])
def test_frames_of_libraries_are_folded_unless_all_are_wanted(notebook: Kernel, shows_all: bool) -> None:
    notebook.run("import torch\ndef layers():\n    torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(1, 3))").ok()
    notebook.run(f"import os; os.environ['NB_ACCELERATE_FULL_TRACEBACK'] = '{shows_all:d}'").ok()
    text = plain(notebook.run("launch(layers, (), 2)").traceback)
    notebook.run("del os.environ['NB_ACCELERATE_FULL_TRACEBACK']").ok()
    assert "in layers\n" in text
    assert "in forward\n    return F.linear(" in text
    if shows_all:
        assert "frames of torch" not in text
        assert "_wrapped_call_impl" in text
    else:
        assert re.search(r"\d frames of torch;.*NB_ACCELERATE_FULL_TRACEBACK=1", text)
        assert "_wrapped_call_impl" not in text


def test_what_is_not_a_function_is_refused_with_the_right_call(notebook: Kernel) -> None:
    cell = notebook.run("launch(rank.__name__, (), 2)")
    assert cell.error == "ConfigError"
    assert "type str and cannot" in cell.message
    cell = notebook.run("import torch\nlaunch({'weights': torch.ones(50, 50)}, (), 2)")
    assert re.search(r"function=\{'weights': tensor\(\[\[.{0,80}\.\.\. .*type dict", cell.message)


def test_a_value_that_cannot_come_back_says_what_and_where(notebook: Kernel) -> None:
    cell = notebook.run("launch(lambda: {'a': (x for x in ())}, (), 2)")
    assert cell.error == "ShippingError"
    assert "returned value['a'] cannot" in cell.message
    assert "Send back" in cell.message


def test_a_value_that_cannot_be_unpickled_is_told_without_our_frames(notebook: Kernel) -> None:
    cell = notebook.run(
        "class Odd:\n    def __reduce__(self):\n        return int, ('x',)\nlaunch(lambda: Odd(), (), 2)"
    )
    assert cell.error == "ValueError"
    shown = plain(cell.traceback)
    assert re.search("rank 0 .*unpickled", shown)
    assert len(shown.splitlines()) < 6


def test_a_prepared_model_comes_back_as_the_model_in_it(notebook: Kernel) -> None:
    notebook.run(
        "from nb_accelerate import Accelerator\n"
        "class Net(torch.nn.Linear):\n"
        "    pass\n"
        "def prepare():\n"
        "    model = Accelerator().prepare(Net(2, 2))\n"
        "    import copy, cloudpickle\n"
        "    for other in (copy.deepcopy(model), cloudpickle.loads(cloudpickle.dumps(model))):\n"
        "        assert type(other) is type(model) and type(other).__name__ == 'DistributedDataParallel'\n"
        "        assert torch.equal(other(torch.ones(1, 2)), model(torch.ones(1, 2)))\n"
        "    return model"
    ).ok()
    cell = notebook.run("first, second = launch(prepare, (), 2)\ntype(first), type(second), second.weight.shape")
    assert cell.ok().value == "(__main__.Net, __main__.Net, torch.Size([2, 2]))"


def test_a_prepared_optimizer_and_scheduler_come_back_as_those_in_them(notebook: Kernel) -> None:
    notebook.run(
        "from nb_accelerate import Accelerator\n"
        "from nb_accelerate.training.state import AcceleratorState\n"
        "AcceleratorState._reset_state(True)\n"  # earlier cells may have made an Accelerator here
        "def prepare():\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)\n"
        "    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)\n"
        "    model, optimizer, scheduler = Accelerator().prepare(model, optimizer, scheduler)\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "    return optimizer, scheduler"
    ).ok()
    notebook.run("(optimizer, scheduler), _ = launch(prepare, (), 2)\nscheduler.step()").ok()
    cell = notebook.run("type(optimizer).__name__, type(scheduler).__name__, optimizer.param_groups[0]['lr']")
    assert cell.ok().value == "('SGD', 'StepLR', 0.25)"


def test_a_short_run_without_a_panel_tells_that_its_loss_is_nan(notebook: Kernel) -> None:
    notebook.run(
        "def diverge():\n"
        "    accelerator = Accelerator()\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    data = torch.utils.data.DataLoader(torch.ones(40, 1))\n"
        "    model, data = accelerator.prepare(model, data)\n"
        "    for batch in data:\n"
        "        accelerator.backward(model(batch).sum() * float('nan'))"
    ).ok()
    notebook.run("from nb_accelerate import Accelerator").ok()
    cell = notebook.run("notebook_launcher(diverge, (), 2, progress='text')").ok()
    assert re.search(r"is nan .*step \d+", cell.stderr)


@pytest.mark.contract("a launch: a deadline")
def test_a_timeout_says_where_every_rank_was(notebook: Kernel) -> None:
    notebook.run("def waits():\n    print('here', flush=True); time.sleep(600)").ok()
    cell = notebook.run(
        "both_wait = overdue_when(lambda request: all('here' in log_of(request, rank) for rank in (0, 1)))\n"
        "with both_wait, every_rank_is_heard():\n"
        "    launch(waits, (), 2, timeout=600)"
    )
    assert cell.error == "DeadlineError"
    assert "timeout=600 s" in cell.message
    assert re.search(r"\b0 and 1\b.*\bwaits,.*line 2", plain(cell.traceback))


def test_the_environment_and_folder_of_a_rank_are_those_of_the_kernel_now(notebook: Kernel) -> None:
    notebook.run("os.environ['SET_LATE'] = 'yes'; sys.path.append('/a/late/folder')").ok()
    cell = notebook.run(
        "here = os.getcwd()\n"
        "def look():\n"
        "    return os.environ.get('SET_LATE'), os.environ['MINE'], os.getcwd() == here, sys.path[-1]\n"
        "print(launch(look, (), 1, env={'MINE': 'too'}))"
    ).ok()
    assert cell.stdout == "[('yes', 'too', True, '/a/late/folder')]\n"
    notebook.run("del os.environ['SET_LATE']; sys.path.pop()").ok()


def test_mixed_precision_reaches_the_accelerator(notebook: Kernel) -> None:
    notebook.run(
        "def precision():\n    from nb_accelerate import Accelerator\n    return Accelerator().mixed_precision"
    ).ok()
    assert notebook.run("print(launch(precision, (), 2, 'bf16'))").ok().stdout == "['bf16', 'bf16']\n"

"""What pickle looks for in ``__main__`` is there in a launched function: classes and functions of the notebook."""

from __future__ import annotations

import multiprocessing.context
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.kernels import Kernel

from nb_accelerate.notebook.worker.patches.loaders import fork_by_default

NOTEBOOK = """
import collections, concurrent.futures, enum, functools, io, multiprocessing as mp, pickle, typing
import torch
from nb_accelerate import Accelerator, notebook_launcher
from nb_accelerate.utils import broadcast_object_list, gather_object
launch = functools.partial(notebook_launcher, num_processes=2, progress="off")

class Parts:
    class Kind(enum.Enum):
        FIRST = 1
    class Part:
        pass

Pair = collections.namedtuple("Pair", "x y")

class Row(typing.NamedTuple):
    x: int

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.activation = activation
        self.kinds = [Parts.Kind.FIRST, Parts.Part]

def activation(x):
    return x.relu()

def row(x):
    return Row(x)

def puts(queue):
    queue.put(Row(3))

def comes_back(value):
    return pickle.loads(pickle.dumps(value))

def saves(model, path):
    accelerator = Accelerator(cpu=True)
    accelerator.save(model, path)
    accelerator.wait_for_everyone()
    again = torch.load(path, weights_only=False)
    return type(again) is type(model) and again.kinds == model.kinds and again.activation is model.activation

def gathers():
    accelerator = Accelerator(cpu=True)
    rows = gather_object([Row(accelerator.process_index)])
    return rows + broadcast_object_list([Row(7) if accelerator.is_main_process else None])

def maps(pool):
    with pool:
        return list(pool.map(row, [1, 2]))

def queues(method):
    context = mp.get_context(method)
    queue = context.Queue()
    process = context.Process(target=puts, args=(queue,))
    process.start()
    found = queue.get(timeout=30)
    process.join()
    return found

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return Row(index)

def loads(method):
    loader = torch.utils.data.DataLoader(
        Rows(), 2, num_workers=1, collate_fn=as_they_are, multiprocessing_context=method)
    return list(loader)

def as_they_are(rows):
    return rows

def defines():
    global defined
    defined = 5
    import __main__
    return __main__.defined, __main__.Row is Row

def displays():
    from IPython.display import display
    display(1)
    return Out, comes_back(Row(1))

Out = "mine"
model, kinds = Net(), [Parts.Kind.FIRST, Parts.Part]
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    shared_kernel.warm_up()
    shared_kernel.run(NOTEBOOK).ok()
    shared_kernel.run(f"path = {str(tmp_path_factory.mktemp('saved') / 'model.pt')!r}").ok()
    return shared_kernel


ROWS = "[Row(x=1), Row(x=2)]"


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("launch(saves, (model, path))", "[True, True]"),
        ("launch(lambda: saves(model, path))", "[True, True]"),
        ("launch((lambda kinds: lambda: comes_back(kinds) == kinds)(kinds))", "[True, True]"),
        ("launch(comes_back, (Pair(1, Row(2)),))[0]", "Pair(x=1, y=Row(x=2))"),
        ("launch(gathers)[1]", "[Row(x=0), Row(x=1), Row(x=7)]"),
        ("launch(lambda: maps(mp.get_context('fork').Pool(2)))[0]", ROWS),
        ("launch(lambda: maps(concurrent.futures.ProcessPoolExecutor(2, mp.get_context('fork'))))[0]", ROWS),
        ("launch(queues, ('fork',))[0]", "Row(x=3)"),
        ("launch(queues, ('spawn',))[0]", "Row(x=3)"),
        ("launch(loads, ('fork',))[0]", "[[Row(x=0), Row(x=1)]]"),
        pytest.param("launch(loads, ('forkserver',))[0]", "[[Row(x=0), Row(x=1)]]", marks=pytest.mark.slow),
        ("launch(defines)[1]", "(5, True)"),
        ("'defined' in launch(lambda: [*__import__('__main__').__dict__])[0]", "False"),
        ("launch(displays)[0]", "('mine', Row(x=1))"),
    ],
)
def test_a_launched_function_pickles_what_cells_define(notebook: Kernel, call: str, value: str) -> None:
    assert notebook.run(f"print({call})").ok().stdout == f"{value}\n"


def test_a_cell_on_ranks_pickles_what_reached_it_in_a_variable(notebook: Kernel) -> None:
    notebook.run("%load_ext nb_accelerate\nheld, calls = [Net()], [row]").ok()
    cell = "buffer = io.BytesIO()\ntorch.save(held, buffer)\nwith mp.get_context('fork').Pool(1) as pool:\n"
    cell += "    print(pool.map(calls[0], [1]))"
    assert notebook.run(f"%%distributed -n 2\n{cell}").ok().stdout.endswith("[Row(x=1)]\n")
    notebook.run("%unload_ext nb_accelerate").ok()


SCRIPT = """
import multiprocessing, pickle, sys
from nb_accelerate import notebook_launcher

class Net:
    pass

def comes_back():
    return type(pickle.loads(pickle.dumps(Net()))) is Net

def launches():
    print(notebook_launcher(comes_back, num_processes=2, progress="off", start_method="forkserver"))

if __name__ == "__main__":
    launches()
    process = multiprocessing.get_context("spawn").Process(target=launches)
    process.start()
    process.join()
"""


@pytest.mark.slow
def test_so_does_a_function_of_a_script_also_one_that_multiprocessing_has_spawned(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    run = subprocess.run([sys.executable, str(script)], timeout=60, check=False, capture_output=True, text=True)
    assert run.stdout == "[True, True]\n" * 2, run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems spawn by default")
def test_children_of_a_rank_are_forked_unless_another_way_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    default: Any = multiprocessing.context._default_context
    monkeypatch.setattr(default, "_default_context", multiprocessing.get_context("forkserver"))  # as in Python 3.14
    monkeypatch.setattr(default, "_actual_context", None)
    fork_by_default()
    assert multiprocessing.get_start_method(allow_none=True) is None
    assert multiprocessing.get_start_method() == "fork"
    default._actual_context = None
    multiprocessing.set_start_method("spawn")
    assert multiprocessing.get_start_method() == "spawn"

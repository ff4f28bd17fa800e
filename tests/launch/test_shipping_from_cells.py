"""What a notebook has reaches its ranks, and what ranks make comes back, whatever the size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fixtures.kernels import Kernel

SETUP = """
import dataclasses, enum, functools, os, sys, torch
from nb_accelerate import notebook_launcher
launch = functools.partial(notebook_launcher, progress="off")

def rank():
    return int(os.environ["RANK"])

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    def moved(self, by):
        return Point(self.x + by)

class Squares(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __getitem__(self, index):
        return helper(index)

def helper(index):
    return index * index
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Kernel:
    shared_kernel.warm_up()
    shared_kernel.run(SETUP).ok()
    shared_kernel.run("launch(rank)").ok()
    return shared_kernel


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("lambda: Point(1).moved(rank())", "[Point(x=1), Point(x=2)]"),
        ("lambda: Colour.RED", "[<Colour.RED: 1>, <Colour.RED: 1>]"),
        ("functools.partial(pow, 2, 3)", "[8, 8]"),
        ("Point(3).moved(4).moved.__func__.__name__.upper", "['MOVED', 'MOVED']"),
        ("lambda: (lambda f: f(f, 5))(lambda f, n: 1 if n == 0 else n * f(f, n - 1))", "[120, 120]"),
    ],
)
def test_what_cells_define_travels_both_ways(notebook: Kernel, expression: str, value: str) -> None:
    assert notebook.run(f"print(launch({expression}, (), 2))").ok().stdout == f"{value}\n"


def test_classes_come_back_as_the_notebooks_own(notebook: Kernel) -> None:
    cell = notebook.run("v = launch(lambda: (Point(1), Colour.RED))[0]\nprint(type(v[0]) is Point, v[1] is Colour.RED)")
    assert cell.ok().stdout == "True True\n"


@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]
)
def test_loader_workers_run_data_sets_from_cells(notebook: Kernel, context: str) -> None:
    notebook.run(
        "def loads(context):\n"
        "    loader = torch.utils.data.DataLoader(Squares(6), 2, num_workers=1, multiprocessing_context=context)\n"
        "    return [batch.tolist() for batch in loader]"
    ).ok()
    cell = notebook.run(f"print(launch(loads, ({context!r},), 1))").ok()
    assert cell.stdout == f"{[[[0, 1], [4, 9], [16, 25]]]}\n"


def test_a_module_that_was_edited_is_imported_as_it_is_now_or_sent_as_it_is_in_memory(
    notebook: Kernel, tmp_path: Path
) -> None:
    module = tmp_path / "edited_module.py"
    module.write_text("def answer():\n    return 'first'\n")
    notebook.run(f"sys.dont_write_bytecode = True\nsys.path.insert(0, {str(tmp_path)!r})\nimport edited_module").ok()
    assert notebook.run("print(launch(edited_module.answer))").ok().stdout == "['first']\n"
    module.write_text("def answer():\n    return 'second'\n")
    assert notebook.run("print(launch(edited_module.answer))").ok().stdout == "['second']\n"
    by_value = notebook.run("print(launch(edited_module.answer, by_value=[edited_module]))").ok()
    assert by_value.stdout == "['first']\n"


def test_a_package_installed_a_moment_ago_can_be_imported(notebook: Kernel, tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    notebook.run(f"sys.path.append({str(folder)!r})").ok()
    notebook.run("launch(rank)").ok()
    (folder / "just_installed.py").write_text("value = 7\n")
    notebook.run("def uses():\n    import just_installed\n    return just_installed.value").ok()
    assert notebook.run("print(launch(uses, (), 2))").ok().stdout == "[7, 7]\n"


@pytest.mark.parametrize("method", ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_all_ranks_draw_the_random_numbers_that_the_notebook_would_draw(notebook: Kernel, method: str) -> None:
    notebook.run(
        "import random, numpy\n"
        "def draws():\n"
        "    import random, numpy, torch\n"
        "    return random.random(), numpy.random.rand(), torch.rand(()).item(), torch.initial_seed()\n"
        "torch.manual_seed(3); numpy.random.seed(3); random.seed(3)"
    ).ok()
    cell = notebook.run(
        f"first, second = launch(draws, (), 2, start_method='{method}')\n"
        "print(first == second == draws(), launch(draws, (), 2)[1] == draws() != first)"
    ).ok()
    assert cell.stdout == "True True\n"


def test_a_function_finds_its_own_source_in_a_rank(notebook: Kernel) -> None:
    notebook.run("def source():\n    import inspect\n    return inspect.getsource(helper)").ok()
    cell = notebook.run("print(launch(source)[0])").ok()
    assert "return index * index" in cell.stdout


def test_what_fails_as_it_arrives_is_named(notebook: Kernel) -> None:
    notebook.run("class Opens:\n    def __setstate__(self, state):\n        raise OSError('no such device')").ok()
    notebook.run("first, camera, last = {'a': 1}, [Opens(), {'b': 2}], 'text'\ncamera[0].number = 3").ok()
    notebook.run("def use():\n    return first, camera, last\ndef train():\n    return first, use(), last").ok()
    for cell in ("launch(train)", "%load_ext nb_accelerate\n%distributed start -n 1", "%%distributed\nuse()"):
        failed = notebook.run(cell)
        assert "start" in cell or (failed.error == "OSError" and "variable 'camera'" in failed.traceback)
    notebook.run("%unload_ext nb_accelerate").ok()


def test_data_in_memory_is_shared_by_a_fork_without_being_pickled(notebook: Kernel) -> None:
    notebook.run("unpicklable = {'rows': (x for x in ()), 'data': torch.arange(5)}").ok()
    cell = notebook.run("print(launch(lambda: unpicklable['data'].sum().item(), (), 2, start_method='fork'))").ok()
    assert cell.stdout == "[10, 10]\n"


@pytest.mark.limit(120)
@pytest.mark.slow
def test_a_gigabyte_goes_there_and_back(notebook: Kernel) -> None:
    cell = notebook.run(
        "big = torch.arange(1 << 27, dtype=torch.float64)\n"
        "back = launch(lambda t: t.mul_(2), (big,), 1)[0]\n"
        "print(back.shape, back[-1].item() == 2 * big[-1].item(), big[-1].item() == (1 << 27) - 1)\n"
        "del big, back",
        timeout=100,
    ).ok()
    assert cell.stdout == "torch.Size([134217728]) True True\n"


@pytest.mark.slow
def test_what_cannot_be_sent_is_forked_where_that_is_safe_and_refused_by_its_name_otherwise(notebook: Kernel) -> None:
    notebook.run(
        "import torch, torch.distributed as dist\nfrom nb_accelerate import Accelerator\n"
        "NUMBERS = (number for number in [7])\n"
        "def trains():\n"
        "    model = torch.nn.Linear(400, 400)\n"
        "    Accelerator().prepare(model)(torch.ones(400, 400)).sum().backward()\n"
        "    return next(NUMBERS), dist.get_world_size(), torch.get_num_threads()\n"
        "(torch.ones(2000, 2000) @ torch.ones(2000, 2000).requires_grad_()).sum().backward()\n"  # on all cores
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())"
    ).ok()
    cell = notebook.run("print(notebook_launcher(trains, (), 2))").ok()
    said, values = cell.stdout.splitlines()[-2:]
    assert said.startswith("trains -> global 'NUMBERS'")
    assert "forks" in said
    assert eval(values) == [(7, 2, 1)] * 2
    assert notebook.run("(dist.get_world_size(), dist.destroy_process_group())[0]").ok().value == "1"
    cell = notebook.run("launch(trains, (), 2, start_method='forkserver')")
    assert cell.error == "ShippingError"
    assert "global 'NUMBERS'" in cell.message


BY_STRINGS = {
    "eval(NAME)()": "NameError",
    "globals()[NAME]()": "KeyError",
    "getattr(sys.modules['__main__'], NAME)()": "AttributeError",
}


@pytest.mark.parametrize("expression", BY_STRINGS)
def test_a_name_in_a_string_is_not_sent_and_the_line_that_sends_it_works(notebook: Kernel, expression: str) -> None:
    notebook.run(
        "%load_ext nb_accelerate\nNAME = 'Net'\n"
        "class Net:\n    def __repr__(self): return 'a net'\n"
        "def reads_a_dictionary():\n    return {}['Net']\n"
        f"def builds():\n    return {expression}"
    ).ok()
    for cell, place in (("launch(builds, (), 2)", "builds"), (f"%%distributed\n{expression}", "the cell")):
        failed = notebook.run(cell)
        assert failed.error == BY_STRINGS[expression]
        advice = re.search(r"\nNet is .* Write it in (.*) as a line of its own: (\w+)$", failed.traceback)
        assert advice is not None, failed.traceback
        assert advice[1] == place
    line = advice[2]
    cell = notebook.run(f"def builds():\n    {line}\n    return {expression}\nprint(launch(builds, (), 2))")
    assert cell.ok().stdout == "[a net, a net]\n"
    assert "a net" in notebook.run(f"%%distributed\n{line}\nprint({expression})").ok().stdout
    assert "Write it" not in notebook.run("launch(reads_a_dictionary, (), 2)").traceback
    notebook.run("%distributed stop").ok()

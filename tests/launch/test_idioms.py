"""What strangers' notebooks define can be launched and run in cells, with the values of plain Python.

A row is what somebody writes into a cell: a function that returns a value, and what it uses. Its name is that of the
row. Names are different in all rows: all of them are sent by one launch, and by one cell.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from fixtures.kernels import Kernel

IDIOMS = {
    "seeds": """
import random, numpy as np, torch
def seed_everything(seed=42):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
def seeds():
    seed_everything()
    return torch.rand(2).tolist(), torch.backends.cudnn.deterministic
""",
    "flags": """
import torch.backends.cudnn as cudnn
def flags():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return cudnn.allow_tf32, "mps" if torch.backends.mps.is_available() else "cpu", cudnn is torch.backends.cudnn
""",
    "words_of_torch": """
import torch.distributed.config
class Words(torch.utils.data.Dataset):
    classes, ops, config = ["a", "b"], 1, 2
words = Words()
def words_of_torch():
    return len(words.classes), words.ops, words.config, torch.distributed.is_available()
""",
    "operators": """
aten, add, mul = torch.ops.aten, torch.ops.aten.add.Tensor, torch.ops.aten.mul
def operators():
    one = torch.ones(())
    return aten.sub(one, one).item(), add is aten.add.Tensor, mul(one, 3).item()
""",
    "a_module_that_is_an_object": """
import self_made_module
def a_module_that_is_an_object():
    import self_made_module as again
    return self_made_module.rate, again is self_made_module
""",
    "cached": """
import functools
@functools.lru_cache(maxsize=16)
def tripled(i):
    return i * 3
@functools.cache
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
class Rows:
    scale = 4
    @functools.cache
    def load(self, i):
        return self.scale * i
    @staticmethod
    @functools.lru_cache
    def twice(i):
        return 2 * i
class Reader:
    read = tripled
rows, reader = Rows(), Reader()
reader.load = tripled
def cached():
    return tripled(2), tripled.cache_parameters(), fib(50), rows.load(3), Rows.twice(4), reader.load is tripled
""",
    "functions_of_c": """
from scipy.special import expit
import math, operator
activations, ufuncs = [torch.relu, torch.nn.functional.gelu, math.sqrt], [np.exp, expit]
largest = np.maximum.reduce
def functions_of_c():
    of_one = [float(each(torch.ones(()))) for each in activations]
    return of_one, [float(each(0.0)) for each in ufuncs], int(largest([1, 2]))
""",
    "typed": """
from typing import Callable, Generic, NewType, ParamSpec, TypeVar
UserId, T, P = NewType("UserId", int), TypeVar("T"), ParamSpec("P")
class Box(Generic[T]):
    def __init__(self, content: T):
        self.content = content
def timed(function: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)
    return inner
@timed
def next_user(user: UserId) -> UserId:
    return UserId(user + 1)
def typed() -> int:
    return Box[int](next_user(UserId(3))).content
""",
    "libraries": """
import ctypes
libc = ctypes.CDLL("libc.so.6")
libc.labs.restype, libc.labs.argtypes = ctypes.c_long, [ctypes.c_long]
strlen = ctypes.CDLL("libc.so.6").strlen
def libraries():
    return libc.malloc_trim(0) in (0, 1), libc.labs(-(2**40)), strlen(b"abc")
""",
    "a_singleton": """
class Missing:
    def __reduce__(self):
        return "MISSING"
MISSING = Missing()
def value_of(row, key, default=MISSING):
    return row.get(key) if default is MISSING else default
def a_singleton():
    return value_of({"a": 1}, "a"), value_of({}, "a", 2)
""",
    "looked_at": """
loader = torch.utils.data.DataLoader(torch.arange(4), 2, num_workers=1, persistent_workers=True)
first = next(iter(loader))
def looked_at():
    return [batch.tolist() for batch in loader]
""",
    "locks": """
import queue, threading
class ReplayBuffer:
    def __init__(self):
        self.lock, self.event, self.places = threading.RLock(), threading.Event(), threading.Semaphore(2)
        self.not_empty, self.queue, self.here = threading.Condition(self.lock), queue.Queue(4), threading.local()
        self.event.set()
    @functools.cached_property
    def total(self):
        with self.lock, self.not_empty, self.places:
            return 7
replay = ReplayBuffer()
def locks():
    return replay.total, replay.event.is_set(), replay.queue.maxsize, replay.not_empty._lock is replay.lock
""",
    "streams": """
import logging, sys
from tqdm.auto import tqdm
out, say = sys.stdout, functools.partial(print, file=sys.stdout, end="")
bar = tqdm(total=6, desc="steps", disable=True)
log = logging.getLogger("of a row")
log.setLevel("INFO")
log.handlers = [logging.StreamHandler(sys.stderr)]
def streams():
    say("")
    bar.update(1)
    return out is sys.stdout, len(log.handlers), log.isEnabledFor(logging.INFO), bar.total
""",
    "of_the_shell": """
shell = get_ipython()
def of_the_shell():
    return get_ipython().getoutput("echo captured")[0], shell.getoutput("echo held")[0]
""",
    "scripted": """
@torch.jit.script
def doubled(x):
    return 2 * x
net = torch.jit.trace(torch.nn.Linear(2, 1), torch.ones(1, 2))
def scripted():
    return doubled(torch.ones(())).item(), net(torch.ones(1, 2)).item()
""",
    "dispatched": """
@functools.singledispatch
def kind_of(x):
    return "?"
@kind_of.register
def kind_of_int(x: int):
    return "int"
def dispatched():
    return kind_of(1), kind_of("a")
""",
    "contexts": """
import contextlib
from torch.nn.attention import SDPBackend, sdpa_kernel
@sdpa_kernel(SDPBackend.MATH)
def attend(q):
    return torch.nn.functional.scaled_dot_product_attention(q, q, q)
def contexts():
    return attend(torch.ones(1, 1, 2, 2)).sum().item()
""",
}

IDIOMS |= {
    "registered_by_parent": """
class Animal:
    kinds = {}
    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        Animal.kinds[cls.__name__] = cls
class Cat(Animal):
    legs = 4
def registered_by_parent():
    return Animal.kinds["Cat"]().legs, isinstance(Cat(), Animal), list(Animal.kinds)
""",
    "own_operator": """
@torch.library.custom_op("rows::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
@twice.register_fake
def _(x):
    return torch.empty_like(x)
twice.register_autograd(lambda ctx, grad: grad * 2)
def own_operator():
    x = torch.ones(1, requires_grad=True)
    twice(x).sum().backward()
    return x.grad.item(), torch.ops.rows.twice(x).item()
""",
    "trees": """
import weakref
class Node:
    def __init__(self, parent=None):
        self.parent = parent and weakref.ref(parent)
        self.children = []
root = Node()
root.children.append(Node(root))
gone = weakref.ref(Node())
def trees():
    return root.children[0].parent() is root, gone()
""",
    "vectorized": """
@np.vectorize
def rounded(x):
    return round(x)
halved = np.vectorize(lambda x: x / 2, otypes=[float])
rounded([1.2]), halved([1])
def vectorized():
    return rounded([1.6, 2.2]).tolist(), halved([3]).tolist()
""",
    "read_from_files": """
import tarfile, tempfile, zipfile
from pathlib import Path
folder = Path(tempfile.mkdtemp())
(folder / "a.txt").write_text("one\\ntwo\\n", encoding="utf-16")
with zipfile.ZipFile(folder / "a.zip", "w") as written, tarfile.open(folder / "a.tar", "w") as also_written:
    written.write(folder / "a.txt", "a")
    also_written.add(folder / "a.txt", "a")
zipped, tarred = zipfile.ZipFile(folder / "a.zip"), tarfile.open(folder / "a.tar")
lines = open(folder / "a.txt", encoding="utf-16")
lines.readline()
raw = open(folder / "a.txt", "rb")
def read_from_files():
    at = lines.tell()
    found = lines.read(), raw.read(2), zipped.read("a")[:2], tarred.extractfile("a").read(2)
    lines.seek(at)
    raw.seek(0)
    return found
""",
    "executors": """
from concurrent.futures import ThreadPoolExecutor, ProcessPoolExecutor
threads, processes = ThreadPoolExecutor(2, thread_name_prefix="io"), ProcessPoolExecutor(1)
threads.submit(int).result()
def executors():
    return [*threads.map(abs, [-1, -2])], processes.submit(abs, -3).result()
""",
    "scripted_with_defaults": """
@torch.jit.script
def scaled(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return x * by
def scripted_with_defaults():
    return scaled(torch.ones(1)).item(), scaled(torch.ones(1), by=3.0).item()
""",
    "source": """
import inspect
class Doubling:
    def double(self, x):
        return 2 * x
def source():
    return inspect.getsource(Doubling.double), torch.jit.script(lowered)(torch.ones(1)).item()
def lowered(x):
    return x - 1
""",
    "underscores": """
__private, __version__ = 3, "1.2"
def underscores():
    return __private, __version__, __name__
""",
}

SELF_MADE = "import sys\nclass Settings:\n    rate = 3\nsys.modules[__name__] = Settings()\n"

COLLECT = """
def outcome(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def outcomes():
    return {function.__name__: outcome(function) for function in idioms}
"""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    shared_kernel.wait_for_server()
    folder = tmp_path_factory.mktemp("modules")
    (folder / "self_made_module.py").write_text(SELF_MADE)
    shared_kernel.run(f"import sys\nsys.path.insert(0, {str(folder)!r})\n%load_ext nb_accelerate").ok()
    shared_kernel.run("from nb_accelerate import notebook_launcher").ok()
    for code in (*IDIOMS.values(), f"idioms = [{', '.join(IDIOMS)}]", COLLECT):
        shared_kernel.run(code).ok()
    return shared_kernel


@pytest.fixture(scope="module")
def alone(notebook: Kernel) -> dict[str, object]:
    return dict(ast.literal_eval(notebook.run("print(outcomes())").ok().stdout))


@pytest.fixture(scope="module")
def launched(notebook: Kernel) -> list[dict[str, object]]:
    cell = notebook.run("print(notebook_launcher(outcomes, num_processes=2, progress='off'))").ok()
    return list(ast.literal_eval(cell.stdout))


@pytest.fixture(scope="module")
def in_a_cell(notebook: Kernel) -> dict[str, object]:
    stdout = notebook.run("%%distributed -n 1\nprint(outcomes())").ok().stdout
    return dict(ast.literal_eval(stdout[stdout.index("{") :]))


@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_gives_the_same_when_it_is_launched_and_in_a_cell(
    name: str, alone: dict[str, object], launched: list[dict[str, object]], in_a_cell: dict[str, object]
) -> None:
    assert [each[name] for each in (*launched, in_a_cell)] == [alone[name]] * 3
    assert isinstance(alone[name], str) is False, "it fails in plain Python"


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("torch.utils.tensorboard.SummaryWriter({folder!r})", "make the writer inside"),
        ("sqlite3.connect(':memory:')", "sqlite3.connect with the path"),
        ("zipfile.ZipFile({folder!r} + '/new.zip', 'w')", "Open the archive by its path"),
        ("open({folder!r} + '/new.txt', 'a')", "new.txt"),
        ("ipywidgets.IntProgress()", "bars of tqdm"),
        ("np.frompyfunc(abs, 1, 1)", "make it in the function or cell"),
    ],
)
def test_what_stays_is_refused_with_what_to_write(notebook: Kernel, tmp_path: Path, made: str, says: str) -> None:
    notebook.run("import sqlite3, torch.utils.tensorboard, zipfile, ipywidgets").ok()
    notebook.run(f"kept = {made.format(folder=str(tmp_path))}\ndef uses():\n    return kept").ok()
    cell = notebook.run("notebook_launcher(uses, num_processes=2, start_method='forkserver')")
    assert (cell.error, says in cell.message) == ("ShippingError", True), cell.message
    assert "global 'kept'" in cell.message

"""State over cells: what one kernel computes, cells in the notebook and on the ranks compute too, in the same order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.kernels import Kernel
from fixtures.python_template import PythonTemplate

MODEL = """
import torch
torch.manual_seed(0)
m = torch.nn.Linear(2, 1)
o = torch.optim.Adam(m.parameters(), lr=0.1)
s = torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.5)
def step(times=1):
    for _ in range(times):
        o.zero_grad(); m(torch.ones(4, 2)).pow(2).mean().backward(); o.step()
"""
WEIGHT = "[round(w, 5) for w in m.weight.flatten().tolist()]"
COUNTER = """
def make():
    n = 0
    def inc():
        nonlocal n
        n += 1
    def get(): return n
    return inc, get
inc, get = make()
"""

CASES: dict[str, tuple[list[str], str]] = {
    # The later binding wins. A cell that begins with @ runs on the ranks; the last text is read there.
    "loop variable, then bound here": (["@for x in [1, 2]: pass", "x = 'here'"], "x"),
    "batch of a loop, then another": (
        ["import torch", "@for (x,) in [(torch.zeros(2),)]: pass", "x = torch.ones(3)"],
        "x.tolist()",
    ),
    "list bound there, emptied here": (["@losses = [1]", "losses = []"], "losses"),
    "list bound here, there, and here": (["losses = []", "@losses = [1]", "losses = []"], "losses"),
    "counter set back to the same number": (["step = 0", "@step += 5", "step = 0"], "step"),
    "counter set back by a function": (
        ["step = 0\ndef reset():\n    global step\n    step = 0", "@step += 5", "reset()"],
        "step",
    ),
    "not set back by a function of a module": (
        [
            "step = 0\nimport types\nmine = types.ModuleType('mine')\n"
            "exec('def reset():\\n    global step\\n    step = 0', vars(mine))\nreset = mine.reset",
            "@step += 5",
            "reset()",
        ],
        "step",
    ),
    "not set back by a generator that was not run": (
        ["step = 0\ndef reset():\n    global step\n    step = 0\n    yield", "@step += 5", "reset()"],
        "step",
    ),
    "counter set back in a loop": (["step = 0", "@step += 5", "for step in range(1): pass"], "step"),
    "not set back by a branch": (["step = 0", "@step += 5", "if step is None: step = 0"], "step"),
    "not set back inside of a function": (["step = 0", "@step += 5", "def f():\n    step = 0\nf()"], "step"),
    "counted there, here, there": (["i = 1", "@i = 2", "i = 1", "@i += 10"], "i"),
    "same number bound there later": (["i = 0", "@j = i", "i = 5", "@i = 0"], "i"),
    "number here, unread, and there": (["@i = 0", "i = 7", "@i = 0"], "i"),
    "None after a value": (["best = None", "@best = 3", "best = None"], "best"),
    "same text again": (["mode = 'train'", "@mode = 'eval'", "mode = 'train'"], "mode"),
    "same function again": (["import math\nf = math.sin", "@f = math.cos", "f = math.sin"], "f(0)"),
    "unpacked": (["a, b = 1, 2", "@a, b = 3, 4", "a, b = 1, 2"], "(a, b)"),
    "bound by an import": (["@json = 3", "import json"], "json.dumps(1)"),
    "bound by def": (["@f = None", "def f(): return 1"], "f()"),
    "bound by with": (["import io", "@h = 1", "with io.StringIO('a') as h: pass\nh = 2"], "h"),
    "bound by a walrus": (["n = 1", "@n = 2", "print(n := 1)"], "n"),
    "augmented here": (["n = 1", "@n = 1", "n += 1"], "n"),
    "bound there after here": (["x = 1", "@x = 2"], "x"),
    "bound there after it was bound here, unread": (["x = 1", "x = 3", "@x = 2"], "x"),
    "bound in a cell that fails": (["x = 1", "@x = 2\nraise KeyError", "y = 1"], "x"),
    "bound here in a cell that fails before": (["x = 0", "@x = 2", "raise KeyError\nx = 0"], "x"),
    "by exec": (["@x = 2", "exec('x = 3')"], "x"),
    "by globals()": (["@x = 2", "globals()['x'] = 3"], "x"),
    "a tuple": (["t = ()", "@t = (1,)", "t = ()"], "t"),
    "in a function's globals": (["k = 1\ndef f(): return k", "@k = 2", "k = 3"], "f()"),
    "in a function's globals, there": (["k = 1\ndef f(): return k", "@f()", "@k = 2"], "f()"),
    "read by a class's method": (["k = 1\nclass A:\n    def f(self): return k", "@k = 5", "k = 6"], "A().f()"),
    # So does the later del.
    "built-in name back after del": (["max = min", "@max([1, 2])", "del max"], "max([1, 2])"),
    "built-in name back, bound there": (["@max = min", "max = min", "del max"], "max([1, 2])"),
    "deleted here": (["x = 1", "@x", "del x"], "'x' in globals()"),
    "deleted here, bound there before": (["x = 1", "@x = 2", "del x"], "'x' in globals()"),
    "deleted there, bound here": (["x = 1", "@del x", "x = 2"], "x"),
    "deleted here, bound there later": (["x = 1", "@x", "del x", "@x = 5"], "x"),
    "deleted and bound here": (["x = 1", "@x = 4", "del x\nx = 1"], "x"),
    "deleted while a function reads it": (
        ["k = 1\ndef f():\n    try: return k\n    except NameError: return 'no'", "@f()", "del k"],
        "f()",
    ),
    # Values that are pulled stay the ranks' own, too.
    "pulled list, appended here": (["@l = [1]", "%distributed pull l\nl.append(2)"], "l"),
    "pulled list, appended there": (["@l = [1]", "%distributed pull l", "@l.append(2)"], "l"),
    "pulled dict with a tensor": (
        ["@import torch\nd = {'a': torch.zeros(2)}", "%distributed pull d\nd['a'].add_(1); d['b'] = 2"],
        "d['a'].tolist(), d['b']",
    ),
    "pulled model, weights set here": (
        [
            MODEL,
            "@m = torch.nn.Linear(2, 1); o = torch.optim.Adam(m.parameters(), lr=0.1)",
            "%distributed pull m\nwith torch.no_grad(): m.weight.fill_(1.0); m.bias.fill_(0.0)",
            "@step(3)",
        ],
        WEIGHT,
    ),
    "pulled model that was sent, weights set here": (
        [MODEL, "@step(2)", "%distributed pull m\nwith torch.no_grad(): m.weight.fill_(1.0)", "@step(3)"],
        WEIGHT,
    ),
    "pulled number": (["@n = 1", "%distributed pull n\nn += 1"], "n"),
    "pulled array": (
        ["@import numpy as np\na = np.zeros(2)", "%distributed pull a\na += 1"],
        "a.tolist()",
    ),
    # Objects: both sides change the same one.
    "lr set here after training": ([MODEL, "@step(3)", "o.param_groups[0]['lr'] = 1e-4", "@step(2)"], WEIGHT),
    "weight decay and betas": (
        [MODEL, "@step(3)", "for g in o.param_groups: g['weight_decay'] = 0.5; g['betas'] = (0.5, 0.9)", "@step(2)"],
        WEIGHT,
    ),
    "lr set here after a schedule there": (
        [MODEL, "@step(1); s.step()", "o.param_groups[0]['lr'] = 0.3", "@step(1)"],
        WEIGHT,
    ),
    "another number than what the schedule sets": (
        [MODEL, "@step(1); s.step()", "o.param_groups[0]['eps'] = 0.3", "@step(1)"],
        f"{WEIGHT}, o.param_groups[0]['lr'], o.param_groups[0]['eps']",
    ),
    "a schedule's number": (
        [MODEL, "@step(1); s.step()", "s.gamma = 0.1", "@s.step()"],
        "round(s.get_last_lr()[0], 6)",
    ),
    "a new optimizer, the trained model": (
        [MODEL, "@step(3)", "o = torch.optim.SGD(m.parameters(), lr=0.01)", "@step(2)"],
        WEIGHT,
    ),
    "a new schedule": (
        [MODEL, "@step(1)", "s = torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.1)", "@step(1); s.step()"],
        "round(o.param_groups[0]['lr'], 6)",
    ),
    "dropout's rate": (
        [MODEL + "m = torch.nn.Sequential(m, torch.nn.Dropout(0.5))", "@m(torch.ones(4, 2))", "m[1].p = 0.0"],
        "m(torch.ones(4, 2)).unique().numel(), m[1].p",
    ),
    "a model again": ([MODEL, "@step(3)", MODEL], WEIGHT),
    "attributes of both": (
        ["class C: pass\nc = C(); c.a = 1; c.b = 1", "@c.a = 2", "c.b = 2"],
        "(c.a, c.b)",
    ),
    "an attribute that is deleted": (["class C: pass\nc = C(); c.a = 1; c.b = 1", "@c.a = 2", "del c.b"], "vars(c)"),
    "a new attribute": (["class C: pass\nc = C(); c.a = 1", "@c.a = 2", "c.n = 7"], "vars(c)"),
    "namespace of settings": (
        ["import types\nc = types.SimpleNamespace(lr=1, seen=0)", "@c.seen += 3", "c.lr = 2"],
        "(c.lr, c.seen)",
    ),
    "two closures over one variable": ([COUNTER, "@inc()", "@inc()"], "get()"),
    "two closures, one called here": ([COUNTER, "@get()", "inc()", "@get()"], "get()"),
    "closure read first": ([COUNTER, "@print(get())", "@inc()"], "get()"),
}

CONTRACT = {
    "batch of a loop, then another",
    "list bound here, there, and here",
    "counter set back to the same number",
    "bound there after it was bound here, unread",
    "built-in name back after del",
    "deleted here, bound there before",
    "pulled list, appended here",
    "attributes of both",
    "two closures over one variable",
}

TOLD = {"a model again", "a new optimizer, the trained model"}
"""Where something that the ranks have trained is replaced, as in one kernel."""


class TestState:
    @pytest.fixture(scope="class")
    def plain(self, python_template: PythonTemplate) -> Iterator[Kernel]:
        kernel = Kernel(template=python_template)
        yield kernel
        kernel.close()

    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[] if name in CONTRACT else pytest.mark.slow) for name in CASES]
    )
    def test_is_that_of_one_kernel(self, notebook: Kernel, plain: Kernel, name: str):
        cells, read = CASES[name]
        plain.run("%reset -f")
        for cell in cells:
            lines = cell.removeprefix("@").splitlines()
            plain.run("\n".join(line for line in lines if not line.startswith("%distributed")))
        wanted = plain.run(f"print({read})")
        notebook.run("%reset -f\n%distributed reset").ok()
        told = ""
        for cell in [*cells, f"@print({read})"]:
            last = notebook.run(f"%%distributed\n{cell[1:]}" if cell.startswith("@") else cell)
            # That each rank trains a model of its own is what these cells do.
            told += "\n".join(line for line in last.stderr.splitlines() if "ccelerator" not in line)
        assert (last.stdout, last.error) == (wanted.stdout, wanted.error), (told, last.traceback)
        assert (told != "") == (name in TOLD), told


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.wait_for_server()
    shared_kernel.set_timeouts("nb_accelerate.notebook.pool.Pool", fold=30.0)
    shared_kernel.run("%load_ext nb_accelerate").ok()
    shared_kernel.run("%%distributed\nimport torch").ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()

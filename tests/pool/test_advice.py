"""Each command that a message of the package advises is tried in the situation in which it is printed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.kernels import Kernel

import nb_accelerate
from nb_accelerate.notebook.magics.commands import COMMANDS

MODEL = """
import torch, torch.distributed as dist
m = torch.nn.Linear(2, 1)
o = torch.optim.Adam(m.parameters(), lr=0.1)
def step(times=1):
    for _ in range(times):
        o.zero_grad(); loss = m(torch.ones(4, 2)).pow(2).mean(); loss.backward()
        if dist.is_initialized(): [dist.all_reduce(p.grad) for p in m.parameters()]
        o.step()
"""
WEIGHT = "m.weight.tolist(), len(o.state)"
PICKY = """
class Picky:
    def __init__(self, a): self.a = a
    def __reduce__(self): return Picky, (self.a,)
class Holder: pass
holder = Holder(); holder.part = Picky(1)
"""

TRIALS: dict[str, tuple[list[str], str, str | None]] = {
    # Cells, of which the last prints the advice; what is read afterwards on the ranks; what that is, or None where it
    # is what the notebook has.
    "push: changed in both": ([MODEL, "@step(9)", "step(1)", "@step.__name__"], WEIGHT, None),
    "push: trained is kept": ([MODEL, "@step(9)", "%distributed push o"], WEIGHT, None),
    "push: changed here, after it was bound there": (["l = [1]", "@l = [2]", "l.append(3)", "@l"], "l", None),
    "push: deleted there": (["x = 1", "@del x", "@x"], "x", None),
    "push: too large to look at": (
        ["import numpy as np\na = np.zeros(1 << 20)", "@a.sum()", "a[:] = 1", "@a.sum()"],
        "float(a.sum())",
        None,
    ),
    "push: not changed in place": (
        [PICKY, "@holder.part.a", "holder.part.a = 2", "@holder.part.a"],
        "holder.part.a",
        None,
    ),
    "push: large": (["b = bytes(5000)", "@len(b)"], "len(b)", None),
    "pull: trained there": ([MODEL, "@step(9)"], "m.weight.tolist()", None),
    "pull: trained there, bound here": (
        [MODEL, "@step(9)", "m = torch.nn.Linear(2, 1)"],
        "m.weight.tolist(), o.param_groups[0]['params'][0] is m.weight",
        "@",
    ),
    "pull: only there": (["@only = 3", "only"], "only", None),
    "pull: all": (["@mine = rank", "%distributed pull mine"], "mine - rank", "0"),
    "del: trained there, deleted here": ([MODEL, "@step(9)", "del m", "@step.__name__"], "'m' in globals()", "False"),
    "detach": ([MODEL + "y = m(torch.ones(1, 2))", "@y"], "y.tolist()", None),
    "interrupt": (["%%distributed --background\nimport time; time.sleep(600)", "%distributed restart 1"], "1", "1"),
    "restart": (["%%rank 1\nimport os; os.kill(os.getpid(), 9)"], "dist.get_world_size()", "2"),
    "stop: other ranks": (["%%distributed -n 1\n1"], "1", "1"),
    "stop: they run": (["%distributed start"], "1", "1"),
    "start": (["%distributed stop", "%distributed pull x"], "1", "1"),
}

ADVISED = {
    ("notebook/magics/cells.py", "%distributed stop"): ["stop: other ranks"],
    ("notebook/magics/commands.py", "%distributed pull"): ["pull: all"],
    ("notebook/magics/names.py", "%distributed pull"): [
        "pull: only there",
        "pull: trained there, bound here",
    ],
    ("notebook/pool/group.py", "%distributed restart"): ["restart"],
    ("notebook/pool/packing.py", "%distributed push"): ["push: large", "push: not changed in place"],
    ("notebook/pool/plan.py", "%distributed push"): [name for name in TRIALS if name.startswith("push: ")],
    ("notebook/pool/pool.py", "%distributed pull"): ["pull: trained there"],
    ("notebook/pool/pool.py", "%distributed start"): ["start"],
    ("notebook/pool/pool.py", "%distributed interrupt"): ["interrupt"],
    ("notebook/pool/pool.py", "%distributed stop"): ["stop: they run"],
    ("notebook/ranks/loop.py", "%distributed start"): ["start"],
}
"""Trials of what each module advises."""

OF_LOST_MACHINES = {("notebook/pool/group.py", "%distributed pull"), ("notebook/pool/group.py", "%distributed stop")}
"""Advice that is tried in `tests/remote/test_cells.py`, where a machine does not come back."""


COMMAND = rf": (%distributed (?:{'|'.join(COMMANDS)}))\b"


def advised() -> set[tuple[str, str]]:
    """Modules with the commands of notebooks that their messages advise: those that stand behind a colon."""
    root, found = Path(nb_accelerate.__file__).parent, set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(getattr(part, "value", "")) for part in parts if isinstance(part, ast.Constant))
            found |= {(path.relative_to(root).as_posix(), command) for command in re.findall(COMMAND, text)}
    return found


def test_each_command_that_is_advised_has_a_trial():
    assert advised() == ADVISED.keys() | OF_LOST_MACHINES
    assert set().union(*ADVISED.values()) <= TRIALS.keys()


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.set_timeouts("nb_accelerate.notebook.pool.Pool", fold=30.0)
    shared_kernel.run("%load_ext nb_accelerate").ok()
    shared_kernel.run("%%distributed\nimport torch").ok()
    shared_kernel.put("nb_accelerate.notebook.pool.pool.SIZE_LIMIT", 1 << 26)
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


@pytest.mark.may_leave("processes", "files")  # ranks, and where they meet, of the shared kernel that were started again
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if TRIALS[name][0][0].startswith(MODEL) else []) for name in TRIALS],
)
def test_advice_does_what_it_says(notebook: Kernel, name: str):
    cells, read, expected = TRIALS[name]
    notebook.put("nb_accelerate.notebook.pool.pool.SIZE_LIMIT", 4000 if name == "push: large" else 1 << 30)
    notebook.run("%reset -f\n%distributed reset").ok()
    for cell in cells:
        last = notebook.run(f"%%distributed\n{cell[1:]}" if cell.startswith("@") else cell)
    if expected == "@":  # what the ranks have is to stay
        expected = (
            notebook.run(f"%distributed pull m\nprint({read.partition(',')[0]}, True)").ok().stdout.split("\n", 1)[1]
        )
        notebook.run("m = torch.nn.Linear(2, 1)").ok()
    shown = [display.get("text/plain", "") for display in last.displays]
    printed = "\n".join([last.stdout, last.stderr, last.message or "", *shown])
    command = re.search(r"(?:: |Write )(%distributed (?:(?!\. )[^,\n])*|del \w+|\w+ = \w+\.detach\(\))", printed)
    assert command is not None, printed
    advice = command[1].strip().removesuffix(".")
    notebook.run(f"%%distributed\n{advice}" if advice.startswith("del") else advice).ok()
    wanted = expected if expected is not None else notebook.run(f"print({read})").ok().stdout
    after = notebook.run(f"%%distributed\nimport torch.distributed as dist\nprint({read})").ok()
    assert (after.stdout.splitlines()[-1], after.stderr) == (wanted.strip(), "")


@pytest.mark.may_leave("processes", "files")  # as above
def test_after_a_start_on_other_machines_that_failed_a_cell_tries_it_again_and_starts_no_ranks_here(notebook: Kernel):
    notebook.run("%distributed stop").ok()
    start = "%distributed start --engine command --hosts a --command-template 'false {command}'"
    for cell in (start, "%%distributed\n1"):
        assert "exit code 1" in notebook.run(cell).message
    notebook.run("%distributed stop").ok()
    notebook.run("%%distributed\n1").ok()

"""What the notebook has and what the ranks compute with, cell after cell: the same objects, with the same content."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from fixtures.kernels import Cell, Kernel

SETUP = """
import copy, types
import numpy as np, torch
from torch import nn
torch.manual_seed(0)

def things():
    "A model, and what refers to it."
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return model, optimizer, scheduler

def trained(model):
    "Change the weights of a model in place."
    with torch.no_grad():
        for one in model.parameters():
            one.add_(1)
"""

CHANGED = "was changed both in the notebook and on the ranks"


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.wait_for_server()
    shared_kernel.set_timeouts("nb_accelerate.notebook.pool.Pool", fold=30.0)
    shared_kernel.run("%load_ext nb_accelerate").ok()
    shared_kernel.run(SETUP).ok()
    shared_kernel.run("%%distributed\nimport torch").ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


@pytest.fixture(autouse=True)
def _anew(notebook: Kernel) -> None:
    notebook.run("%distributed reset\nmodel, optimizer, scheduler = things()").ok()


def on_ranks(notebook: Kernel, code: str) -> Cell:
    return notebook.run(f"%%distributed\n{code}").ok()


class Thing:
    """One row of the matrix: Python that makes it as `x`, reads it, binds it again, and changes it in place."""

    def __init__(self, make: str, read: str, change: str, again: str = "") -> None:
        self.make = make
        self.read = read
        self.change = change
        self.again = again or make


THINGS = {
    "model": Thing("x = things()[0]", "x[0].weight.sum().item()", "trained(x)"),
    "optimizer": Thing("x = things()[1]", "x.param_groups[0]['lr']", "x.param_groups[0]['lr'] = 9"),
    "scheduler": Thing("x = things()[2]", "(x.last_epoch, x.gamma)", "x.gamma = 0.5"),
    "loader": Thing(
        "data = torch.rand(4)\nx = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data))",
        "sum(row.item() for row, in x)",
        "x.dataset.tensors[0].fill_(9)",
    ),
    "EMA": Thing("x = torch.optim.swa_utils.AveragedModel(model)", "x.module[0].bias.sum().item()", "trained(x)"),
    "tensor": Thing("x = torch.rand(3)", "x.sum().item()", "x.fill_(9)"),
    "tensor, by its data": Thing("x = torch.rand(3)", "x.sum().item()", "x.data.fill_(9)"),
    "frozen": Thing("x = things()[0]", "[one.requires_grad for one in x.parameters()]", "x.requires_grad_(False)"),
    "array": Thing("x = np.random.rand(3)", "float(x.sum())", "x[:] = 9"),
    "frame": Thing(
        "import pandas as pd\nx = pd.DataFrame({'a': np.random.rand(2)})", "x.to_csv()", "x['new'] = range(2)"
    ),
    "namespace": Thing("x = types.SimpleNamespace(lr=1, layers=[1])", "(x.lr, x.layers)", "x.layers.append(9)"),
    "config": Thing(
        "class Config:\n    size = 3\n    def __init__(self): self.lr = 1\nx = Config()", "(x.lr, x.size)", "x.lr = 9"
    ),
    "dataclass": Thing(
        "import dataclasses\n@dataclasses.dataclass\nclass Options:\n    lr: float = 1\nx = Options()",
        "x.lr",
        "x.lr = 9",
    ),
    "series": Thing("import pandas as pd\nx = pd.Series([1, 2])", "int(x.sum())", "x[0] = 9"),
    "counter": Thing("from collections import Counter\nx = Counter('ab')", "x", "x['b'] += 1"),
    "slots": Thing(
        "class Slots:\n    __slots__ = ('a',)\n    def __init__(self): self.a = [1]\nx = Slots()",
        "x.a",
        "x.a.append(9)",
    ),
    "list": Thing("x = [1, [2]]", "x", "x[1].append(9)"),
    "function": Thing("def x(a=1): return a, x.__dict__", "x()", "x.__defaults__ = (9,); x.attribute = 9"),
    "class": Thing("class x:\n    lr = 1\n    def go(self): return self.lr", "x().go()", "x.lr = 9"),
}


@pytest.mark.parametrize("kind", THINGS)
class TestRanksComputeWithWhatTheNotebookHas:
    @pytest.mark.contract("cells: what a changed value of the notebook is on ranks")
    def test_made_later_rebound_changed_in_place_and_deleted(self, notebook: Kernel, kind: str):
        thing = THINGS[kind]
        if kind in ("frame", "series"):
            pytest.importorskip("pandas")

        def agree() -> str:
            """The ranks read the same as the notebook; what was said about it."""
            cell = on_ranks(notebook, f"print({thing.read})")
            assert notebook.run(f"print({thing.read})").ok().stdout == cell.stdout
            return cell.stderr

        notebook.run(thing.make).ok()
        assert agree() == ""
        on_ranks(notebook, "kept = x")
        before = on_ranks(notebook, f"print({thing.read})").stdout
        notebook.run(thing.change).ok()
        assert agree() == ""
        assert on_ranks(notebook, "print(kept is x)").stdout == "True\n"
        assert on_ranks(notebook, f"print({thing.read})").stdout != before
        notebook.run(thing.again).ok()
        assert agree() == ""
        assert on_ranks(notebook, "print(kept is x)").stdout == "False\n"
        notebook.run("del x").ok()
        assert on_ranks(notebook, "print('x' in globals())").stdout == "False\n"

    def test_first_read_in_another_cell_than_what_it_holds(self, notebook: Kernel, kind: str):
        if kind in ("frame", "series"):
            pytest.importorskip("pandas")
        notebook.run(THINGS[kind].make).ok()
        on_ranks(notebook, "print(x)")
        notebook.run("holder = types.SimpleNamespace(part=x, parts=[{'it': x}])").ok()
        notebook.run("def closure(it=x): return it\nclass Holder: it = x").ok()
        code = "print(holder.part is x, holder.parts[0]['it'] is x, closure() is x, Holder.it is x)"
        assert on_ranks(notebook, code).stdout == "True True True True\n"


class TestModels:
    def test_an_optimizer_that_is_read_later_trains_the_model(self, notebook: Kernel):
        on_ranks(notebook, "before = model[0].weight.clone()")
        on_ranks(notebook, "model(torch.rand(4, 2)).sum().backward()\noptimizer.step()\nscheduler.step()")
        cell = on_ranks(notebook, "print(torch.equal(before, model[0].weight), scheduler.optimizer is optimizer)")
        assert cell.stdout == "False True\n"
        notebook.run("tuned = torch.optim.Adam(model[2].parameters())").ok()
        cell = on_ranks(notebook, "print(tuned.param_groups[0]['params'][0] is model[2].weight)")
        assert cell.stdout == "True\n"

    def test_an_optimizer_trains_the_model_that_the_ranks_have_prepared(self, notebook: Kernel):
        on_ranks(notebook, "model = accelerator.prepare(model)")
        code = (
            "print(all(a is b for a, b in zip(model.parameters(), optimizer.param_groups[0]['params'], strict=True)))"
        )
        assert on_ranks(notebook, code).stdout == "True\n"

    def test_weights_are_given_to_a_prepared_model_in_its_wrapper(self, notebook: Kernel):
        on_ranks(notebook, "model, optimizer = accelerator.prepare(model, optimizer)")
        notebook.run("trained(model)").ok()
        cell = on_ranks(notebook, "print(type(model).__name__)")
        assert "their own model" in cell.stderr
        notebook.run("%distributed push model").ok()
        code = "print(type(model).__name__, model.module[0].bias.sum().item())"
        cell = on_ranks(notebook, code)
        assert cell.stdout == f"DistributedDataParallel {notebook.run('model[0].bias.sum().item()').ok().value}\n"

    def test_parameters_that_the_ranks_have_replaced_are_an_error_before_anything_runs(self, notebook: Kernel):
        on_ranks(notebook, "model[0].weight = torch.nn.Parameter(torch.rand(4, 2))")
        cell = notebook.run("%%distributed\nprint('ran')\noptimizer")
        assert (cell.error, cell.stdout) == ("ShippingError", "")
        assert "'weight' of a Linear" in cell.message

    def test_parameters_that_the_ranks_have_replaced_are_changed_there(self, notebook: Kernel):
        on_ranks(notebook, "model[0].weight = torch.nn.Parameter(torch.rand(4, 2))")
        notebook.run("trained(model)").ok()
        cell = on_ranks(notebook, "print(model[2].weight.max().item() > 1)")
        assert cell.stdout == "False\n"
        assert f"model {CHANGED}" in cell.stderr

    def test_what_was_trained_on_the_ranks_is_newer_there(self, notebook: Kernel):
        on_ranks(notebook, "trained(model)")
        notebook.run("model.eval(); model(torch.rand(4, 2)); model.state_dict(); repr(model)").ok()
        cell = on_ranks(notebook, "print(model.training, model[0].bias.min().item() > 0)")
        assert (cell.stdout, cell.stderr) == ("True True\n", "")

    def test_what_both_have_changed_is_asked_about_once(self, notebook: Kernel):
        on_ranks(notebook, "trained(model); weight = model[0].weight")
        notebook.run("trained(model); trained(model)").ok()
        code = "print(model[0].bias.mean().item() > 1.4, weight is model[0].weight)"
        cell = on_ranks(notebook, code)
        assert cell.stdout == "False True\n"
        assert f"model {CHANGED}" in cell.stderr
        assert on_ranks(notebook, code).stderr == ""
        notebook.run("%distributed push model").ok()
        cell = on_ranks(notebook, code)
        assert (cell.stdout, cell.stderr) == ("True True\n", "")

    def test_what_one_rank_has_changed_is_changed(self, notebook: Kernel):
        on_ranks(notebook, "model")
        notebook.run("%%rank 1\ntrained(model)").ok()
        notebook.run("trained(model)").ok()
        assert CHANGED in on_ranks(notebook, "model").stderr

    def test_a_new_model_in_place_of_a_trained_one_is_told(self, notebook: Kernel):
        on_ranks(notebook, "trained(model)")
        notebook.run("model, optimizer, scheduler = things()").ok()
        cell = on_ranks(notebook, "print(model[0].bias.max().item() > 1)")
        assert cell.stdout == "False\n"
        assert "notebook's model takes" in cell.stderr


class TestRanks:
    def test_an_attribute_that_cannot_be_sent_is_named(self, notebook: Kernel):
        notebook.run("class Config: pass\nconfig = Config(); config.lr = 1").ok()
        on_ranks(notebook, "config.lr")
        notebook.run("config.rows = [(x for x in ())]").ok()
        cell = notebook.run("%%distributed\nconfig.lr")
        assert cell.error == "ShippingError"
        assert cell.message.startswith("config.rows[0] cannot be sent")

    def test_all_of_what_is_pushed_is_sent_also_what_is_too_large_to_look_at(self, notebook: Kernel):
        notebook.run("many = [*range(10_000), torch.zeros(1)]").ok()
        assert on_ranks(notebook, "print(many[-1].item())").stdout == "0.0\n"
        notebook.run("many[-1].fill_(1)\n%distributed push many").ok()
        assert on_ranks(notebook, "print(many[-1].item())").stdout == "1.0\n"

    def test_a_cell_for_one_rank_leaves_the_others_to_get_it_later(self, notebook: Kernel):
        notebook.run("a = torch.zeros(1)").ok()
        on_ranks(notebook, "a")
        notebook.run("a.fill_(9)").ok()
        assert notebook.run("%%rank 1\nprint(a.item())").ok().stdout == "9.0\n"
        assert on_ranks(notebook, "print(a.item())").stdout == "9.0\n"

    def test_what_the_ranks_have_deleted_is_sent_again_when_it_is_pushed(self, notebook: Kernel):
        on_ranks(notebook, "model, optimizer")
        on_ranks(notebook, "del model, optimizer\nimport gc; gc.collect();")
        cell = notebook.run("%%distributed\nmodel, optimizer")
        assert (cell.error, "%distributed push model optimizer" in cell.stderr) == ("NameError", True)
        notebook.run("%distributed push model optimizer").ok()
        code = "print(optimizer.param_groups[0]['params'][0] is model[0].weight)"
        assert on_ranks(notebook, code).stdout == "True\n"

    def test_what_a_rank_has_deleted_and_an_optimizer_still_has_is_found_again(self, notebook: Kernel):
        on_ranks(notebook, "model, optimizer")
        on_ranks(notebook, "trained(model)\ndel model")
        notebook.run("again = model").ok()
        code = "print(optimizer.param_groups[0]['params'][0] is again[0].weight, again[0].bias.min().item() > 0)"
        assert on_ranks(notebook, code).stdout == "True True\n"

    def test_what_cannot_be_looked_at_is_told_once(self, notebook: Kernel):
        notebook.run("large = np.zeros(1 << 20)").ok()
        assert on_ranks(notebook, "large.sum()").stderr == ""
        notebook.run("large[:] = 1").ok()
        cell = on_ranks(notebook, "print(large.sum())")
        assert cell.stderr.startswith("large ")
        assert "%distributed push large" in cell.stderr
        notebook.run("%distributed push large").ok()
        cell = on_ranks(notebook, "print(large.sum())")
        assert (cell.stdout, cell.stderr) == ("1048576.0\n", "")


CANONICAL = """
class Holder: pass

def canonical(values):
    "What values hold, with the objects in them by the order in which they are met."
    numbers = {}
    def of(value):
        if isinstance(value, int): return value
        if id(value) in numbers: return f"#{numbers[id(value)]}"
        numbers[id(value)] = len(numbers)
        if isinstance(value, torch.Tensor): return value.tolist()
        if isinstance(value, list): return ["list", *map(of, value)]
        if isinstance(value, dict): return {key: of(part) for key, part in value.items()}
        if isinstance(value, Holder): return {"Holder": {key: of(part) for key, part in vars(value).items()}}
        return {"function": of(value.__defaults__[0])}
    return [of(value) for value in values]
"""


class Story:
    """A random notebook: it makes, changes and deletes objects that hold each other, and reads some on the ranks."""

    def __init__(self, notebook: Kernel, seed: int) -> None:
        self.notebook = notebook
        self.random = random.Random(seed)
        self.kinds: dict[str, str] = {}
        self.cells: list[str] = []

    def name(self) -> str:
        return self.random.choice(sorted(self.kinds)) if self.kinds else "1"

    def here(self, code: str) -> str:
        self.cells.append(code)
        return self.notebook.run(code).ok().stdout

    def make(self) -> None:
        name, part, number = self.random.choice("abcdef"), self.name(), self.random.randrange(99)
        if self.kinds.get(name) in ("list", "dict"):  # it stays one object as long as it has its name
            return
        kinds = {
            "tensor": f"{name} = torch.tensor([{number}, 2])",
            "holder": f"{name}_ = Holder(); {name}_.x = {part}; {name} = {name}_; del {name}_",
            "list": f"{name} = [{part}, {number}]",
            "dict": f"{name} = dict(x={part})",
            "function": f"def {name}_(it={part}): return it\n{name} = {name}_; del {name}_",
        }
        kind = self.random.choice([*kinds])
        self.here(kinds[kind])
        self.kinds[name] = kind

    def change(self) -> None:
        name, part, number = self.name(), self.name(), self.random.randrange(99)
        changes = {
            "tensor": f"{name}.fill_({number})",
            "holder": f"{name}.y = {part}",
            "list": f"{name}.append({part})",
            "dict": f"{name}[{number}] = {part}",
            "function": f"{name}.__defaults__ = ({part},)",
        }
        if self.kinds:
            self.here(changes[self.kinds[name]])

    def read(self) -> None:
        names = self.random.sample(sorted(self.kinds), self.random.randint(1, len(self.kinds))) if self.kinds else []
        magic = self.random.choice(["%%distributed", "%%distributed", "%%rank 0", "%%rank 1"])
        code = f"print(canonical([{', '.join(names)}]))"
        self.cells.append(f"{magic}\n{code}")
        there = self.notebook.run(self.cells[-1]).ok()
        assert (there.stdout, there.stderr) == (self.here(code), ""), "\n".join(self.cells)


@pytest.mark.slow
@pytest.mark.limit(120)
def test_objects_that_hold_each_other_are_on_the_ranks_as_in_the_notebook(notebook: Kernel):
    notebook.run(CANONICAL).ok()
    for seed in range(15):
        notebook.run("%distributed reset\nfor name in 'abcdef': globals().pop(name, None)").ok()
        story = Story(notebook, seed)
        for _ in range(25):
            story.random.choice([story.make, story.change, story.read])()


@pytest.mark.parametrize(
    "make",
    [
        "x = torch.optim.LBFGS([w], max_iter=2)",
        "x = torch.optim.SGD([w], lr=1.0)\nx.base = torch.optim.Adam([w])",
        "x = torch.optim.SGD([w], lr=1.0)\nx.register_step_post_hook(lambda *_: w.data.mul_(3))",
        "w.register_hook(lambda gradient: gradient * 5)\nx = torch.optim.SGD([w], lr=1.0)",
        "w.register_post_accumulate_grad_hook(lambda w: [w.sub_(7)].clear())\nx = torch.optim.SGD([w], lr=1.0)",
    ],
)
def test_what_torch_leaves_out_of_a_pickle_is_on_the_ranks_too(notebook: Kernel, make: str):
    notebook.run(f"w = nn.Parameter(torch.full((1,), 2.0))\n{make}").ok()
    step = """
def closure():
    x.zero_grad(); loss = (w ** 2).sum(); loss.backward(); return loss
x.step(closure); getattr(x, "base", x).step(closure)
print(w.item())
"""
    assert on_ranks(notebook, step).stdout == notebook.run(step).ok().stdout

"""``%%distributed --convert``: ranks print the numbers of one process, or it is said that they share no work."""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.kernels import Kernel
from fixtures.plain_cells import HEAD, SHAPES as NOTEBOOKS
from fixtures.ranks import wait_for_warm_server
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import spectral_norm, weight_norm
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from nb_accelerate import Accelerator, notebook_launcher
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.convert.converted import Converted

_TRAIN = """
for epoch in range(2):
    for a, b in dl:
        seen.clear(); optimizer.zero_grad()
        loss = F.cross_entropy(model(a), b) + PENALTY; loss.backward(); optimizer.step()
    print(epoch, loss.item(), model[0].weight.sum().item())
"""
_MODEL = """
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)); optimizer = optim.SGD(model.parameters(), lr=0.1)
dl, seen = DataLoader(ds, batch_size=8), []
"""


def _cells(of_model: str, penalty: str = "0") -> list[str]:
    return [HEAD, _MODEL + of_model, _TRAIN.replace("PENALTY", penalty)]


_KEEPS = """
class Keeps(nn.ReLU):
    def forward(self, x):
        if WHEN: self.loss = x.square().sum()
        return super().forward(x)
model[1] = Keeps()
"""
LOOKED_INTO = {
    "a loss that is kept in the model": _cells(_KEEPS.replace("WHEN", "True"), "0.1 * model[1].loss"),
    "a loss that is kept in training": _cells(_KEEPS.replace("WHEN", "self.training"), "0.1 * model[1].loss"),
    "a hook": _cells("model[1].register_forward_hook(lambda *_: seen.append(_[2]))", "0.1 * seen[0].sum()"),
    "a hook of gradients": _cells("for one in model.parameters(): one.register_hook(lambda g: g.clamp(-0.01, 0.01))"),
}
"""What would see a part of the rows."""

_OTHERS = {
    "a hook that is made later": [
        HEAD,
        _MODEL,
        _TRAIN.replace("PENALTY", "0")
        + "model[1].register_forward_hook(lambda *_: seen.append(_[2]))\nmodel(x)\nprint(len(seen[0]), seen[0].sum())",
    ],
    "two loaders at once": _cells("first, second = (DataLoader(ds, 8, shuffle=True) for _ in range(2))"),
    "rows with random numbers": _cells(
        """
class Noisy(TensorDataset):
    def __getitem__(self, i): return self.tensors[0][i] + torch.randn(6) * random.random(), self.tensors[1][i]
dl = DataLoader(Noisy(x, y), 8)
""",
        "np.random.rand()",
    ),
    "sparse gradients": [
        HEAD,
        "model = nn.Embedding(9, 2, sparse=True); optimizer = optim.SparseAdam(model.parameters(), lr=0.1)",
        """
for first in range(0, 60, 20):
    rows = torch.arange(first, first + 20) % (first // 10 + 3)
    optimizer.zero_grad(); loss = F.cross_entropy(model(rows), y[first:first + 20]); loss.backward(); optimizer.step()
    print(loss.item(), model.weight.grad.is_sparse, model.weight.sum().item())
""",
    ],
    "batch norm and few rows": _cells("model.insert(1, nn.BatchNorm1d(8)); dl = DataLoader(Subset(ds, range(6)), 3)"),
    "no model": [
        HEAD,
        "w = torch.zeros(6, requires_grad=True)",
        """
for _ in range(4):
    loss = (torch.sigmoid(x @ w) - y).square().mean(); loss.backward(); w.data -= w.grad; w.grad.zero_()
    print(loss.item())
""",
    ],
}
_OTHERS["two loaders at once"][2] = """
for epoch in range(2):
    for (a, b), (c, d) in zip(first, second):
        optimizer.zero_grad(); loss = F.cross_entropy(model(a - c), b * d); loss.backward(); optimizer.step()
    print(epoch, loss.item(), torch.rand(1).item())
"""
_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.fc, self.gate = nn.Linear(6, 8), nn.Linear(8, 2), nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(8)); self.register_buffer("seen", torch.tensor(0))
        self.scale, self.rows, self.margin = 1.0, 0, 9.0
    def forward(self, x):
        z = torch.tanh(self.body(x))
        CHANGE
        return self.fc(z), LOSS
class Norm(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, g: g / g.norm())
model = Net(); optimizer = optim.SGD(model.parameters(), lr=0.1); dl, kept, calls = DataLoader(ds, 16), [], 0
"""
_TRAIN_NET = """
for epoch in range(2):
    for a, b in dl:
        optimizer.zero_grad(); out, more = model(a); loss = F.cross_entropy(out, b) + more; loss.backward()
        optimizer.step()
    model.margin -= 8.8
    print(epoch, loss.item(), sum(p.abs().sum().item() for p in model.parameters()), model.mean.sum().item())
    print(model.seen.item(), model.rows, len(kept), sum(map(len, kept)), calls)
"""


def _net(change: str = "", loss: str = "0.1 * z.square().mean()") -> list[str]:
    return [HEAD, _NET.replace("CHANGE", change).replace("LOSS", loss), _TRAIN_NET]


CHANGES_THE_WHOLE = {
    "rows are centred in training": _net("if self.training: z = z - z.mean(0)"),
    "averages in buffers": _net("self.mean.mul_(0.9).add_(0.1 * z.detach().mean(0)); self.seen += len(x)"),
    "a number in an attribute": _net("z = z * self.scale; self.scale = z.abs().mean().item() + 0.5"),
    "a number of rows in an attribute": _net("self.rows += len(x)"),
    "a number is returned": _net(loss="z.square().sum().item()"),
    "a gate that is 0 at first": _net("z = z + self.gate * (z - z.mean(0))"),
    "gradients of a batch": _net("z = Norm.apply(z)"),
    "a list of the notebook": _net("kept.append(z.detach())"),
    "a counter of the notebook": _net("global calls; calls += len(x)"),
    "what is printed": _net("print(len(x))"),
}
"""What a training call changes, and how a part of the rows would have changed it otherwise."""

_OTHERS["a sum that is 0 at first"] = _net(loss="F.relu(self.body(x).abs() - self.margin).sum()")
_OTHERS["the clock ends it"] = [
    HEAD,
    "from time import perf_counter" + _MODEL,
    """
start = perf_counter()
while perf_counter() - start < 0.05:
    for a, b in dl: optimizer.zero_grad(); F.cross_entropy(model(a), b).backward(); optimizer.step()
print(1, 2, 3, 4)
""",
]
_OTHERS["generators without a seed"] = [
    HEAD,
    _MODEL,
    """
import os
random.seed(os.getpid())
for rows in (np.random.default_rng().permutation(64)[:16], random.sample(range(64), 16)):
    F.cross_entropy(model(x[rows]), y[rows]).backward(); optimizer.step()
print(1, 2, 3, 4)
""",
]
_OTHERS["lazy layers"] = [
    HEAD,
    "model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2)); dl, seen = DataLoader(ds, 8), []",
    "model(x[:2]); optimizer = optim.SGD(model.parameters(), lr=0.1)" + _TRAIN.replace("PENALTY", "0"),
]
SHAPES = {**NOTEBOOKS, **LOOKED_INTO, **_OTHERS, **CHANGES_THE_WHOLE}

FAST = [
    "quickstart",
    "GCN",
    "char-RNN without a loader",
    "a loss that is kept in training",
    "a hook of gradients",
    "two loaders at once",
    "sparse gradients",
    "batch norm and few rows",
    "no model",
    "lazy layers",
    "averages in buffers",
    "a number is returned",
    "a list of the notebook",
]
"""One of each kind; all of them are slow."""

_OF_ROWS = {"char-RNN without a loader", "GCN", "GCN of an adjacency matrix", "no model", "batch norm and few rows"}
ALONE = {*_OF_ROWS, *LOOKED_INTO, *CHANGES_THE_WHOLE}
"""What each rank computes whole, because rows cannot be told from one another."""


def numbers(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)]


def run_shapes(shapes: dict[str, list[str]], convert: bool) -> dict[str, tuple[list[float], list[str]]]:
    """Run the cells of each shape; return the numbers that the last prints, and the models that are not shared."""
    found = {}
    for name, cells in shapes.items():
        names: dict[str, Any] = {"__name__": "__main__"}
        shown = io.StringIO()
        for cell in cells[:-1]:
            exec(compile(cell, "cell", "exec"), names)
        converted = Converted(names) if convert else nullcontext()
        with converted, redirect_stdout(shown):
            exec(compile(cells[-1], "cell", "exec"), names)
        found[name] = (
            numbers(shown.getvalue()),
            [one for one, *_ in converted.models.unshared.values()] if convert else [],
        )
    return found


def in_one_process() -> dict[str, Any]:
    """What one rank finds without the block, and with it; each kind of work once, as all that follow share a launch."""
    return {
        "plain": run_shapes({name: SHAPES[name] for name in FAST}, False),
        "converted": run_shapes({name: SHAPES[name] for name in ("quickstart", "GCN")}, True),
        "kinds of models": outcome_of_rows(),
        "batches": batches_of_rows(),
    }


def on_each_rank(folder: str) -> dict[str, Any]:
    """What each of two ranks finds."""
    return {
        "shapes": run_shapes({name: SHAPES[name] for name in FAST}, True),
        "kinds of models": outcome_of_rows(),
        "batches": batches_of_rows(),
        "chance": chance_of_rows(),
        "after the block": reads_after_the_block(),
        "saved whole": saves_and_loads(folder),
        "written": writes(folder, tempfile.mkdtemp(dir=folder)),
        "parted": parts_ways(),
        "rules": [rules(layer) for layer in (nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Tanh())],
        "refused": {mistake: refused(mistake) for mistake in MISTAKES},
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    wait_for_warm_server()
    # In a launch too: sums of floats depend on the number of threads.
    [found] = notebook_launcher(in_one_process, num_processes=1, progress="off")
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    wait_for_warm_server()
    return notebook_launcher(on_each_rank, (str(tmp_path_factory.mktemp("saved")),), num_processes=2, progress="off")


@pytest.mark.contract("cells: --convert, numbers of one process")
@pytest.mark.parametrize("shape", FAST)
def test_ranks_print_the_numbers_of_one_process(alone: dict[str, Any], two: list[dict[str, Any]], shape: str):
    plain = alone["plain"][shape][0]
    assert len(plain) > 3
    for rank in two:
        seen, unshared = rank["shapes"][shape]
        assert seen == pytest.approx(plain, rel=2e-3, abs=1e-5)
        assert bool(unshared) == (shape in ALONE)


@pytest.mark.slow
@pytest.mark.limit(180)
def test_all_shapes_print_the_numbers_of_one_process():
    wait_for_warm_server()
    [plain] = notebook_launcher(run_shapes, (SHAPES, False), num_processes=1, progress="off")
    assert all(len(shown) > 3 for shown, _ in plain.values())
    for num_processes in (2, 3):
        for rank in notebook_launcher(run_shapes, (SHAPES, True), num_processes, progress="off"):
            for shape, (seen, unshared) in rank.items():
                assert seen == pytest.approx(plain[shape][0], rel=2e-3, abs=1e-5), shape
                assert bool(unshared) == (shape in ALONE), shape


def test_one_rank_computes_as_without_it(alone: dict[str, Any]):
    assert alone["converted"] == {name: alone["plain"][name] for name in alone["converted"]}


def outcome_of_rows() -> dict[str, Any]:
    """What models of unusual kinds compute and learn inside the block: values that ranks and one process have alike."""
    torch.manual_seed(0)
    x, y = torch.randn(13, 6), torch.randint(0, 3, (13,))

    class ReturnsItsLoss(nn.Module):
        def __init__(self, reduction: str) -> None:
            super().__init__()
            self.layer, self.reduction = nn.Linear(6, 3), reduction

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
            out = self.layer(x)
            loss = None if labels is None else F.cross_entropy(out, labels, reduction=self.reduction)
            return {"loss": loss, "logits": out, "best": out.argmax(1), "sure": out > 0}

    class Standardizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x - x.mean(dim=0))

    class AddsAnOutput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, twice: bool = False) -> list[torch.Tensor]:
            out = self.layer(x)
            return [out, out] if self.training or twice else [out]

    outcome: dict[str, Any] = {}

    def learn(name: str, model: nn.Module, loss_of: Any) -> None:
        with Converted({}) as converted:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = loss_of(model)
                loss.backward()
                optimizer.step()
        weights = [one.detach().sum().item() for one in model.parameters()]
        outcome[name] = [loss.item(), *weights], name in {one for one, *_ in converted.models.unshared.values()}

    learn("a mean inside", ReturnsItsLoss("mean"), lambda model: model(x, labels=y)["loss"])
    learn("a sum inside", ReturnsItsLoss("sum"), lambda model: model(x, labels=y)["loss"])
    learn("several outputs", ReturnsItsLoss("sum"), lambda model: model(x)["logits"][model(x)["sure"]].square().sum())
    net = nn.Linear(6, 3)
    learn("a penalty", net, lambda model: F.cross_entropy(model(x), y) + sum(p.abs().sum() for p in model.parameters()))
    inner, outer = nn.Linear(6, 5), nn.Linear(5, 3)
    learn("a chain", nn.ModuleList([inner, outer]), lambda _: F.cross_entropy(outer(inner(x).relu()), y))
    rnn = nn.LSTM(6, 4)  # time comes first
    learn("rows second", rnn, lambda model: model(x.expand(5, 13, 6))[0].square().mean())
    normed = nn.Sequential(spectral_norm(nn.Linear(6, 4)), weight_norm(nn.Linear(4, 3)))
    learn("computed weights", normed, lambda model: F.cross_entropy(model(x), y))
    learn("by a choice", AddsAnOutput().eval(), lambda model: sum(map(torch.sum, model(x, False) + model(x, True))))
    learn("AddsAnOutput", AddsAnOutput(), lambda model: sum(map(torch.sum, model(x))))
    learn("Standardizes", Standardizes(), lambda model: F.cross_entropy(model(x), y))
    return outcome


def test_models_of_other_kinds_learn_as_in_one_process(alone: dict[str, Any], two: list[dict[str, Any]]):
    for rank in two:
        for name, (numbers_of_rank, is_unshared) in rank["kinds of models"].items():
            assert numbers_of_rank == pytest.approx(alone["kinds of models"][name][0], rel=1e-4, abs=1e-6), name
            assert is_unshared == (name == "Standardizes")


class Counted(Dataset[Any]):
    """Rows that count how often they were read, as a tensor or with a name."""

    def __init__(self, *, has_names: bool) -> None:
        self.has_names, self.reads = has_names, 0

    def __len__(self) -> int:
        return 19

    def __getitem__(self, number: int) -> Any:
        self.reads += 1
        return {"x": torch.tensor([float(number)]), "id": str(number) if self.has_names else number}


def batches_of_rows() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for has_names in (False, True):
        torch.manual_seed(0)
        rows = Counted(has_names=has_names)
        loader = DataLoader(rows, batch_size=4, shuffle=True)
        with Converted({}):
            batches = [(one["x"].tolist(), list(map(str, one["id"]))) for _ in range(2) for one in loader]
            ids = [one.removeprefix("tensor(").removesuffix(")") for _, batch in batches for one in batch]
        found[f"has names: {has_names}"] = [x for x, _ in batches], ids, rows.reads
    return found


def test_ranks_read_parts_of_batches_and_see_the_whole(alone: dict[str, Any], two: list[dict[str, Any]]):
    for rank in two:
        for kind, (batches, ids, reads) in rank["batches"].items():
            assert (batches, ids) == alone["batches"][kind][:2]
            assert reads == (2 * 20 / 2 + 1 if kind == "has names: False" else 2 * 19 + 1)


def chance_of_rows() -> dict[str, Any]:
    """What dropout and batch norm do inside the block, and what is left of a rank's random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(4, 4).repeat(2, 1)  # the rows of both ranks are equal
    with Converted({}):
        out = model(x)
        (0 * out).sum().backward()
        after = torch.rand(1).item()
        norm, other = nn.BatchNorm1d(4), torch.randn(8, 4)
        norm(other)
        is_replaced = nn.Module.__call__ is not nn.Module._wrapped_call_impl
    is_restored = nn.Module.__call__ is nn.Module._wrapped_call_impl
    return {
        "out": out.tolist(),
        "after": after,
        "mean": torch.allclose(norm.running_mean, 0.1 * other.mean(dim=0)),
        "restored": is_replaced and is_restored,
    }


def test_rows_are_dropped_apart_and_all_else_is_equal_on_ranks(two: list[dict[str, Any]]):
    first, second = (rank["chance"] for rank in two)
    assert first == second
    assert first["out"][:4] != first["out"][4:]
    assert first["mean"]
    assert first["restored"]


def reads_after_the_block() -> list[Any]:
    batches = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4)
    with Converted({}):
        rest = iter(batches)
        next(rest)
    (rows,) = next(rest)
    return [rows.tolist(), nn.Module.__call__ is nn.Module._wrapped_call_impl]


def test_a_loader_may_be_read_on_after_the_cell(two: list[dict[str, Any]]):
    assert [rank["after the block"] for rank in two] == [[[4.0, 5.0, 6.0, 7.0], True]] * 2


def saves_and_loads(folder: str) -> bool:
    with Converted({}):
        model = nn.Linear(2, 2)
        for number in range(20):
            model.weight.data.fill_(number)
            torch.save(model.state_dict(), f"{folder}/model.pt")
            if not (torch.load(f"{folder}/model.pt")["weight"] == number).all():
                return False
    return True


def writes(folder: str, temporary: str) -> list[Any]:
    """What a rank finds of files that all ranks write; `temporary` is a folder of each rank."""
    run, model = Path(folder, "run"), nn.Linear(2, 2)
    with Converted({}) as converted:
        if not run.exists():
            run.mkdir()
        with (run / "log").open("a") as log:
            print("a line", file=log)
        with (run / "model").open("wb") as file:
            torch.save(model.state_dict(), file)
        for number in range(2):
            np.save(run / f"{number}.npy", np.ones(number))
        os.remove(run / "0.npy")
        os.replace(run / "1.npy", run / "last.npy")
        torch.save(model.state_dict(), f"{temporary}/own")
        found = [
            sorted(os.listdir(run)),
            (run / "log").read_text(),
            np.load(run / "last.npy").tolist(),
            torch.load(run / "model")["weight"].shape == torch.load(f"{temporary}/own")["weight"].shape,
        ]
        converted.report()
    return found


def test_what_all_ranks_write_is_written_once(two: list[dict[str, Any]]):
    whole = [["last.npy", "log", "model"], "a line\n", [1.0], True]
    assert [rank["written"] for rank in two] == [whole, whole]


def parts_ways() -> str:
    with Converted({}) as converted:
        try:
            if torch.distributed.get_rank() == 0:
                torch.ones(1, requires_grad=True).sum().backward()
            converted.report()
        except ConfigError as error:
            return str(error)
    return ""


def test_ranks_that_part_ways_are_refused_with_both_lines(two: list[dict[str, Any]]):
    for rank in two:
        places = re.findall(r"line (\d+) \((backward|the end)", rank["parted"])
        assert [what for _, what in places] == ["backward", "the end"]
        assert int(places[0][0]) < int(places[1][0])


def rules(layer: nn.Module) -> list[str]:
    """What is not as in one process for a model of this layer."""
    model = nn.Sequential(nn.Linear(2, 2), layer)
    with Converted({}) as converted:
        model(torch.randn(8, 2)).sum().backward()
    return [rule for _, _, rule in converted.models.rules.values()]


def test_rules_that_change_numbers_are_named(two: list[dict[str, Any]]):
    for rank in two:
        assert ["batch norm" in rule for rule in rank["rules"][0]] == [True]
        assert ["random numbers" in rule for rule in rank["rules"][1]] == [True]
        assert rank["rules"][2] == []


def test_a_file_is_saved_once_and_whole(two: list[dict[str, Any]]):
    assert [rank["saved whole"] for rank in two] == [True, True]


def refused(mistake: str) -> str:
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(8, 2))
    loader = DataLoader(rows, batch_size=4)
    if mistake == "prepared":
        loader = Accelerator().prepare(loader)
    with pytest.raises(ConfigError) as raised:
        train_wrongly(mistake, rows, loader)
    return str(raised.value)


def train_wrongly(mistake: str, rows: TensorDataset, loader: Any) -> None:
    model: nn.Module = nn.Linear(2, 1)
    with Converted({}):
        if mistake == "accelerator":
            Accelerator()
        if mistake == "sampler":
            loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))
        if mistake == "wrapped":
            model = nn.parallel.DistributedDataParallel(model)
        for (x,) in loader:
            loss = model(x).sum()
            if mistake == "gradients":
                torch.autograd.grad(loss, model.parameters())
            loss.backward()


MISTAKES = {
    "prepared": "different rows. With --convert all ranks read the same, and each computes its part: leave out",
    "accelerator": "an Accelerator shares out rows itself. Run the cell without --convert, or leave the",
    "sampler": "samplers for several processes",
    "wrapped": "DistributedDataParallel, which shares out rows itself",
    "gradients": "autograd.grad does not give the gradients of parameters. Write loss.backward()",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_followed_is_refused_with_the_line(two: list[dict[str, Any]], mistake: str):
    for rank in two:
        assert MISTAKES[mistake] in rank["refused"][mistake]
        assert re.match(r"line \d+: ", rank["refused"][mistake])


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.wait_for_server()
    shared_kernel.run("%load_ext nb_accelerate").ok()
    shared_kernel.run("%%distributed -n 2\n1").ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


class TestInANotebook:
    @pytest.mark.contract("cells: --convert, in a notebook")
    def test_functions_and_objects_of_other_cells_are_followed(self, notebook: Kernel):
        head, setup, last = SHAPES["quickstart"]
        notebook.run(head + setup).ok()
        seeded = f"torch.manual_seed(1)\n{last}"
        shared = notebook.run(f"%%distributed --convert\n{seeded}").ok()
        plain = notebook.run(seeded).ok()
        assert len(numbers(plain.stdout)) > 10
        printed = re.sub(r"^cell .*\n", "", shared.stdout, flags=re.MULTILINE)  # how far it is, on a slow machine
        assert numbers(printed) == pytest.approx(numbers(plain.stdout), rel=1e-4)

    def test_a_bar_is_no_reason_to_refuse_and_what_is_not_shared_is_said(self, notebook: Kernel):
        notebook.run(f"{HEAD}{SHAPES['GCN'][1]}").ok()
        cell = notebook.run(f"%%distributed --convert\nfrom tqdm.auto import tqdm\n{SHAPES['GCN'][2]}").ok()
        assert "GCN (line 6)" in cell.stderr

    def test_a_part_of_the_ranks_is_refused(self, notebook: Kernel):
        said = notebook.run("%%distributed --convert --ranks 0\n1").message
        assert "Leave --ranks out" in said

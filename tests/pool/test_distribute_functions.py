"""``%%distribute`` where functions get model, loader and optimizer as arguments, in the shapes that tutorials have."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nb_accelerate import notebook_launcher
from nb_accelerate.errors import ConfigError
from nb_accelerate.magics.distribute import Distribute
from nb_accelerate.magics.loop_rewriting import rewrite

START = """import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 4)
y = x.sum(dim=1, keepdim=True)
history = []
"""

STEP = """
def train_one_epoch(model, loader, optimizer, criterion, device):
    model.train()
    total = 0.0
    for a, b in loader:
        a, b = a.to(device), b.to(device)
        optimizer.zero_grad()
        loss = criterion(model(a), b)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)
"""

PARTS = """
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = nn.Linear(4, 1).to(device)
sgd = optim.SGD(net.parameters(), lr=0.05)
data = DataLoader(TensorDataset(x, y), batch_size=8)
"""

CALL = """
for epoch in range(3):
    history.append(train_one_epoch(net, data, sgd, nn.MSELoss(), device))
"""

CELL = START + STEP + PARTS + CALL

SHAPES = {
    "one epoch in a function": CELL,
    "functions for training and testing, rows that are printed": START
    + """
device = torch.accelerator.current_accelerator().type if torch.cuda.is_available() else "cpu"

def train(dataloader, model, loss_fn, optimizer):
    size = len(dataloader.dataset)
    model.train()
    for batch, (X, Y) in enumerate(dataloader):
        X, Y = X.to(device), Y.to(device)
        loss = loss_fn(model(X), Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch % 4 == 0:
            print(f"loss: {loss.item():>7f} [{(batch + 1) * len(X):>5d}/{size:>5d}]")

def test(dataloader, model, loss_fn):
    size = len(dataloader.dataset)
    model.eval()
    total, right = 0.0, 0
    with torch.no_grad():
        for X, Y in dataloader:
            pred = model(X.to(device))
            total += loss_fn(pred, Y.to(device)).item() * len(X)
            right += ((pred > 0) == (Y > 0)).sum().item()
    return total / size

training = DataLoader(TensorDataset(x, y), batch_size=8)
testing = DataLoader(TensorDataset(x, y), batch_size=32)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
loss_fn = nn.MSELoss()
optimizer = optim.SGD(model.parameters(), lr=1e-2)
for t in range(3):
    train(training, model, loss_fn, optimizer)
    history.append(test(testing, model, loss_fn))
""",
    "a main function that makes all": START
    + """
import tempfile

def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = ((model(data) - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        if batch_idx % args["log"] == 0:
            print("Train Epoch: {} [{}/{}]".format(epoch, batch_idx * len(data), len(train_loader.dataset)))

def test(model, device, test_loader):
    model.eval()
    loss = 0
    with torch.no_grad():
        for data, target in test_loader:
            loss += ((model(data.to(device)) - target.to(device)) ** 2).sum().item()
    return loss / len(test_loader.dataset)

def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(TensorDataset(x, y), batch_size=8)
    test_loader = DataLoader(TensorDataset(x, y), batch_size=8)
    model = nn.Linear(4, 1).to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 4):
        train({"log": 3}, model, device, train_loader, optimizer, epoch)
        history.append(test(model, device, test_loader))
        scheduler.step()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), f"{folder}/model.pt")

main()
""",
    "a fit that calls the epoch, a scheduler for each batch, a bar": START
    + """
from tqdm import tqdm

def epoch_of(model, loader, opt, sched):
    losses = []
    bar = tqdm(loader, disable=True)
    for a, b in bar:
        loss = nn.functional.l1_loss(model(a.to("cpu")), b)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        losses.append(loss.item())
        bar.set_postfix(loss=losses[-1])
    return losses

def fit(model, loader, opt, sched, epochs):
    losses = []
    for _ in range(epochs):
        losses += epoch_of(model, loader, opt, sched=sched)
    return losses

net = nn.Linear(4, 1)
opt = optim.AdamW(net.parameters(), lr=0.05)
sched = optim.lr_scheduler.LinearLR(opt, 0.5, 1.0, 24)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
history = fit(net, loader, opt, sched, 3)
""",
    "a function that uses the names of the cell": START
    + PARTS
    + """
def one_epoch():
    for a, b in data:
        loss = nn.functional.mse_loss(net(a), b)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        history.append(loss.item())

for _ in range(3):
    one_epoch()
""",
    "the device in the call": (START + STEP + PARTS.replace(".to(device)", "") + CALL).replace(
        ", device))", ', "cpu"))'
    ),
}


def run_cells(cells: list[str]) -> list[list[float]]:
    histories = []
    for text in cells:
        names: dict[str, Any] = {"__name__": "cell"}
        exec(compile(text, "cell", "exec"), names)
        histories.append([float(value) for value in names["history"]])
    return histories


def with_batches_of(cell: str, size: int) -> str:
    return cell.replace("batch_size=8", f"batch_size={size}")


def in_two_cells() -> str:
    """Return the function that was rewritten alone, and the other cell with the lines that it is said to need."""
    new = rewrite(STEP)
    lines = "\n".join(line.strip() for line in new.notes if line.startswith(" "))
    for old, here in (("model", "net"), ("loader", "data"), ("optimizer", "sgd")):
        lines = lines.replace(old, here)
    return f"{START}{new.text}{PARTS}{lines}{CALL}"


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    plain = list(SHAPES.values())
    new = [rewrite(cell).text for cell in plain]
    # In a launch too: sums of floats depend on the number of threads.
    [alone] = notebook_launcher(run_cells, ([*plain, *new, in_two_cells()],), num_processes=1)
    return {
        "plain": alone[: len(plain)],
        "one rank": alone[len(plain) :],
        "two ranks": notebook_launcher(run_cells, ([with_batches_of(cell, 4) for cell in new],), num_processes=2),
    }


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=list(SHAPES))
def test_a_rewritten_loop_has_the_losses_of_the_plain_one(runs: dict[str, list[Any]], number: int):
    assert runs["one rank"][number] == pytest.approx(runs["plain"][number], abs=1e-6)


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=list(SHAPES))
def test_two_ranks_with_half_of_each_batch_have_them_too(runs: dict[str, list[Any]], number: int):
    if "shuffle=True" not in list(SHAPES.values())[number]:  # the same rows, in another order, differ a little
        for rank in runs["two ranks"]:
            assert rank[number] == pytest.approx(runs["plain"][number], abs=1e-5)
    assert runs["two ranks"][0][number] == pytest.approx(runs["two ranks"][1][number], abs=1e-6)


def test_functions_that_a_function_calls_get_its_accelerator():
    text = rewrite(SHAPES["a main function that makes all"]).text
    assert "def train(accelerator, args, model" in text
    assert "train(accelerator, {" in text
    assert "def test(model, device" in text
    assert "def main():\n    accelerator = Accelerator()\n" in text
    assert "accelerator.save(accelerator.unwrap_model(model).state_dict()" in text


def test_a_function_alone_is_rewritten_and_the_lines_for_the_other_cell_are_said(runs: dict[str, list[Any]]):
    assert rewrite(STEP).text == STEP.replace("loss.backward()", "accelerator.backward(loss)").replace(
        "loss.item()", 'accelerator.reduce(loss.detach(), "mean").item()'
    )
    assert runs["one rank"][-1] == pytest.approx(runs["plain"][0], abs=1e-6)


def test_with_launch_the_functions_go_along():
    launched: list[Any] = []
    text = rewrite(CELL, launch=True).text.replace("Accelerator, notebook_launcher\n", "Accelerator\n")
    exec(text, {"notebook_launcher": launched.append})
    assert launched[0].__name__ == "train"


def test_the_page_shows_what_the_magic_answers(monkeypatch: pytest.MonkeyPatch):
    page = (Path(__file__).parents[2] / "notebooks" / "how_to" / "distribute.md").read_text(encoding="utf-8")
    cells = re.findall(r"^```python\n%%distribute\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    answers = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr("builtins.input", lambda _: "")
    for cell, answer in zip(cells, answers, strict=True):
        shown = io.StringIO()
        with redirect_stdout(shown):
            Distribute(SimpleNamespace()).run("", cell)  # type: ignore[arg-type]
        assert shown.getvalue().startswith(answer)


NAMED = "train(model=model, device=device, train_loader=train_loader, optimizer=optimizer, epoch=epoch)"

UNSURE = {
    "two calls": (CELL + CALL, "line 31: a second call of train_one_epoch"),
    "handed on": (CELL + "print(train_one_epoch)\n", "line 29: train_one_epoch is used without a call"),
    "arguments with a star": (CELL.replace("(net, data, sgd, nn", "(*[net], data, sgd, nn"), "arguments with a star"),
    "a model that is hidden": (CELL.replace("(net, data,", "(net.train(), data,"), "pass net by its name"),
    "a global loader in a function alone": (STEP.replace("in loader:", "in data:"), "line 5: the loop goes over"),
    "rows that are counted": (
        CELL.replace("len(loader)", "len(loader.dataset)"),
        "line 20: 'total / len(loader.dataset)' would be too small",
    ),
    "the loader is read by another function": (
        CELL + "def mean(loader):\n    return sum(b.sum() for _, b in loader)\nprint(mean(data))\n",
        "mean reads data too",
    ),
    "a device by default": (CELL.replace("device):", 'device="cuda"):'), "chooses a device by default"),
    "which one is the model": (STEP.replace("    model.train()\n", ""), "is the model is not sure"),
    "another function that saves": (
        STEP + "def save(m):\n    torch.save(m.state_dict(), 'm.pt')\n",
        "line 14: \"torch.save(m.state_dict(), 'm.pt')\" is outside the function that trains",
    ),
    "assigned again": (STEP.replace("model.train()", "model = model.train()"), "line 3: 'model' is assigned again"),
    "different things by one name": (
        CELL + "def f(m):\n    return m.training\nf(net)\nf(sgd)\n",
        "f gets different things as 'm'",
    ),
    "a call with names only": (
        SHAPES["a main function that makes all"]
        .replace("train(args, model,", "train(model,")
        .replace('args["log"]', "3")
        .replace('train({"log": 3}, model, device, train_loader, optimizer, epoch)', NAMED),
        "has arguments by name only",
    ),
}


@pytest.mark.parametrize("mistake", UNSURE)
def test_an_unsure_function_is_left_alone_with_the_reason(mistake: str):
    cell, reason = UNSURE[mistake]
    with pytest.raises(ConfigError) as raised:
        rewrite(cell)
    assert reason in str(raised.value)
    assert str(raised.value).endswith("Nothing was changed")

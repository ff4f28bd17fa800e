"""``%%distribute``: plain loops become distributed ones that train alike, or are left alone with a reason."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nb_accelerate import notebook_launcher
from nb_accelerate.errors import ConfigError
from nb_accelerate.magics.distribute import Distribute
from nb_accelerate.magics.loop_rewriting import rewrite

START = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 4)
y = x.sum(dim=1, keepdim=True)
history = []
"""

ACCUMULATION = "accumulation over two batches, the loss in the call"

LOOPS = {
    "a regression in a cell": START
    + """
device = "cuda" if torch.cuda.is_available() else "cpu"  # whichever is there
model = nn.Linear(4, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
for epoch in range(3):
    total = 0.0
    for a, b in loader:
        a, b = a.to(device), b.to(device)
        loss = nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    history.append(total / len(loader))
""",
    "a classifier with a scheduler for each epoch, and validation": START
    + """
labels = (y[:, 0] > 0).long()
train = DataLoader(TensorDataset(x, labels), batch_size=16, shuffle=True)
valid = DataLoader(TensorDataset(x, labels), batch_size=32)
device = torch.device("cpu")
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model = model.to(device)
criterion = nn.CrossEntropyLoss()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=2)
for epoch in range(4):
    model.train()
    for inputs, targets in train:
        opt.zero_grad()
        loss = criterion(model(inputs.to(device)), targets.to(device))
        loss.backward()
        opt.step()
    scheduler.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for inputs, targets in valid:
            right += (model(inputs.to(device)).argmax(1) == targets.to(device)).sum().item()
    history.append(1 - right / 64)
""",
    "a function with clipping and a scheduler for each batch": START
    + '''
def fit(epochs):
    """Fit, and give the losses."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to("cpu")
    data = DataLoader(TensorDataset(x, y), batch_size=8)
    optim = torch.optim.AdamW(net.parameters(), lr=0.02)
    warmup = torch.optim.lr_scheduler.LinearLR(optim, 0.1, 1.0, 16)
    losses = []
    for _ in range(epochs):
        for step, (a, b) in enumerate(data):
            loss = ((net(a) - b) ** 2).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optim.step()
            warmup.step()
            optim.zero_grad(set_to_none=True)
            losses.append(loss.item())
    return losses


history = fit(3)
''',
    ACCUMULATION: START
    + """
model = nn.Linear(4, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    for i, (a, b) in enumerate(loader):
        (nn.functional.mse_loss(model(a), b) / 2).backward()
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    history.append(nn.functional.mse_loss(model(x), y).item())
""",
    "a class in the cell, weights that are saved": START
    + """
import tempfile

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, a):
        return self.layer(a)

net = Net()  # größer wäre besser
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
optimizer = torch.optim.RMSprop(net.parameters(), lr=0.01)
with tempfile.TemporaryDirectory() as folder:
    for epoch in range(3):
        for a, b in loader:
            optimizer.zero_grad()
            loss = (net(a) - b).abs().mean()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        torch.save(net.state_dict(), f"{folder}/net.pt")
        assert set(net.state_dict()) == {"layer.weight", "layer.bias"}
""",
}


def run_cells(cells: list[str]) -> list[Any]:
    histories = []
    for text in cells:
        names: dict[str, Any] = {"__name__": "cell"}
        exec(compile(text, "cell", "exec"), names)
        histories.append([float(value) for value in names["history"]])
    return histories


@pytest.fixture(scope="module")
def runs() -> dict[int, list[Any]]:
    new = [rewrite(cell).text for cell in LOOPS.values()]
    # One thread: sums of floats depend on how many there are.
    plain = notebook_launcher(run_cells, (list(LOOPS.values()),), num_processes=1)
    return {0: plain, **{n: notebook_launcher(run_cells, (new,), num_processes=n) for n in (1, 2)}}


@pytest.mark.parametrize("number", range(len(LOOPS)), ids=list(LOOPS))
def test_a_rewritten_loop_has_the_losses_of_the_plain_one(runs: dict[int, list[Any]], number: int):
    [plain], [one] = runs[0], runs[1]
    assert one[number] == pytest.approx(plain[number], abs=1e-6)


@pytest.mark.parametrize("number", range(len(LOOPS)), ids=list(LOOPS))
def test_a_rewritten_loop_learns_on_two_ranks_that_agree(runs: dict[int, list[Any]], number: int):
    first, second = (rank[number] for rank in runs[2])
    assert first == pytest.approx(second, abs=1e-6)
    assert first[-1] < first[0]


def test_two_ranks_accumulate_like_one_process_over_twice_the_batches(runs: dict[int, list[Any]]):
    number = list(LOOPS).index(ACCUMULATION)
    [plain] = run_cells([LOOPS[ACCUMULATION].replace("/ 2).backward", "/ 4).backward").replace("% 2 == 0", "% 4 == 0")])
    assert runs[2][0][number] == pytest.approx(plain, abs=1e-5)


def test_comments_and_layout_stay():
    cell = LOOPS["a regression in a cell"]
    kept = [line for line in rewrite(cell).text.splitlines() if line in cell.splitlines()]
    assert "device = accelerator.device  # whichever is there" in rewrite(cell).text
    assert len(kept) == len(cell.splitlines()) - 3  # device, backward, item


def test_an_import_from_the_future_stays_first():
    cell = f"from __future__ import annotations\n{PLAIN}"
    first, second, *_ = rewrite(cell).text.splitlines()
    assert (first, second) == ("from __future__ import annotations", "from nb_accelerate import Accelerator")


WITHOUT_IMPORTS = LOOPS["a regression in a cell"].removeprefix(START).lstrip("\n")


@pytest.mark.parametrize("head", ["", "# my loop\n", "\n\n# one\n# two\n", '"""A loop."""\n'])
@pytest.mark.parametrize("launch", [False, True])
def test_the_accelerator_is_imported_before_it_is_made(head: str, *, launch: bool):
    text = rewrite(head + WITHOUT_IMPORTS, launch=launch).text
    names = "Accelerator, notebook_launcher" if launch else "Accelerator"
    lines = [line.strip() for line in text.splitlines()]
    assert lines.index(f"from nb_accelerate import {names}") < lines.index("accelerator = Accelerator()")
    assert text.count("from nb_accelerate") == 1


def test_tabs_stay_tabs_and_texts_that_are_no_devices_stay():
    cell = "mode = 'cpu'\nwhere = 'cuda'\n" + PLAIN.replace("    ", "\t").replace("(4, 1)", "(4, 1).to(where)")
    body = "\n".join(f"\t{line}" if line else "" for line in cell.splitlines())
    new = rewrite(f"def fit():\n{body}\n").text
    assert "\n\taccelerator = Accelerator()\n" in new
    assert "\n\tmodel, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n" in new
    assert "\tmode = 'cpu'\n" in new
    assert "\twhere = accelerator.device\n" in new


def test_what_every_rank_does_for_itself_is_said():
    notes = rewrite(LOOPS["a classifier with a scheduler for each epoch, and validation"]).notes
    assert "valid is not shared out: every rank reads all of it" in notes
    assert any(note.startswith("scheduler steps once for each epoch") for note in notes)


def test_with_launch_the_cell_launches_itself():
    new = rewrite(LOOPS["a regression in a cell"], launch=True).text
    launched = []
    source = new.replace("Accelerator, notebook_launcher\n", "Accelerator\n")
    assert source != new
    exec(source, {"notebook_launcher": launched.append})
    assert launched[0].__name__ == "train"


PLAIN = LOOPS["a regression in a cell"]

UNSURE = {
    "no loop": ("x = 1\n", "no loss.backward()"),
    "two losses": (PLAIN.replace("        loss.backward()\n", "        loss.backward()\n" * 2), "line 21: a second"),
    "arguments of backward": (PLAIN.replace("backward()", "backward(retain_graph=True)"), "line 20: backward()"),
    "a closure": (PLAIN.replace("step()", "step(closure)"), "line 21: optimizer.step() has arguments"),
    "LBFGS": (
        PLAIN.replace("torch.optim.SGD", "torch.optim.LBFGS"),
        "By hand: call accelerator.backward(loss) in the closure",
    ),
    "two optimizers": (
        PLAIN.replace("loader = ", "other = torch.optim.Adam(model.parameters())\nloader = "),
        "line 13: a second optimizer",
    ),
    "all rows at once": (PLAIN.replace("in loader", "in [(x, y)]"), "line 16: the loop goes over"),
    "two sources in step": (
        PLAIN.replace("a, b in loader", "(a, b), _ in zip(loader, y)"),
        "line 16: the loop goes over",
    ),
    "rows that are counted": (
        PLAIN.replace("len(loader)", "len(loader.dataset)"),
        "line 23: 'total / len(loader.dataset)' would be too small",
    ),
    "distributed already": (
        PLAIN.replace("optimizer = ", "model = nn.parallel.DistributedDataParallel(model)\noptimizer = "),
        "line 12: DistributedDataParallel",
    ),
    "one GPU that is meant": (PLAIN.replace("a.to(device)", "a.cuda(1)"), "line 17: 'a.cuda(1)' chooses one GPU"),
    "an attribute of the model": (
        PLAIN.replace("model(a)", "model.predict(a)"),
        "line 18: model.predict",
    ),
    "a loader in the loop": (
        PLAIN.replace("loader = ", "other = ").replace("    total = 0.0", "    loader = DataLoader(other.dataset)"),
        "is inside a loop or a branch",
    ),
    "a device from elsewhere": (PLAIN.replace("device = ", "where = "), "'device' is made elsewhere"),
    "a magic": (f"%time\n{PLAIN}", "line 1: this is not Python"),
}


@pytest.mark.parametrize("mistake", UNSURE)
def test_an_unsure_loop_is_left_alone_with_the_reason(mistake: str):
    cell, reason = UNSURE[mistake]
    with pytest.raises(ConfigError) as raised:
        rewrite(cell)
    assert reason in str(raised.value)
    assert str(raised.value).endswith("Nothing was changed")


def distribute(line: str, answer: str, monkeypatch: pytest.MonkeyPatch, cell: str = PLAIN) -> tuple[str, list[Any]]:
    replaced: list[Any] = []
    shell = SimpleNamespace(set_next_input=lambda text, replace: replaced.append((text, replace)))
    monkeypatch.setattr("builtins.input", lambda _: answer)
    shown = io.StringIO()
    with redirect_stdout(shown):
        Distribute(shell).run(line, cell)  # type: ignore[arg-type]
    return shown.getvalue(), replaced


def test_the_cell_is_replaced_when_the_changes_are_accepted(monkeypatch: pytest.MonkeyPatch):
    shown, replaced = distribute("", "y", monkeypatch)
    assert "-        loss.backward()" in shown
    assert "+        accelerator.backward(loss)" in shown
    assert replaced == [(rewrite(PLAIN).text.rstrip("\n"), True)]


def test_the_cell_stays_when_they_are_not(monkeypatch: pytest.MonkeyPatch):
    shown, replaced = distribute("", "", monkeypatch)
    assert "nothing was changed" in shown
    assert replaced == []


def test_nobody_is_asked_where_the_line_accepts(monkeypatch: pytest.MonkeyPatch):
    assert len(distribute("--accept", "n", monkeypatch)[1]) == 1


def test_lines_are_counted_from_the_magic_as_the_notebook_does(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="line 17: the loop goes over"):
        distribute("", "y", monkeypatch, UNSURE["all rows at once"][0])


def test_a_launch_says_how_to_choose_the_processes_and_notes_say_whose_lines_they_name(monkeypatch: pytest.MonkeyPatch):
    hint = "notebook_launcher(train) takes all devices; write num_processes=2 in it for two processes"
    assert hint in distribute("--launch", "y", monkeypatch)[0].splitlines()
    assert hint not in distribute("", "y", monkeypatch)[0]
    lines = PLAIN.replace("        loss.backward()\n", "        loss.backward()\n        print(other.item())\n")
    (number,) = [number for number, one in enumerate(lines.splitlines(), start=1) if "other.item()" in one]
    assert f"line {number} of this cell: other.item() is of this rank's rows only" in rewrite(lines).notes


def test_the_changes_of_a_launch_do_not_mark_lines_that_are_only_indented(monkeypatch: pytest.MonkeyPatch):
    shown = distribute("--launch", "y", monkeypatch)[0].splitlines()
    removed = [line[1:].strip() for line in shown if line.startswith("-") and not line.startswith("---")]
    assert removed == [
        "%%distribute --launch",
        'device = "cuda" if torch.cuda.is_available() else "cpu"  # whichever is there',
        "loss.backward()",
        "total += loss.item()",
    ]
    assert "+        accelerator.backward(loss)" not in shown  # lines are those of the new cell
    assert "+            accelerator.backward(loss)" in shown
    assert "             optimizer.step()" in shown


def test_a_launch_says_which_names_later_cells_lack_and_how_to_get_them():
    cell = LOOPS["a regression in a cell"]
    new = rewrite(cell, launch=True)
    note, inside, outside = new.notes[-3:]
    assert note.startswith(
        "later cells do not have model, optimizer, loader, x, y, history and 5 more, which are local to train()"
    )
    assert new.notes[:-3] == rewrite(cell).notes
    assert "later cells" not in "".join(rewrite(cell).notes)
    text = new.text.replace("\n\n\nnotebook_launcher(train)\n", f"\n{inside}\n\n\n{outside}\n")
    names: dict[str, Any] = {}
    exec(text.replace("(train)", "(train, num_processes=2)"), names)
    assert names["model"](torch.zeros(1, 4)).shape == (1, 1)

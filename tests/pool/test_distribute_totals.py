"""``%%distribute`` of loops that add up numbers: what they print on two ranks is what they print on one process."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO

import pytest

from nb_accelerate import notebook_launcher
from nb_accelerate.errors import ConfigError
from nb_accelerate.magics.loop_rewriting import rewrite

START = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 4)
y = (x.sum(dim=1) > 0).long()
ds = TensorDataset(x, y)
train_dl = DataLoader(ds, batch_size=8)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
"""

LOOP = """
for epoch in range(2):
    running, correct, seen, steps, losses = 0.0, 0, 0, 0, []
    for i, (xb, yb) in enumerate(train_dl):
        out = model(xb)
        loss = nn.functional.cross_entropy(out, yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ADD
    END
"""

ROWS = "running += loss.item() * len(xb)"
RIGHT = "correct += (out.argmax(1) == yb).sum().item()"
MEAN = "running += loss.item()"


def loop(add: str, end: str) -> str:
    add, end = add.replace("\n", "\n        "), end.replace("\n", "\n    ")
    return START + LOOP.replace("ADD", add).replace("END", end)


SAME = {
    "divided by the rows of the dataset": loop(
        f"{ROWS}\n{RIGHT}",
        'print(f"{running/len(train_dl.dataset):.4f} acc {correct/len(train_dl.dataset):.3f}")',
    ),
    "divided by the length of a tensor": loop(ROWS, "print(running / len(x))"),
    "divided by a number": loop(f"{ROWS}\n{RIGHT}", "print(running / 64, 100 * correct / x.shape[0])"),
    "an average with a name": loop(ROWS, "avg = running / len(train_dl.dataset)\nprint(avg)"),
    "divided in its own place": loop(
        f"{ROWS}\n{RIGHT}", "running /= len(ds)\ncorrect = correct / 64\nprint(running, correct)"
    ),
    "rows that are counted": loop(
        f"{ROWS}\n{RIGHT}\nseen += yb.size(0)", "print(running / seen, correct / seen, seen)"
    ),
    "rows with a name": loop("bs = xb.shape[0]\nrunning += bs * loss.item()\nseen += bs", "print(running / seen)"),
    "a loss with a name": loop("value = loss.item()\nrunning = running + value * len(xb)", "print(running / 64)"),
    "a count with a name": loop("hits = (out.argmax(1) == yb).sum().item()\ncorrect += hits", "print(correct)"),
    "a fraction in the loop": loop("running += loss.item() * len(xb) / len(train_dl.dataset)", "print(running)"),
    "a mean in the loop": loop("running += loss.item() / len(train_dl)", "print(running)"),
    "other ways to count": loop(
        "correct += torch.sum(out.argmax(1) == yb).item()\nseen += int(out.argmax(1).eq(yb.data).sum())\n"
        "steps += (out.argmax(1) == yb).type(torch.float).sum().item()",
        "print(correct / 64, seen / 64, steps / 64)",
    ),
    "two in one statement": loop(
        "running, seen = running + loss.item() * len(xb), seen + len(xb)", "print(running / seen, running / 64)"
    ),
    "tensors": loop(
        "running += loss.detach() * xb.size(0)\ncorrect += (out.argmax(1) == yb).sum()",
        "print(running.item() / len(ds), correct.double().item() / len(train_dl.dataset))",
    ),
    "both of two conditions": loop(
        "correct += ((out.argmax(1) == yb) & (yb > 0)).sum().item()\n"
        "seen += (out.argsort(1)[:, :1] == yb[:, None]).any(1).sum().item()",
        "print(correct / 64, seen)",
    ),
    "the same name for validation": loop(
        MEAN,
        "print(running / len(train_dl))\nrunning, correct = 0.0, 0\nvalid = DataLoader(ds, batch_size=16)\n"
        "with torch.no_grad():\n    for a, b in valid:\n"
        "        running += nn.functional.cross_entropy(model(a), b).item()\nprint(running / len(valid))",
    ),
    "a number of batches with a name": loop(MEAN, "n = len(train_dl)\nprint(running / n)"),
    "lists in a sum": loop("losses += [loss.item()]", "print(sum(losses) / len(train_dl))"),
    "while the loop goes on": loop(f"{RIGHT}\nseen += len(yb)\nif i == 3:\n    print(correct / seen, seen)", "pass"),
    "a list of sums": loop("losses.append(loss.item() * len(xb))", "print(sum(losses) / 64)"),
    "means": loop(
        f"{MEAN}\nlosses.append(loss.item())\nsteps += 1\nif i == 3:\n    print(running / (i + 1))",
        "print(running / len(train_dl), running / steps, sum(losses) / len(losses), running / (i + 1))",
    ),
    "means that are set back": loop(
        f"{MEAN}\nif i % 4 == 3:\n    print(f'{{running / 4:.4f}}')\n    running = 0.0", "pass"
    ),
    "in a function": START
    + """
def train(loader, net, opt):
    n = len(loader.dataset)
    total, right = 0.0, 0
    for a, b in loader:
        pred = net(a)
        loss = nn.functional.cross_entropy(pred, b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() * a.size(0)
        right += (pred.argmax(1) == b).sum().item()
    return total / n, right / len(loader.dataset)

print(train(train_dl, model, optimizer))
""",
}
"""Loops whose numbers do not depend on the number of ranks."""


def printed(cells: list[str]) -> list[list[float]]:
    """Return the numbers that each cell prints."""
    found = []
    for cell in cells:
        shown = StringIO()
        with redirect_stdout(shown):
            exec(compile(cell, "cell", "exec"), {"__name__": "cell"})
        found.append([float(one) for one in re.findall(r"\d+\.?\d*(?:e-?\d+)?", shown.getvalue())])
    return found


def in_halves(cell: str) -> str:
    """Return a cell whose two ranks have the batches of one process together."""
    return cell.replace("batch_size=8", "batch_size=4")


UNEVEN = loop(f"{ROWS}\n{RIGHT}\nseen += len(xb)", "print(correct, seen, running / 61, running / seen)").replace(
    "TensorDataset(x, y)", "TensorDataset(x[:61], y[:61])"
)


@pytest.fixture(scope="module")
def numbers() -> dict[str, list[list[list[float]]]]:
    plain = [*SAME.values(), UNEVEN.replace("lr=0.5", "lr=0.0")]
    new = [rewrite(cell).text for cell in plain]
    return {
        "plain": notebook_launcher(printed, (plain,), num_processes=1),
        "one rank": notebook_launcher(printed, (new,), num_processes=1),
        "two ranks": notebook_launcher(printed, ([in_halves(cell) for cell in new],), num_processes=2),
    }


@pytest.mark.parametrize("number", range(len(SAME)), ids=list(SAME))
@pytest.mark.parametrize("ranks", ["one rank", "two ranks"])
def test_ranks_print_the_numbers_of_one_process(numbers: dict[str, list[list[list[float]]]], number: int, ranks: str):
    [plain] = numbers["plain"]
    assert plain[number]
    for rank in numbers[ranks]:
        assert rank[number] == pytest.approx(plain[number], rel=1e-4, abs=1.1e-4)


def test_repeated_rows_are_not_counted(numbers: dict[str, list[list[list[float]]]]):
    [plain], ranks = numbers["plain"], numbers["two ranks"]
    for rank in ranks:
        correct, seen, mean, same_mean = rank[-1][:4]
        assert [correct, seen] == plain[-1][:2]
        assert mean == same_mean == pytest.approx(plain[-1][2], rel=0.05)
        assert mean != plain[-1][2]  # the repeated rows are in the mean loss of the last batch: a note says so
    assert any("rows that are repeated to fill the last batches" in note for note in rewrite(UNEVEN).notes)


UNSURE = {
    "a sum of losses divided by rows": (loop(MEAN, "print(running / 64)"), "'running / 64' would be too small"),
    "a sum of losses": (loop(MEAN, "print(running)"), "Write running / len(train_dl)"),
    "a sum of losses with a name": (loop(MEAN, "total = running\nprint(total)"), "Write running / len(train_dl)"),
    "a list of losses divided by rows": (
        loop("losses.append(loss.item())", "print(sum(losses) / len(ds))"),
        "Write sum(losses) / len(train_dl)",
    ),
    "right ones divided by batches": (
        loop(RIGHT, "print(correct / (len(train_dl) * 8))"),
        "line 22: 'correct / (len(train_dl) * 8)' would be too large",
    ),
    "right ones divided by steps": (
        loop(f"{RIGHT}\nsteps += 8", "print(correct / steps)"),
        "'correct / steps' would be too large",
    ),
    "right ones of some batches": (
        loop(f"if i % 2:\n    {RIGHT}", "print(correct / 32)"),
        "accelerator.reduce(torch.tensor(correct, device=accelerator.device), 'sum')",
    ),
    "right ones that are set back": (
        loop(f"{RIGHT}\nif i % 4 == 3:\n    print(correct / 32)\n    correct = 0", "pass"),
        "'correct / 32' would be too large",
    ),
    "a number of another kind": (
        loop("running += (out[:, 0] - yb).abs().sum().item()", "print(running / len(train_dl.dataset))"),
        "Take the line out",
    ),
    "a mean of a fixed size": (loop("running += loss.item() * 8", "print(running / 64)"), "Take the line out"),
    "a mask": (
        loop("correct += (out.argmax(1)[keep] == yb[keep]).sum().item()", "print(correct / 64)"),
        "Take the line out",
    ),
    "another shape": (
        loop("out = out.reshape(-1)\ncorrect += (out > 0).sum().item()", "print(correct / 64)"),
        "Take the line out",
    ),
    "a tensor": (loop("running += loss.detach()", "print(running.item() / 64)"), "Take the line out"),
    "a loss that is a sum": (
        loop(MEAN, "print(running / 64)").replace("(out, yb)", "(out, yb, reduction='sum')"),
        "the loss is a sum over rows",
    ),
    "a criterion that is a sum": (
        loop(MEAN, "print(running / 64)")
        .replace("model = ", "crit = nn.CrossEntropyLoss(reduction='sum')\nmodel = ")
        .replace("nn.functional.cross_entropy(", "crit("),
        "line 10: the loss is a sum over rows",
    ),
    "a loss by sum": (
        loop(MEAN, "print(running / 64)").replace(
            "nn.functional.cross_entropy(out, yb)", "(out[:, 0] - yb).abs().sum()"
        ),
        "the loss is a sum over rows",
    ),
    "a second loop over the loader": (
        loop(
            "pass", "for a, b in train_dl:\n    correct += (model(a).argmax(1) == b).sum().item()\nprint(correct / 64)"
        ),
        "line 22: a second loop over train_dl would see the rows of one rank only",
    ),
    "a second loop in an expression": (
        loop("pass", "print(sum((model(a).argmax(1) == b).sum().item() for a, b in train_dl) / 64)"),
        "line 22: a second loop over train_dl",
    ),
    "a number of batches from before": (
        loop(MEAN, "print(running / n)").replace("model = nn", "n = len(train_dl)\nmodel = nn"),
        "'running / n' would be too small",
    ),
    "progress by rows of the dataset": (
        loop("done = len(xb) / len(train_dl.dataset)\nlosses.append(done)", "pass"),
        "train_dl.dataset counts the rows of all ranks",
    ),
}


@pytest.mark.parametrize("mistake", UNSURE)
def test_a_number_that_would_be_wrong_is_refused(mistake: str):
    cell, reason = UNSURE[mistake]
    with pytest.raises(ConfigError) as raised:
        rewrite(cell)
    assert reason in str(raised.value)
    assert str(raised.value).startswith("line ")
    assert str(raised.value).endswith("Nothing was changed")


def test_a_criterion_of_validation_may_be_a_sum():
    cell = loop(RIGHT, "print(correct / 64)").replace(
        "model = ", "crit = nn.CrossEntropyLoss(reduction='sum')\nmodel = "
    )
    assert "gather_for_metrics" in rewrite(f"{cell}print(crit(model(x), y).item() / 64)\n").text


def test_a_loop_over_the_loader_before_it_is_prepared_is_left_as_it_is():
    before = "rows = sum(len(a) for a, _ in train_dl)\nmodel = nn.Linear(4, 2)"
    assert before in rewrite(loop(RIGHT, "print(rows, correct / 64)").replace("model = nn.Linear(4, 2)", before)).text


def test_a_total_that_goes_elsewhere_has_a_note():
    notes = rewrite(loop(RIGHT, "total = correct\nprint(total)")).notes
    assert "line 22 of this cell: correct is of all ranks; do not divide it by batches" in notes


def test_progress_by_rows_has_a_note_also_if_the_divisor_is_used_for_a_total():
    in_loop = f"{RIGHT}\nprint(i * len(xb), size)"
    cell = loop(in_loop, "print(correct / size)").replace("model = ", "size = len(train_dl.dataset)\nmodel = ")
    assert any("train_dl.dataset has the rows of all ranks" in note for note in rewrite(cell).notes)
    notes = rewrite(cell.replace("print(i * len(xb), size)", "pass")).notes
    assert not any("dataset" in note for note in notes)


def test_a_mean_of_this_ranks_rows_has_a_note():
    notes = rewrite(loop("running += (out.argmax(1) == yb).float().mean().item()", "print(running / (i + 1))")).notes
    assert "line 21 of this cell: (out.argmax(1) == yb).float().mean().item() is of this rank's rows only" in notes
    notes = rewrite(loop("running += loss.detach()", "print(running.item() / len(train_dl))")).notes
    assert "line 21 of this cell: running is of this rank's rows only" in notes


@pytest.mark.parametrize(
    ("add", "meaning"),
    [
        ("sums[epoch] += loss.item()", "sums[epoch] is a sum over the batches of one rank"),
        ("sums[epoch] += loss.item() * 8", "sums[epoch] is a sum over the rows of one rank"),
        (RIGHT, "correct is of all ranks; do not divide it by batches"),
    ],
)
def test_a_total_that_the_cell_does_not_use_has_a_note(add: str, meaning: str):
    assert any(meaning in note for note in rewrite(loop(add, "pass")).notes)


@pytest.mark.parametrize(
    ("add", "who"),
    [
        ("meter.update(loss.item(), len(xb))", "meter.update gets"),
        ("losses.extend(out.argmax(1).tolist())", "losses is of"),
        ("losses.append({'loss': loss.item(), 'n': len(xb)})", "losses is of"),
    ],
)
def test_what_collects_this_ranks_rows_has_a_note(add: str, who: str):
    assert any(who in note and note.endswith("this rank's rows only") for note in rewrite(loop(add, "pass")).notes)


def test_layout_and_comments_stay():
    text = rewrite(loop(f"{ROWS}  # sum\n{RIGHT}  # hits", "print(running / 64, correct / 64)")).text
    assert "running += accelerator.gather_for_metrics(loss.detach().repeat(len(xb))).sum().item()  # sum\n" in text
    assert "correct += accelerator.gather_for_metrics(out.argmax(1) == yb).sum().item()  # hits\n" in text

"""``%%distribute`` of loops with ``autocast`` and ``GradScaler``, in the shapes that notebooks have them in."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nb_accelerate import notebook_launcher
from nb_accelerate.errors import ConfigError
from nb_accelerate.magics.loop_rewriting import rewrite

START = """import torch
from torch import nn, optim
from torch.amp import autocast, GradScaler
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 4) / 10  # gradients that the first loss scale does not make infinite
y = x.sum(dim=1, keepdim=True)
history = []
"""

PARTS = """
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
optimizer = optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
criterion = nn.MSELoss()
"""

CELL = (
    START
    + PARTS
    + """scaler = GradScaler("cuda")
for epoch in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        with autocast("cuda", dtype=torch.float16):
            loss = criterion(model(a.to(device)), b.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        history.append(loss.item())
"""
)

TRAIN_FN = """
def train_fn(fold, train_loader, model, criterion, optimizer, epoch, scheduler, device, scaler):
    model.train()
    losses = []
    for step, (inputs, labels) in enumerate(train_loader):
        inputs, labels = inputs.to(device), labels.to(device)
        with autocast("cuda", enabled=True):
            y_preds = model(inputs)
            loss = criterion(y_preds, labels)
        if CFG.gradient_accumulation_steps > 1:
            loss = loss / CFG.gradient_accumulation_steps
        scaler.scale(loss).backward()
        if (step + 1) % CFG.gradient_accumulation_steps == 0:
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CFG.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if CFG.batch_scheduler:
                scheduler.step()
        losses.append(loss.item())
    return losses
"""

CONFIG = """
class CFG:
    apex = True
    gradient_accumulation_steps = 2
    max_grad_norm = 0.1
    batch_scheduler = True
"""

SKIPPED = "a main function, the norm of true gradients, a step that may be skipped"

SHAPES = {
    "a cell that clips": CELL,
    "a training function of a competition, with accumulation and a scheduler": START
    + CONFIG
    + TRAIN_FN.replace("enabled=True", "enabled=CFG.apex")
    + PARTS
    + """
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
scaler = GradScaler("cuda", enabled=CFG.apex)
for epoch in range(3):
    history += train_fn(0, loader, model, criterion, optimizer, epoch, scheduler, device, scaler=scaler)
""",
    SKIPPED: START
    + """
def train(model, loader, optimizer, grad_scaler, scheduler):
    for a, b in loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(a), b)
        grad_scaler.scale(loss).backward()
        grad_scaler.unscale_(optimizer)
        history.append(sum(weight.grad.norm().item() for weight in model.parameters()))
        before = grad_scaler.get_scale()
        grad_scaler.step(optimizer); grad_scaler.update()
        if before <= grad_scaler.get_scale():
            scheduler.step()

def main():
    model = nn.Linear(4, 1)
    optimizer = optim.AdamW(model.parameters(), lr=0.02)
    scaler = GradScaler("cuda")
    loader = DataLoader(TensorDataset(x * 10, y * 10), batch_size=8)
    scheduler = optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 24)
    for epoch in range(3):
        train(model, loader, optimizer, scaler, scheduler)

main()
""",
    "bfloat16 without a scaler, with validation": START
    + PARTS
    + """
use_amp = True
valid = DataLoader(TensorDataset(x, y), batch_size=32)
def evaluate(model, valid, criterion):
    model.eval()
    with torch.no_grad(), torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=use_amp):
        return sum(criterion(model(a), b).item() for a, b in valid)

for epoch in range(3):
    model.train()
    for a, b in loader:
        optimizer.zero_grad()
        with torch.autocast(device_type="cpu", enabled=use_amp):
            loss = criterion(model(a), b)
            with torch.autocast(device_type="cpu", enabled=False):
                loss = loss.float() * 1
        loss.backward()
        optimizer.step()
    history.append(evaluate(model, valid, criterion))
""",
    "a scaler of the function that trains": START
    + PARTS
    + """
def fit(model, loader, optimizer):
    scaler = GradScaler("cuda")
    for epoch in range(3):
        for a, b in loader:
            optimizer.zero_grad()
            with autocast("cuda"):
                loss = criterion(model(a), b)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            history.append(loss.item())

fit(model, loader, optimizer)
""",
    "mixed precision that is turned off": CELL.replace('GradScaler("cuda")', 'GradScaler("cuda", enabled=use)')
    .replace("dtype=torch.float16", "enabled=use")
    .replace("device = ", "use = False\ndevice = ", 1),
}


def on_the_cpu(cell: str) -> str:
    """Return a cell whose plain loop has on a CPU the precision that it has on a GPU."""
    cell = cell.replace('GradScaler("cuda"', 'GradScaler("cpu"').replace('"cuda", dtype=', '"cuda",  dtype=')
    for written in ('autocast("cuda",', 'autocast(device_type="cuda",'):
        cell = cell.replace(f"{written} enabled", f"{written.replace('cuda', 'cpu')} dtype=torch.float16, enabled")
        cell = cell.replace(written, written.replace("cuda", "cpu"))
    return cell.replace('autocast("cuda")', 'autocast("cpu", dtype=torch.float16)')


def run_cells(cells: list[str]) -> list[list[float]]:
    histories = []
    for text in cells:
        names: dict[str, Any] = {"__name__": "cell"}
        exec(compile(text, "cell", "exec"), names)
        histories.append([float(value) for value in names["history"]])
    return histories


def in_two_cells() -> str:
    """Return the function that was rewritten alone, and the other cell with the lines that it is said to need."""
    new = rewrite(TRAIN_FN)
    lines = "\n".join(line.strip() for line in new.notes if line.startswith(" ")).replace("train_loader", "loader")
    assert 'accelerator = Accelerator(mixed_precision="fp16")' in lines
    assert "and give train_fn the accelerator in the place of scaler" in new.notes
    made = "scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)\n"
    call = "for epoch in range(3):\n    history += train_fn(0, loader, model, criterion, optimizer, epoch, scheduler, "
    return f"{START}{CONFIG}{new.text}{PARTS}{made}{lines}\n{call}device, accelerator)\n"


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    new = [rewrite(cell).text for cell in SHAPES.values()]
    plain = [on_the_cpu(cell) for cell in SHAPES.values()]
    halved = [cell.replace("batch_size=8", "batch_size=4") for cell in new]
    # In a launch too: sums of floats depend on the number of threads.
    [alone] = notebook_launcher(run_cells, ([*plain, *new, in_two_cells()],), num_processes=1)
    return {
        "plain": alone[: len(plain)],
        "one rank": alone[len(plain) :],
        "two ranks": notebook_launcher(run_cells, (halved,), num_processes=2),
    }


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=list(SHAPES))
def test_a_loop_in_mixed_precision_has_the_values_of_the_plain_one(runs: dict[str, list[Any]], number: int):
    assert runs["one rank"][number] == pytest.approx(runs["plain"][number], rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=list(SHAPES))
def test_two_ranks_with_half_of_each_batch_have_them_too(runs: dict[str, list[Any]], number: int):
    first, second = (rank[number] for rank in runs["two ranks"])
    assert first == pytest.approx(second, rel=1e-6, nan_ok=True)
    assert math.isfinite(first[-1])
    if number != list(SHAPES).index(SKIPPED):  # which steps are skipped depends on the rows of each rank
        assert first == pytest.approx(runs["plain"][number], rel=1e-2, abs=1e-3)


def test_a_step_with_infinite_gradients_is_skipped_as_in_the_plain_loop(runs: dict[str, list[Any]]):
    number = list(SHAPES).index(SKIPPED)
    infinite = [math.isinf(value) for value in runs["plain"][number]]
    assert any(infinite)
    assert [not math.isfinite(value) for value in runs["one rank"][number]] == infinite


def test_a_function_alone_gets_the_accelerator_in_the_place_of_the_scaler(runs: dict[str, list[Any]]):
    number = list(SHAPES).index("a training function of a competition, with accumulation and a scheduler")
    assert runs["one rank"][-1] == pytest.approx(runs["plain"][number], rel=2e-3, abs=1e-4)


def test_what_the_scaler_did_is_gone():
    text = rewrite(CELL).text
    assert "scaler" not in text.split("history = []")[1]
    assert (
        """        with accelerator.autocast():
            loss = criterion(model(a.to(device)), b.to(device))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
"""
        in text
    )


OLD = CELL.replace("autocast, GradScaler", "GradScaler").replace('GradScaler("cuda")', "torch.cuda.amp.GradScaler()")
NEWEST = CELL.replace(", dtype=torch.float16", "")


@pytest.mark.parametrize(
    ("cell", "argument"),
    [
        (OLD.replace('autocast("cuda", dtype=torch.float16)', "torch.cuda.amp.autocast()"), '"fp16"'),
        (OLD.replace('autocast("cuda", dtype=torch.float16)', "autocast()"), '"fp16"'),  # imported in another cell
        (CELL.replace("torch.float16", "torch.bfloat16"), '"bf16"'),
        (
            CELL.replace("torch.float16", "amp_dtype").replace("scaler = ", "amp_dtype = torch.half\nscaler = "),
            '"fp16"',
        ),
        (NEWEST.replace('autocast("cuda"', "autocast(device_type=device"), '"fp16"'),  # the device of the scaler
        (
            NEWEST.replace('st("cuda"', 'st("cuda", enabled=C.amp').replace('r("cuda"', 'r("cuda", enabled=C.amp'),
            "if C.amp",
        ),
    ],
)
def test_the_precision_is_that_of_the_blocks(cell: str, argument: str):
    [line] = [one for one in rewrite(cell).text.splitlines() if one.startswith("accelerator = ")]
    assert argument in line


BLOCK = '        with autocast("cuda", dtype=torch.float16):\n'

UNSURE = {
    "a dtype of the device": (
        NEWEST.replace('autocast("cuda"', "autocast(device_type=device").replace('r("cuda")', "r(device)"),
        "line 20: the dtype of 'autocast(device_type=device)' depends on the device",
    ),
    "a dtype that is computed": (CELL.replace("torch.float16", "pick()"), "line 20: dtype=pick() is not known here"),
    "a condition that is computed": (CELL.replace("dtype=", "enabled=on(), dtype="), "line 20: whether enabled=on()"),
    "two conditions": (
        CELL.replace('r("cuda")', 'r("cuda", enabled=on)'),
        "line 16: GradScaler and autocast are enabled",
    ),
    "two dtypes": (
        CELL + 'with autocast("cuda", dtype=torch.bfloat16):\n    print(model(x))\n',
        "line 28: autocast blocks of bf16 and fp16",
    ),
    "no block": (CELL.replace(BLOCK, "        if True:\n"), "line 16: GradScaler without an autocast block"),
    "a block that is a name": (CELL.replace("with autocast(", "amp = autocast("), "line 20: this is not Python"),
    "a context that is kept": (
        CELL.replace("scaler = ", 'ctx = autocast("cuda")\nscaler = '),
        "line 16: autocast that is not written as a block",
    ),
    "a block elsewhere only": (
        CELL.replace(BLOCK, "        if True:\n") + 'with autocast("cuda"):\n    print(model(x))\n',
        "line 28: there is no autocast block in the training loop",
    ),
    "a call outside the block": (
        CELL.replace("        scaler.scale", "        other = model(a)\n        scaler.scale"),
        "line 22: the model is called outside of the autocast block",
    ),
    "autocast in the class": (
        CELL.replace(
            "history = []\n", 'class Net(nn.Module):\n    def f(self):\n        with autocast("cuda"):\n            1\n'
        ),
        "line 11: autocast in a class",
    ),
    "a scaler that may be None": (
        CELL.replace('GradScaler("cuda")', 'GradScaler("cuda") if x is y else None'),
        "line 16",
    ),
    "a scaler that is asked for": (CELL.replace("scaler.update()", "scaler and scaler.update()"), "line 26: a use of"),
    "a scaler from elsewhere": (
        CELL.replace("scaler = ", "scale = "),
        "line 22: the scaler of the loss is made elsewhere",
    ),
    "two scalers": (CELL.replace("scaler = ", 'other = GradScaler("cuda")\nscaler = '), "only one GradScaler"),
    "options of the scaler": (CELL.replace('r("cuda")', 'r("cuda", init_scale=8)'), "GradScalerKwargs(init_scale=...)"),
    "a step without a scaled loss": (CELL.replace("scaler.scale(loss)", "loss"), "line 22: a loss is scaled and its"),
    "a step beside the scaler": (
        CELL.replace("scaler.update()", "optimizer.step()"),
        "line 26: optimizer is stepped by itself and by scaler",
    ),
    "clipping of scaled gradients": (
        CELL.replace("        scaler.unscale_(optimizer)\n", ""),
        "line 23: clip_grad_norm_ clips gradients that are multiplied by the loss scale",
    ),
    "the scale in bfloat16": (
        CELL.replace("torch.float16", "torch.bfloat16").replace("loss.item()", "scaler.get_scale()"),
        "line 27: with mixed_precision",
    ),
}


@pytest.mark.parametrize("mistake", UNSURE)
def test_an_unsure_precision_is_left_alone_with_the_reason(mistake: str):
    cell, reason = UNSURE[mistake]
    with pytest.raises(ConfigError) as raised:
        rewrite(cell)
    assert reason in str(raised.value)


def test_a_schedule_that_a_library_makes_is_prepared_too():
    made = "warmup = get_linear_schedule_with_warmup(optimizer, 4, 24)\nscaler = "
    cell = CELL.replace("scaler = ", made).replace("scaler.update()", "scaler.update()\n        warmup.step()")
    assert "model, optimizer, loader, warmup = accelerator.prepare(" in rewrite(cell).text

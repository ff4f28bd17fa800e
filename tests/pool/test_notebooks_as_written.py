"""Notebooks as people write them, on two ranks: in auto mode, with ``--convert``, and launched, after one process.

Their cells define what later cells use, so what this package does with names, identity, seeds and rows comes together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.kernels import Cell, Kernel
from fixtures.plain_cells import HEAD, SHAPES

pytestmark = pytest.mark.slow

OWN_MODEL = "each of the 2 processes trains a model of its own"
WHOLE = "each of the 2 ranks computes all of"

COMPUTED_BY_EACH = {"char-RNN without a loader", "GCN", "GCN of an adjacency matrix"}
"""Their rows cannot be told from one another."""


@pytest.fixture(scope="module")
def notebook(shared_kernel: Kernel) -> Iterator[Kernel]:
    shared_kernel.wait_for_server()
    shared_kernel.set_timeouts("nb_accelerate.notebook.pool.Pool", fold=30.0)
    shared_kernel.run("import torch\ntorch.set_num_threads(1)\n%load_ext nb_accelerate").ok()
    shared_kernel.run("%distributed start -n 2").ok()
    yield shared_kernel
    shared_kernel.run("%unload_ext nb_accelerate").ok()


def numbers(cell: Cell) -> list[float]:
    return [float(one) for one in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", cell.stdout)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_notebook_prints_the_numbers_of_one_process_and_says_who_shared_the_work(notebook: Kernel, shape: str):
    *defining, last = SHAPES[shape]
    for code in defining:
        notebook.run(code).ok()
    alone = numbers(notebook.run(last).ok())
    assert len(alone) > 3

    for code in defining:
        notebook.run(code).ok()
    converted = notebook.run(f"%%distributed --convert\n{last}").ok()
    assert numbers(converted) == pytest.approx(alone, rel=2e-3, abs=1e-5), converted.stdout
    assert (WHOLE in converted.stderr) == (shape in COMPUTED_BY_EACH), converted.stderr
    assert OWN_MODEL not in converted.stderr

    notebook.run("%distributed auto on").ok()
    try:
        by_cell = [notebook.run(code).ok() for code in SHAPES[shape]]
    finally:
        notebook.run("%distributed auto off").ok()
    assert numbers(by_cell[-1]) == pytest.approx(alone, rel=2e-3, abs=1e-5)
    assert sum(OWN_MODEL in cell.stderr for cell in by_cell) == 1, [cell.stderr for cell in by_cell]
    notebook.run("%distributed reset").ok()


IMPORT = ("import copy, random, math", "from nb_accelerate import Accelerator; import copy, random, math")
WITH_IT = ("import copy, random, math", "import copy, random, math; accelerator = Accelerator(split_batches=True)")
BACKWARD = ("loss.backward()", "accelerator.backward(loss)")


def prepared(after: str, names: str) -> tuple[str, str]:
    """Two more lines after one: an `Accelerator`, and what it prepares."""
    made = "accelerator = Accelerator(split_batches=True)"
    return after, f"{after}\n{made}\n{names} = accelerator.prepare({names})"


def prepared_before(line: str, names: str) -> tuple[str, str]:
    """One more line before another."""
    indent = line[: len(line) - len(line.lstrip())]
    return line, f"{indent}{names} = accelerator.prepare({names})\n{line}"


OWN_NOISE = [
    ("torch.randn(b, 4)", "torch.randn(2 * b, 4).chunk(2)[accelerator.process_index]"),
    ("torch.rand(b, 1)", "torch.rand(2 * b, 1).chunk(2)[accelerator.process_index]"),
]
"""All ranks draw the noise of all rows, and take their part."""

LAUNCHED: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "early stopping": (
        "model",
        [
            prepared(
                "optimizer = optim.Adam(params=model.parameters(), lr=0.05)", "model, optimizer, train_dl, val_dl"
            ),
            (
                "    print(epoch, total / n, val)",
                "    val = accelerator.reduce(torch.tensor(val)).item(); print(epoch, val)",
            ),
        ],
    ),
    "transfer learning": (
        "model_ft",
        [
            (
                'device = torch.device("cpu")',
                'device = torch.device("cpu"); accelerator = Accelerator(split_batches=True)',
            ),
            (
                "    for epoch in range(num_epochs):\n        for phase",
                "    model, optimizer, scheduler, loaders['train'], loaders['val'] = accelerator.prepare("
                "model, optimizer, scheduler, loaders['train'], loaders['val'])\n"
                "    for epoch in range(num_epochs):\n        for phase",
            ),
            ("    return model\ndevice", "    return accelerator.unwrap_model(model)\ndevice"),
        ],
    ),
    "LSTM with its own state": (
        "model",
        [
            prepared("criterion = nn.MSELoss()", "model, optimizer, dl"),
            ("h = model.init_hidden(20)", "h = accelerator.unwrap_model(model).init_hidden(10)"),
        ],
    ),
    "VAE": (
        "model",
        [
            prepared(
                "model = VAE(); optimizer = optim.Adam(model.parameters(), lr=1e-2)", "model, optimizer, train_loader"
            ),
            ("print(model.decode(", "print(accelerator.unwrap_model(model).decode("),
        ],
    ),
    "loaders from a function": (
        "trainer.model",
        [
            (
                "        self.history = []",
                "        self.accelerator = Accelerator(split_batches=True)\n"
                '        self.model, self.opt, loaders["train"] = self.accelerator.prepare(self.model, self.opt, '
                'loaders["train"])\n        self.history = []',
            ),
            ("; accelerator.backward(loss)", "; self.accelerator.backward(loss)"),
        ],
    ),
    "quickstart": (
        "model",
        [prepared("lr=1e-1)", "model, optimizer, train_dataloader")],
    ),
    "tqdm": ("net", [prepared("net = nn.Linear(6, 2); opt = optim.SGD(net.parameters(), lr=0.1)", "net, opt, dl")]),
    "k-fold": ("net", [WITH_IT, prepared_before("    for epoch in range(2):", "net, opt, trainloader")]),
    "DQN": (
        "policy",
        [
            WITH_IT,
            prepared_before("memory = deque(maxlen=1000)", "policy, optimizer"),
            # Ranks play the same game, as they draw equal numbers, and learn from a part of the sample each.
            ("random.sample(memory, 16))", "random.sample(memory, 16)[accelerator.process_index::2])"),
            ("sd, td = policy.state_dict()", "sd, td = accelerator.unwrap_model(policy).state_dict()"),
        ],
    ),
    # Their names of losses are others. Without mixed precision, backward() of torch averages as well.
    "GAN": ("G", [WITH_IT, prepared_before("G_losses = []", "G, D, optG, optD, dataloader"), *OWN_NOISE]),
    "WGAN-GP": ("G", [WITH_IT, prepared_before("G_losses = []", "G, D, optG, optD, dataloader"), *OWN_NOISE]),
    "AMP with GradScaler": (
        "net",
        [
            WITH_IT,
            prepared_before("for e in range(2):", "net, opt, dl"),
            ("scaler.scale(loss).backward()", "accelerator.backward(scaler.scale(loss))"),
        ],
    ),
    "clipping and schedulers": (
        "net",
        [
            WITH_IT,
            prepared_before("plateau = optim", "net, opt, one, dl"),
            # The last loss decides about the learning rate, so it has to be that of all rows.
            ("losses.append(loss.item() * 2)", "losses.append(accelerator.reduce(loss.detach(), 'mean').item() * 2)"),
        ],
    ),
    "char-RNN without a loader": (
        "rnn",
        [
            WITH_IT,
            prepared_before("total = 0", "rnn, opt"),
            (
                "start = random",
                "start = [random.randint(0, len(text) - 12) for _ in 'ab'][accelerator.process_index] #",
            ),
        ],
    ),
    "GCN": ("model", [WITH_IT, prepared_before("for epoch in range(7):", "model, optimizer")]),
    "GCN of an adjacency matrix": ("model", [WITH_IT, prepared_before("for epoch in range(7):", "model, optimizer")]),
}
"""Per notebook, the model that is trained in the end, and what is changed by hand besides its import and backward."""

ALONE = {
    "char-RNN without a loader": [
        ("range(6)", "range(12)"),
        ("    opt.zero_grad()", "    if it % 2 == 0: opt.zero_grad()"),
        ("loss.backward(); opt.step()", "(loss / 2).backward()\n    if it % 2: opt.step()"),
    ],
}
"""What one process does to see in a step the rows that two ranks see: the char-RNN reads one row."""


@pytest.mark.parametrize("shape", LAUNCHED)
def test_a_launched_notebook_with_five_lines_changed_trains_the_model_of_one_process(notebook: Kernel, shape: str):
    model, changes = LAUNCHED[shape]
    plain = "\n".join(SHAPES[shape])
    code, alone = plain, plain
    for old, new in [IMPORT, BACKWARD, *changes]:
        assert old in code or (old, new) in (BACKWARD, OWN_NOISE[1]), old
        code = code.replace(old, new)
    changed = set(code.splitlines()) - set(plain.splitlines())
    assert len(changed) <= 5, changed
    for old, new in ALONE.get(shape, []):
        assert old in alone, old
        alone = alone.replace(old, new)
    for name, text in (("alone", alone), ("launched", code)):
        # What is global in cells belongs to the function here.
        body = "\n".join(f"    {line}" for line in text.replace("global ", "nonlocal ").splitlines())
        notebook.run(f"def {name}():\n{body}\n    return [p.detach() for p in {model}.parameters()]").ok()
    notebook.run("from nb_accelerate import notebook_launcher").ok()
    notebook.run("one = notebook_launcher(alone, num_processes=1, progress='off')[0]").ok()
    cell = notebook.run("two = notebook_launcher(launched, num_processes=2, progress='off')").ok()
    assert OWN_MODEL not in cell.stderr
    same = "max((a - b).abs().max().item() for a, b in zip(two[0], two[1]))"
    assert notebook.run(same).ok().value == "0.0"
    # The last batch of a pass, which is not full, has the first rows once more on two ranks.
    flat = "torch.nn.utils.parameters_to_vector"
    near = f"(({flat}(one) - {flat}(two[0])).norm() / {flat}(one).norm()).item()"
    assert float(notebook.run(near).ok().value or "nan") < (0.15 if "DataLoader(" in code else 1e-6)


TRAINER = [
    HEAD,
    """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
class Rows(torch.utils.data.Dataset):
    def __init__(self, n): self.ids = torch.randint(0, 30, (n, 6))
    def __len__(self): return len(self.ids)
    def __getitem__(self, i): return {"input_ids": self.ids[i], "labels": self.ids[i]}
train_ds, eval_ds = Rows(48), Rows(16)
config = GPT2Config(vocab_size=30, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config.from_dict({**config.to_dict(), "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}))
""",
    """
args = TrainingArguments(FOLDER, num_train_epochs=2, per_device_train_batch_size=16, learning_rate=1e-2,
    report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", logging_strategy="no")
trainer = Trainer(model=model, args=args, train_dataset=train_ds, eval_dataset=eval_ds)
trainer.train()
loss = trainer.evaluate()["eval_loss"]
print("so:", trainer.state.global_step, loss, sum(p.abs().sum().item() for p in model.parameters()))
""",
]


def test_a_trainer_shares_the_work_by_itself(notebook: Kernel, tmp_path: Path):
    pytest.importorskip("transformers")
    whole = [code.replace("FOLDER", repr(str(tmp_path))) for code in TRAINER]

    def results(cell: Cell) -> list[float]:
        return numbers(Cell(stdout=cell.ok().stdout.partition("so:")[2]))

    alone = results([notebook.run(code) for code in whole][-1])
    assert len(alone) == 3
    cells = [code.replace("batch_size=16", "batch_size=8") for code in whole]
    notebook.run("%distributed auto on").ok()
    try:
        by_cell = [notebook.run(code).ok() for code in cells]
    finally:
        notebook.run("%distributed auto off").ok()
    assert results(by_cell[-1]) == pytest.approx(alone, rel=1e-5)  # ranks print one line, as theirs are equal
    refused = notebook.run(f"%%distributed --convert\n{whole[-1]}")
    assert "DistributedDataParallel, which shares out" in refused.traceback
    body = "\n".join(f"    {line}" for line in "\n".join(cells).splitlines())
    notebook.run(f"def train():\n{body}").ok()
    launched = notebook.run(
        "from nb_accelerate import notebook_launcher\nnotebook_launcher(train, num_processes=2, progress='off')"
    )
    assert results(launched) == pytest.approx(alone, rel=1e-5)
    assert all(OWN_MODEL not in cell.stderr for cell in (*by_cell, launched))

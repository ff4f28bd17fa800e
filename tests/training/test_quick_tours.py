"""The code of accelerate's quick tours runs here with its import changed, on one process and on two.

Each block stands as the tours print it, except that ``accelerate`` became ``nb_accelerate`` and that diffs show their
new side; what they leave to the reader (models, loaders, metrics) is supplied by `stage`. Left out, because they
are about something that is not supported yet: ``save_model``, ``load_checkpoint_in_model``, ``save_state``,
``load_state`` and ``register_for_checkpointing`` (checkpoints), and everything that is typed into a shell.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

ROWS = 22  # neither a multiple of the batch size nor of two ranks


def stage() -> dict[str, Any]:
    """What the tours take for granted."""
    import types

    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x = torch.linspace(-1, 1, ROWS).unsqueeze(1)
    data = TensorDataset(x, 3 * x + 2)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Metric:
        def __init__(self) -> None:
            self.predictions: list[Any] = []
            self.references: list[Any] = []

        def add_batch(self, predictions: Any, references: Any) -> None:
            self.predictions += predictions.tolist()
            self.references += references.tolist()

    def loader(batch_size: int = 4, **kwargs: Any) -> DataLoader[Any]:
        return DataLoader(data, batch_size=batch_size, **kwargs)

    done: list[str] = []
    return {
        "torch": torch,
        "done": done,
        "model": model,
        "my_model": model,
        "optimizer": optimizer,
        "my_optimizer": optimizer,
        "my_loss_function": nn.functional.mse_loss,
        "loss_function": nn.functional.mse_loss,
        "loss_func": nn.functional.mse_loss,
        "complex_loss_function": nn.functional.mse_loss,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99),
        "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99),
        "train_dataloader": loader(shuffle=True),
        "eval_dataloader": loader(),
        "my_training_dataloader": loader(),
        "training_dataloader": loader(),
        "dataloader": loader(),
        "validation_dataloader": loader(),
        "metric": Metric(),
        "args": types.SimpleNamespace(max_train_steps=3),
        "repo": types.SimpleNamespace(push_to_hub=lambda: done.append("pushed")),
        "clip_value": 0.5,
        "max_grad_norm": 0.5,
        "num_epochs": 2,
        "do_thing_once_per_server": lambda: done.append("once per server"),
        "do_thing_once": lambda: done.append("once"),
        "do_thing_on_index_zero": lambda: done.append("on zero"),
        "do_thing_on_index_zero_on_each_server": lambda: done.append("on zero of each server"),
    }


def play(*blocks: str) -> dict[str, Any]:
    """Run blocks one after the other in one namespace, as cells; returns what can travel."""
    names = stage()
    for block in blocks:
        exec(block, names)
    accelerator = names.get("accelerator")
    found: dict[str, Any] = {
        "done": names["done"],
        "predictions": names["metric"].predictions,
        "references": names["metric"].references,
    }
    if accelerator is not None:
        found["weights"] = [p.item() for p in accelerator.unwrap_model(names["model"]).parameters()]
        found["rank"] = accelerator.process_index
    return found


START = """
from nb_accelerate import Accelerator

accelerator = Accelerator(cpu=True)
"""

MAIN_USE = """
my_model, my_optimizer, my_training_dataloader = accelerator.prepare(
    my_model, my_optimizer, my_training_dataloader
)

for batch in my_training_dataloader:
    my_optimizer.zero_grad()
    inputs, targets = batch
    outputs = my_model(inputs)
    loss = my_loss_function(outputs, targets)
    # Just a small change for the backward instruction
    accelerator.backward(loss)
    my_optimizer.step()
"""

MAIN_USE_ON_A_DEVICE = """
# Use the device given by the `accelerator` object.
device = accelerator.device
my_model.to(device)
# Pass every important object (model, optimizer, dataloader) to `accelerator.prepare`
my_model, my_optimizer, my_training_dataloader = accelerator.prepare(
    my_model, my_optimizer, my_training_dataloader
)

for batch in my_training_dataloader:
    my_optimizer.zero_grad()
    inputs, targets = batch
    inputs = inputs.to(device)
    targets = targets.to(device)
    outputs = my_model(inputs)
    loss = my_loss_function(outputs, targets)
    # Just a small change for the backward instruction
    accelerator.backward(loss)
    my_optimizer.step()
"""


def _plain_training(ranks: int, epochs: int = 1) -> list[float]:
    """The same loop in plain PyTorch, over the batches of all ranks together. Rows are repeated to fill the last."""
    names = stage()
    model, optimizer = names["model"], names["optimizer"]
    x, y = names["dataloader"].dataset.tensors
    size = 4 * ranks
    order = [i % ROWS for i in range(-(-ROWS // size) * size)] if ranks > 1 else list(range(ROWS))
    for _ in range(epochs):
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return [p.item() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("block", [MAIN_USE, MAIN_USE_ON_A_DEVICE], ids=["placed by itself", "placed by hand"])
def test_the_main_use_trains_as_plain_pytorch_does(run_ranks, ranks: int, block: str):
    for found in run_ranks(play, START, block, world_size=ranks):
        assert found["weights"] == pytest.approx(_plain_training(ranks), abs=1e-6)


DEVICE_PLACEMENT = """
from nb_accelerate import Accelerator

accelerator = Accelerator(device_placement=False, cpu=True)
model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
done.append(str(next(iter(train_dataloader))[0].device))
"""

FOUR_OBJECTS = """
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, lr_scheduler
)
done.append(len(train_dataloader))
"""


def test_objects_are_prepared_and_loaders_get_shorter(run_ranks):
    assert [found["done"] for found in run_ranks(play, START, FOUR_OBJECTS, DEVICE_PLACEMENT)] == [[3, "cpu"]] * 2


EVALUATION = """
validation_dataloader = accelerator.prepare(validation_dataloader)

for inputs, targets in validation_dataloader:
    predictions = model(inputs)
    # Gather all predictions and targets
    all_predictions, all_targets = accelerator.gather_for_metrics((predictions, targets))
    # Example of use with a *Datasets.Metric*
    metric.add_batch(all_predictions, all_targets)
"""

EVALUATION_WITH_GATHER = """
validation_dataloader = accelerator.prepare(validation_dataloader)

for inputs, targets in validation_dataloader:
    predictions = model(inputs)
    # Gather all predictions and targets
    all_predictions = accelerator.gather(predictions)
    all_targets = accelerator.gather(targets)
    # Example of use with a `Datasets.Metric`
    metric.add_batch(all_predictions, all_targets)
"""


def test_evaluation_sees_every_row_once_and_gather_sees_the_copies_too(run_ranks):
    expected = stage()["dataloader"].dataset.tensors[1].tolist()
    for found in run_ranks(play, START, EVALUATION):
        assert found["references"] == expected
        assert len(found["predictions"]) == ROWS
    for found in run_ranks(play, START, EVALUATION_WITH_GATHER):
        assert found["references"][:ROWS] == expected
        assert len(found["predictions"]) == 24


NOTEBOOK = """
from nb_accelerate import notebook_launcher

notebook_launcher(training_function)
"""


def test_a_training_function_is_launched_from_a_notebook(tmp_path, monkeypatch, capfd):
    def training_function() -> None:
        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        (tmp_path / f"rank{accelerator.process_index}").write_text(str(accelerator.num_processes))

    exec(NOTEBOOK, {"training_function": training_function})
    ranks = len(list(tmp_path.iterdir()))
    assert ranks >= 1
    assert (tmp_path / "rank0").read_text() == str(ranks)


ONE_PROCESS = """
from nb_accelerate import DistributedType

if accelerator.distributed_type == DistributedType.TPU:
    # do something of static shape
    done.append("static")
else:
    # go crazy and be dynamic
    done.append("dynamic")

if accelerator.is_local_main_process:
    # Is executed once per server
    done.append("first here")

from tqdm.auto import tqdm

progress_bar = tqdm(range(args.max_train_steps), disable=not accelerator.is_local_main_process)
done.append("hidden" if progress_bar.disable else "shown")
progress_bar.close()

if accelerator.is_local_main_process:
    print("Accelerate is the best")

if accelerator.is_main_process:
    repo.push_to_hub()

@accelerator.on_local_main_process
def do_my_thing():
    "Something done once per server"
    do_thing_once_per_server()

do_my_thing()

@accelerator.on_main_process
def do_my_thing():
    "Something done once per server"
    do_thing_once()

do_my_thing()

@accelerator.on_process(process_index=0)
def do_my_thing():
    "Something done on process index 0"
    do_thing_on_index_zero()

do_my_thing()

@accelerator.on_local_process(local_process_idx=0)
def do_my_thing():
    "Something done on process index 0 on each server"
    do_thing_on_index_zero_on_each_server()

do_my_thing()

accelerator.wait_for_everyone()
"""


@pytest.mark.may_leave("threads")  # tqdm's monitor, which lives as long as the process
def test_some_statements_run_on_one_process_only(run_ranks):
    first, second = run_ranks(play, START, ONE_PROCESS)
    assert first["done"] == [
        "dynamic",
        "first here",
        "shown",
        "pushed",
        "once per server",
        "once",
        "on zero",
        "on zero of each server",
    ]
    assert second["done"] == ["dynamic", "hidden"]


ACCUMULATION = """
from nb_accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model, optimizer, training_dataloader = accelerator.prepare(model, optimizer, training_dataloader)

for input, label in training_dataloader:
    with accelerator.accumulate(model):
        predictions = model(input)
        loss = loss_function(predictions, label)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulation_adds_up_the_gradients_of_two_batches(run_ranks, ranks: int):
    names = stage()
    model, optimizer, scheduler = names["model"], names["optimizer"], names["scheduler"]
    x, y = names["dataloader"].dataset.tensors
    size = 4 * ranks
    order = [i % ROWS for i in range(24)] if ranks == 2 else list(range(ROWS))
    starts = range(0, len(order), size)
    for number, start in enumerate(starts, start=1):
        rows = order[start : start + size]
        (nn.functional.mse_loss(model(x[rows]), y[rows]) / 2).backward()
        if number % 2 == 0 or number == len(starts):
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()  # the tour's scheduler is not prepared, so it steps each time; after the optimizer
    for found in run_ranks(play, ACCUMULATION, world_size=ranks):
        assert found["weights"] == pytest.approx([p.item() for p in model.parameters()], abs=1e-6)


CLIPPING = """
from nb_accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
dataloader, model, optimizer, scheduler = accelerator.prepare(
dataloader, model, optimizer, scheduler
)

for input, target in dataloader:
     optimizer.zero_grad()
     output = model(input)
     loss = loss_func(output, target)
     accelerator.backward(loss)
     if accelerator.sync_gradients:
        accelerator.clip_grad_value_(model.parameters(), clip_value)
        accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        done.append(max(p.grad.norm().item() for p in model.parameters()) <= max_grad_norm + 1e-6)

     optimizer.step()
     if not accelerator.optimizer_step_was_skipped:
         lr_scheduler.step()
"""

PRECISION = """
from nb_accelerate import Accelerator

accelerator = Accelerator(mixed_precision="bf16", cpu=True)
inputs, target = next(iter(dataloader))
outputs = accelerator.prepare(model)(inputs)
done.append(str(outputs.dtype))

with accelerator.autocast():
    loss = complex_loss_function(outputs, target)
"""

UNWRAPPING = """
import os, tempfile

model = accelerator.prepare(model)
save_directory = tempfile.mkdtemp()
path_to_checkpoint = os.path.join(save_directory, "pytorch_model.bin")
torch.save({"weight": torch.tensor([[7.0]]), "bias": torch.tensor([5.0])}, path_to_checkpoint)

unwrapped_model = accelerator.unwrap_model(model)
path_to_checkpoint = os.path.join(save_directory,"pytorch_model.bin")
unwrapped_model.load_state_dict(torch.load(path_to_checkpoint))
import shutil; shutil.rmtree(save_directory)
"""


def test_gradients_are_clipped_and_weights_go_into_the_model_inside(run_ranks):
    for found in run_ranks(play, CLIPPING):
        assert found["done"] == [True] * 3
    for found in run_ranks(play, PRECISION):
        assert found["done"] == ["torch.float32"]
    for found in run_ranks(play, START, UNWRAPPING):
        assert found["weights"] == [7.0, 5.0]


SCRIPT = """
from nb_accelerate import Accelerator

def main():
    global accelerator, model
    accelerator = Accelerator(cpu=True)

    globals()["model"], optimizer_, training_dataloader_, scheduler_ = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )

    for batch in training_dataloader_:
        optimizer_.zero_grad()
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        accelerator.backward(loss)
        optimizer_.step()
        scheduler_.step()

main()
"""


def test_a_training_script_is_a_function(run_ranks):
    """Its scheduler advances once per process, which is what schedules of one process need."""
    for found in run_ranks(play, SCRIPT):
        names = stage()
        x, y = names["dataloader"].dataset.tensors
        order = [i % ROWS for i in range(24)]
        for start in range(0, 24, 8):
            rows = order[start : start + 8]
            names["optimizer"].zero_grad()
            nn.functional.mse_loss(names["model"](x[rows]), y[rows]).backward()
            names["optimizer"].step()
            for _ in range(2):
                names["scheduler"].step()
        assert found["weights"] == pytest.approx([p.item() for p in names["model"].parameters()], abs=1e-6)


TRANSFORMERS = """
from nb_accelerate import Accelerator
from transformers import AutoModelForSequenceClassification, BertConfig, get_scheduler
from torch.optim import AdamW
from tqdm.auto import tqdm

accelerator = Accelerator(cpu=True)

config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                    num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_config(config)
optimizer = AdamW(model.parameters(), lr=3e-3)
rows = [{"input_ids": torch.tensor([i % 30 + 1, 5, 9]), "labels": torch.tensor(i % 2)} for i in range(16)]
train_dataloader = torch.utils.data.DataLoader(rows, batch_size=4)
eval_dataloader = torch.utils.data.DataLoader(rows, batch_size=4)

train_dataloader, eval_dataloader, model, optimizer = accelerator.prepare(
    train_dataloader, eval_dataloader, model, optimizer
)

num_epochs = 3
num_training_steps = num_epochs * len(train_dataloader)
lr_scheduler = get_scheduler(
    "linear",
    optimizer=optimizer,
    num_warmup_steps=0,
    num_training_steps=num_training_steps
)

progress_bar = tqdm(range(num_training_steps), disable=not accelerator.is_local_main_process)

model.train()
for epoch in range(num_epochs):
    for batch in train_dataloader:
        outputs = model(**batch)
        loss = outputs.loss
        accelerator.backward(loss)

        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        progress_bar.update(1)

progress_bar.close()
done.append((num_training_steps, progress_bar.n, lr_scheduler.get_last_lr()))
"""

SAVE_PRETRAINED = """
from transformers import AutoModel

unwrapped_model = accelerator.unwrap_model(model)
unwrapped_model.save_pretrained(
    directory,
    is_main_process=accelerator.is_main_process,
    save_function=accelerator.save,
)
accelerator.wait_for_everyone()
model = AutoModel.from_pretrained(directory)
"""


@pytest.mark.slow
@pytest.mark.limit(180)
@pytest.mark.may_leave("threads")
def test_a_model_of_transformers_is_trained_saved_and_loaded(run_ranks, tmp_path):
    def run(directory: str) -> Any:
        names = stage() | {"directory": directory}
        exec(TRANSFORMERS, names)
        trained = names["accelerator"].unwrap_model(names["model"]).state_dict()
        exec(SAVE_PRETRAINED, names)
        loaded = names["model"].state_dict()
        same = all(
            torch.equal(value, trained[f"bert.{name}"]) for name, value in loaded.items() if "pooler" not in name
        )
        return names["done"], same

    first, second = run_ranks(run, str(tmp_path), deadline=150.0)
    assert first[1]
    assert second[1]
    assert first[0] == [(6, 6, [0.0])]
    assert second[0][0][0] == 6

"""The quick tours' main use, their script, and accumulation and clipping."""

from __future__ import annotations

import pytest
from torch import nn
from training.tours.stage import ROWS, START, play, stage

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


@pytest.mark.contract("training: DDP")
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

accelerator = Accelerator(mixed_precision="fp16", cpu=True)
model, dataloader = accelerator.prepare(model, dataloader)
inputs, target = next(iter(dataloader))
outputs = model(inputs)
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

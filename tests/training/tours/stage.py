"""What accelerate's quick tours take for granted, and how their blocks are run.

Each block stands as the tours print it, except that ``accelerate`` became ``nb_accelerate`` and that diffs show their
new side; what they leave to the reader (models, loaders, metrics) is supplied by `stage`. Left out is
what is typed into a shell.
"""

from __future__ import annotations

from typing import Any

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

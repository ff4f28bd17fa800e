"""A model of the notebook that ranks have trained, and that nobody gets back, is named once."""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nb_accelerate.notebook.worker.trained_models import TrainedModels

model = nn.Linear(2, 2)


def step(one: nn.Module) -> None:
    optimizer = torch.optim.Adam(one.parameters())
    one(torch.ones(1, 2)).sum().backward()
    optimizer.step()


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a rank, and forget its hooks afterwards."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_pre_hooks", collections.OrderedDict())


def dropped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    models = TrainedModels()
    models.begin()
    return models.dropped(function, args, kwargs, function(*args, **kwargs))


def of_a_notebook(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function the globals of a notebook that has a model with two names."""
    return type(function)(
        function.__code__, {"__name__": "__main__", "net": model, "same": model, "step": step, "torch": torch}
    )


@of_a_notebook
def trains_the_global():
    step(net)  # noqa: F821


@of_a_notebook
def uses_the_global():
    return net(torch.ones(1, 2))  # noqa: F821


@of_a_notebook
def returns_the_model():
    step(net)  # noqa: F821
    return {"net": net}  # noqa: F821


@of_a_notebook
def returns_a_copy_of_the_weights():
    step(net)  # noqa: F821
    return 0.5, {name: one.clone() for name, one in net.state_dict().items()}  # noqa: F821


@of_a_notebook
def returns_something_else():
    step(net)  # noqa: F821
    return torch.ones(2), [torch.ones(3)]


def trains_its_argument(one: nn.Module) -> None:
    step(one)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (functools.partial(dropped, trains_the_global), ["net"]),
        (functools.partial(dropped, functools.partial(trains_the_global)), ["net"]),
        (functools.partial(dropped, uses_the_global), []),
        (functools.partial(dropped, returns_the_model), []),
        (functools.partial(dropped, returns_a_copy_of_the_weights), []),
        (functools.partial(dropped, returns_something_else), ["net"]),
        (functools.partial(dropped, trains_its_argument, nn.Linear(2, 2)), ["one"]),
        (functools.partial(dropped, trains_its_argument, one=nn.Linear(2, 2)), ["one"]),
        (functools.partial(dropped, print, nn.Linear(2, 2)), []),
    ],
)
def test_a_model_that_was_trained_and_not_returned_is_found(call: Callable[[], object], names: list[str]) -> None:
    assert call() == names


def test_models_of_the_module_that_a_function_is_imported_from_are_none_of_the_notebook() -> None:
    assert dropped(lambda: step(model)) == []


NOTEBOOK = """
import torch
from torch import nn
from nb_accelerate import notebook_launcher
model = nn.Linear(2, 2)
weights = model.weight.clone()
def train():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
@pytest.mark.parametrize("method", ["forkserver", pytest.param("fork", marks=pytest.mark.slow)])
def test_the_notebook_is_told_once_that_its_own_model_is_unchanged(kernel, method: str) -> None:
    launch = f"notebook_launcher(train, num_processes=2, start_method={method!r})"
    kernel.run(NOTEBOOK)
    told = str(kernel.run(f"{launch}\nprint(torch.equal(model.weight, weights))"))
    assert "`model` was trained" in told
    assert "True" in told
    assert "was trained" not in str(kernel.run(launch))

"""Optimizers, schedulers, streams and trackers that do not look like those of most tutorials, on 1 and 2 ranks."""

from __future__ import annotations

import logging
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from nb_accelerate.base.config.accumulation import GradientAccumulationPlugin
from nb_accelerate.base.config.kwargs import DistributedDataParallelKwargs, GradScalerKwargs
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.tracking import GeneralTracker


def test_a_plateau_schedule_may_be_stepped_in_a_window():
    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for _ in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step(1.0)
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_an_optimizer_whose_zero_grad_takes_nothing_is_asked_for_nothing():
    class Own(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad(set_to_none=False)

    model = nn.Linear(1, 1)
    accelerator = Accelerator(cpu=True)
    model, optimizer, usual = accelerator.prepare(
        model, Own(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.zero_grad()
    assert model.weight.grad.tolist() == [[0.0]]
    with pytest.raises(TypeError, match="set_to_none"):
        optimizer.zero_grad(set_to_none=True)
    usual.zero_grad(False)
    assert model.weight.grad.tolist() == [[0.0]]
    usual.zero_grad()
    assert model.weight.grad is None


def temperature(ranks: int, rank: int, mixed_precision: str) -> tuple[list[float], list[str]]:
    """Train a model and a tensor of no model, as soft actor critic does; the second has an optimizer of its own."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("nb_accelerate").addHandler(handler)
    accelerator = Accelerator(
        cpu=True, mixed_precision=mixed_precision, kwargs_handlers=[GradScalerKwargs(init_scale=64.0)]
    )
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    alpha, idle = nn.Parameter(torch.full((2,), 1.0 + rank)), nn.Parameter(torch.ones(1))
    model, optimizer, other = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.125), torch.optim.SGD([alpha, idle], lr=0.125)
    )
    for step in range(3):
        mine = [float(step + row) for row in range(2) if ranks == 1 or row == rank]
        loss = sum(alpha.square().sum() / 2 + alpha.sum() * value + model(torch.ones(1, 2)).sum() for value in mine)
        if step == 1 and rank == 0:
            loss = loss + idle.sum()  # no gradient of it on the other rank
        accelerator.backward(loss / len(mine))
        norm = accelerator.clip_grad_norm_([alpha], 1.0).item() if step == 2 else 0.0
        optimizer.step()
        other.step()
        other.zero_grad()
        optimizer.zero_grad()
    logging.getLogger("nb_accelerate").removeHandler(handler)
    return [*alpha.tolist(), *idle.tolist(), norm], told


@pytest.mark.parametrize("mixed_precision", ["no", "fp16"])
def test_tensors_of_no_model_are_trained_as_one_process_trains_them(run_ranks, mixed_precision):
    def on_rank():
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else Accelerator().process_index
        return temperature(2, rank, mixed_precision)

    alone, told = temperature(1, 0, mixed_precision)
    assert told == []
    (first, said), (second, silent) = run_ranks(on_rank)
    assert first == second
    assert first[2] == alone[2] == 1.0 - 0.125 / 2
    # Ranks begin with the value of rank 0 from the first step on; the gradient of that step was that of their own.
    assert first[0] == pytest.approx(expected_alpha(), abs=1e-6)
    assert len(said) == 1
    assert re.search("2 tensors .*SGD", said[0])
    assert silent == []


def expected_alpha() -> float:
    """What alpha becomes, by plain arithmetic: the gradient of a rank is its alpha plus its value."""
    alphas = [1.0, 2.0]
    gradient = sum(alpha + row for alpha, row in zip(alphas, (0.0, 1.0), strict=True)) / 2
    alpha = 1.0 - 0.125 * gradient
    alpha -= 0.125 * (alpha + 1.5)
    gradient = alpha + 2.5
    return alpha - 0.125 * gradient * min(1.0, 1.0 / (2 * gradient**2) ** 0.5)


def test_an_image_is_optimised_with_closures_and_without_any_model(run_ranks):
    def optimise():
        accelerator = Accelerator(cpu=True)
        image = nn.Parameter(torch.zeros(3))
        optimizer = accelerator.prepare(torch.optim.LBFGS([image], lr=0.5, max_iter=8))
        target = torch.arange(3.0) + 2 * accelerator.process_index

        def closure():
            optimizer.zero_grad()
            loss = (image - target).square().sum()
            accelerator.backward(loss)
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return image.tolist()

    first, second = run_ranks(optimise)
    assert first == second
    assert first == pytest.approx([1.0, 2.0, 3.0], abs=1e-3)


def test_layers_that_are_made_trainable_later_are_averaged_too(run_ranks):
    def train():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 2) * (1 + accelerator.process_index)).sum())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.unwrap_model(model)[0].requires_grad_(True)
        return [parameter.tolist() for parameter in accelerator.unwrap_model(model).parameters()]

    first, second = run_ranks(train)
    assert first == second


class Stream(IterableDataset):
    """Eleven rows, and something to say about their number."""

    def __init__(self, said):
        self.said = said

    def __len__(self):
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    def __iter__(self):
        return iter(range(11))


def read_streams():
    found = []
    for said in (3, RuntimeError("a stream"), AttributeError("rows"), ValueError("no"), KeyError("length")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator = Accelerator(cpu=True)
            _, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(Stream(said), batch_size=2))
            rows = [row for batch in loader for row in accelerator.gather_for_metrics(batch).tolist()]
        found.append((rows, [str(warning.message) for warning in caught if "IterableDataset" in str(warning.message)]))
    return found


def test_streams_may_say_anything_about_their_length(run_ranks):
    for found in [read_streams(), *run_ranks(read_streams)]:
        assert found == [(list(range(11)), [])] * 5


def test_a_tracker_of_ones_own_records_on_the_main_process(run_ranks):
    class Own(GeneralTracker):
        name = "own"
        requires_logging_directory = False
        tracker = None

        def __init__(self):
            super().__init__()
            self.calls = []

        def start(self):
            self.calls.append("start")

        def store_init_configuration(self, values):
            self.calls.append(values)

        def log(self, values, step=None, **kwargs):
            self.calls.append((values, step, kwargs))

        def finish(self):
            self.calls.append("finish")

    class Everywhere(Own):
        name = "everywhere"
        main_process_only = False

    def record():
        trackers = [Own(), Everywhere()]
        accelerator = Accelerator(cpu=True, log_with=trackers)
        accelerator.init_trackers("run", config={"lr": 0.1})
        accelerator.log({"loss": 1.0}, step=3, log_kwargs={"own": {"commit": True}})
        accelerator.end_training()
        return [tracker.calls for tracker in trackers]

    everywhere = ["start", {"lr": 0.1}, ({"loss": 1.0}, 3, {}), "finish"]
    main = [*everywhere[:2], ({"loss": 1.0}, 3, {"commit": True}), "finish"]
    assert run_ranks(record) == [[main, everywhere], [[], everywhere]]


def raised(call) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_errors_of_wrapped_models_say_what_to_write(run_ranks):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)
            self.in_features = 2

        def forward(self, inputs):
            return self.used(inputs)

    def train():
        found = []
        for handlers in ([], [DistributedDataParallelKwargs(find_unused_parameters=True)]):
            accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
            model = Half()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            before = accelerator.unwrap_model(model).used.weight.detach().clone()
            accelerator.backward(model(torch.ones(1, 2)).sum())
            found.append(raised(optimizer.step))
            moved = not torch.equal(before, accelerator.unwrap_model(model).used.weight)
            found.append((moved, raised(lambda asked=model: asked.in_features), hasattr(model, "nowhere")))
        return found

    for refused, attribute, silent, _ in run_ranks(train):
        assert refused[0] == ConfigError.__name__
        assert "backward: unused.weight, unused.bias" in refused[1]
        assert "DistributedDataParallelKwargs(find_unused_parameters=True)" in refused[1]
        moved, (kind, text), nowhere = attribute
        assert (moved, kind, nowhere) == (False, "AttributeError", False)
        assert "Write accelerator.unwrap_model(model).in_features." in text
        assert silent == ("", "")


def test_a_static_graph_accumulates_as_any_other(run_ranks):
    def train(static):
        handler = DistributedDataParallelKwargs(static_graph=static)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[handler])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        refused = raised(lambda: accelerator.no_sync(model))
        for number in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2) * (number + accelerator.process_index)).sum())
                optimizer.step()
                optimizer.zero_grad()
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
        return [parameter.detach() for parameter in accelerator.unwrap_model(model).parameters()], refused[0]

    (usual, _), *_ = run_ranks(train, False)
    for weights, refused in run_ranks(train, True):
        assert refused == ConfigError.__name__
        for one, other in zip(weights, usual, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)

"""Random fp16 programs, run by us and by a plain loop with torch's `GradScaler`.

A program is a list of operations; an iteration ends where a loss is scaled after something was used or dropped. That is
where the plain loop calls ``scaler.update()``, as torch's documentation says: once, when no scaled gradients are left.
"""

from __future__ import annotations

import contextlib
import gc
import random
from dataclasses import dataclass

import torch
from torch import nn

from nb_accelerate.base.config.kwargs import GradScalerKwargs
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.process import context

MODELS = 2


@dataclass(frozen=True)
class Op:
    """One operation on one of the models."""

    name: str
    model: int = 0
    value: float = 1.0


class Interruption(Exception):
    """What a user's code raises between two operations."""


def make_program(seed: int) -> tuple[dict[str, float], list[Op]]:
    """A legal program: what torch's scaler refuses, or computes wrongly, is not in it."""
    rng = random.Random(seed)
    options = {
        "init_scale": rng.choice([2.0**8, 2.0**15, 1000.0, 3.0]),
        "growth_interval": rng.choice([1, 2, 3, 5]),
        "growth_factor": rng.choice([2.0, 1.5]),
        "backoff_factor": rng.choice([0.5, 0.25]),
    }
    ops: list[Op] = []
    for _ in range(rng.randint(3, 10)):
        used = [model for model in range(MODELS) if rng.random() < 0.8] or [0]
        for _ in range(rng.randint(1, 3)):
            value = rng.choice([1.0, 0.5, 3.0, -2.0, float("inf"), float("nan")] if rng.random() < 0.3 else [1.0, 0.1])
            ops += [Op("backward", model, value) for model in used]
        if rng.random() < 0.2:
            ops.append(Op("backward_both", 0, 0.5))
            used = list(range(MODELS))
        rng.shuffle(used)
        for model in used:
            for _ in range(rng.choice([0, 0, 1, 2])):
                ops.append(Op(rng.choice(["clip", "clip_value", "unscale"]), model, rng.choice([0.1, 1.0])))
            if rng.random() < 0.2:
                ops.append(Op("exception", model))
            if rng.random() < 0.75:
                ops.append(Op("step", model))
        drop = rng.choice(["zero_grad", "zero_grad", "model_zero_grad", "to_none", "in_place"])
        ops += [Op(drop, model) for model in range(MODELS)]
        if rng.random() < 0.1:
            ops.append(Op("free_memory", rng.randrange(MODELS)))
        if rng.random() < 0.1:
            ops.append(Op("new_optimizer_beside", rng.randrange(MODELS)))
        if rng.random() < 0.1:
            ops.append(Op("new_accelerator"))
        if rng.random() < 0.1:
            ops.append(Op("save_scale"))
    return options, ops


class Program:
    """Models, their optimizers, and what was measured on the way."""

    def __init__(self, options: dict[str, float]) -> None:
        torch.manual_seed(0)
        self.options = options
        self.models = [nn.Linear(3, 2) for _ in range(MODELS)]
        self.optimizers = [self.new_optimizer(model) for model in range(MODELS)]
        self.seen: list[list[float]] = []
        self.batch = 0

    def new_optimizer(self, model: int) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.models[model].parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: int, factor: float) -> torch.Tensor:
        self.batch += 1
        inputs = torch.linspace(-1, 1, 12).reshape(4, 3) * (1 + self.batch % 5)
        inputs = inputs.to(self.models[model].weight.device)
        return self.models[model](inputs).square().mean() * factor

    def run(self, ops: list[Op]) -> list[list[float]]:
        for op in ops:
            with contextlib.suppress(Interruption):
                getattr(self, op.name)(op)
            self.note([p.grad for p in self.models[op.model].parameters()] if op.name in NOTED else [])
            if op.name in {"step", "exception"}:
                self.note(list(self.models[op.model].parameters()))
        return self.seen

    def note(self, tensors: list[torch.Tensor | None]) -> None:
        self.seen.append(
            [v for t in tensors if t is not None for v in t.detach().nan_to_num(nan=7e7).flatten().tolist()]
        )

    def has_gradients(self, model: int) -> bool:
        return any(p.grad is not None for p in self.models[model].parameters())

    def model_zero_grad(self, op: Op) -> None:
        self.models[op.model].zero_grad()

    def in_place(self, op: Op) -> None:
        self.models[op.model].zero_grad(set_to_none=False)

    def to_none(self, op: Op) -> None:
        for parameter in self.models[op.model].parameters():
            parameter.grad = None

    def zero_grad(self, op: Op) -> None:
        self.optimizers[op.model].zero_grad()


NOTED = {"clip", "clip_value", "unscale"}


class Plain(Program):
    """What a careful user of torch's scaler writes."""

    def __init__(self, options: dict[str, float]) -> None:
        super().__init__(options)
        self.scaler = torch.amp.GradScaler("cpu", **options)
        self.unscaled = [False] * MODELS
        self.recorded = False

    def begin(self) -> None:
        if self.recorded:
            self.scaler.update()
            self.recorded = False
            self.unscaled = [False] * MODELS

    def backward(self, op: Op) -> None:
        self.begin()
        self.scaler.scale(self.loss(op.model, op.value)).backward()

    def backward_both(self, op: Op) -> None:
        self.begin()
        self.scaler.scale(self.loss(0, op.value) + self.loss(1, op.value)).backward()

    def unscale(self, op: Op) -> None:
        if not self.unscaled[op.model] and self.has_gradients(op.model):
            self.scaler.unscale_(self.optimizers[op.model])
            self.unscaled[op.model] = self.recorded = True

    def clip(self, op: Op) -> None:
        self.unscale(op)
        norm = nn.utils.clip_grad_norm_(self.models[op.model].parameters(), op.value)
        self.note([norm])

    def clip_value(self, op: Op) -> None:
        self.unscale(op)
        nn.utils.clip_grad_value_(self.models[op.model].parameters(), op.value)

    def step(self, op: Op) -> None:
        self.scaler.step(self.optimizers[op.model])
        self.recorded = True

    def exception(self, op: Op) -> None:
        self.clip(Op("clip", op.model, 0.5))
        raise Interruption

    def free_memory(self, op: Op) -> None:
        self.optimizers[op.model] = self.new_optimizer(op.model)

    def new_optimizer_beside(self, op: Op) -> None:
        self.optimizers[op.model] = self.new_optimizer(op.model)

    def new_accelerator(self, op: Op) -> None:
        pass

    def save_scale(self, op: Op) -> None:
        if self.recorded:
            self.scaler.update()
            self.recorded = False
            self.unscaled = [False] * MODELS
        state = self.scaler.state_dict()
        self.seen.append([state["scale"], state["_growth_tracker"]])


class Ours(Program):
    """The same with an `Accelerator`, which keeps the account."""

    def __init__(self, options: dict[str, float]) -> None:
        super().__init__(options)
        context.reset()
        self.accelerator = self.make_accelerator()
        for model in self.models:
            model.to(self.accelerator.device)
        # Under autocast the numbers would be those of float16; the scaler is what is compared.
        prepared = self.accelerator.prepare(*self.optimizers)
        self.optimizers = list(prepared)
        self.kept: list[torch.optim.Optimizer] = []

    def make_accelerator(self) -> Accelerator:
        return Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**self.options)])

    def backward(self, op: Op) -> None:
        self.accelerator.backward(self.loss(op.model, op.value))

    def backward_both(self, op: Op) -> None:
        self.accelerator.backward(self.loss(0, op.value) + self.loss(1, op.value))

    def unscale(self, op: Op) -> None:
        self.accelerator.unscale_gradients(self.optimizers[op.model])

    def clip(self, op: Op) -> None:
        self.note([self.accelerator.clip_grad_norm_(self.models[op.model].parameters(), op.value)])

    def clip_value(self, op: Op) -> None:
        self.accelerator.clip_grad_value_(self.models[op.model].parameters(), op.value)

    def step(self, op: Op) -> None:
        self.optimizers[op.model].step()

    def exception(self, op: Op) -> None:
        self.clip(Op("clip", op.model, 0.5))
        raise Interruption

    def free_memory(self, op: Op) -> None:
        self.accelerator.free_memory()
        self.optimizers[op.model] = None
        gc.collect()
        # One that is known goes first: it goes on with its scale.
        known = [one for one in self.optimizers if one is not None]
        self.accelerator.prepare(*known)
        self.optimizers[op.model] = self.accelerator.prepare(self.new_optimizer(op.model))

    def new_optimizer_beside(self, op: Op) -> None:
        self.kept.append(self.optimizers[op.model])  # as a scheduler keeps it when a cell runs again
        self.accelerator.prepare(*self.optimizers)  # they are known, so it goes on with its scale
        self.optimizers[op.model] = self.accelerator.prepare(self.new_optimizer(op.model))

    def new_accelerator(self, op: Op) -> None:
        self.accelerator = Accelerator(cpu=True)  # as an evaluation makes it, or a cell that runs again

    def save_scale(self, op: Op) -> None:
        state = self.accelerator.scaler.state_dict()
        self.seen.append([state["scale"], state["_growth_tracker"]])


def compare(seed: int) -> None:
    """Run one program both ways.

    Raises:
        AssertionError: they differ in any bit; says the seed and the operation.
    """
    options, ops = make_program(seed)
    theirs, ours = Plain(options), Ours(options)
    for number, op in enumerate(ops):
        start = len(theirs.seen), len(ours.seen)
        theirs.run([op])
        ours.run([op])
        assert ours.seen[start[1] :] == theirs.seen[start[0] :], f"seed {seed}, operation {number}: {op} of {ops}"

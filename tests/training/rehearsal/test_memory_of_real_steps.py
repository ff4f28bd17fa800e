"""The memory of a rehearsed rank is the memory of a real one, and the bytes that it sends are those on the wire."""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from training.rehearsal.rehearsing import rehearsed

from nb_accelerate import Accelerator, FullyShardedDataParallelPlugin, notebook_launcher
from nb_accelerate.base.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


class Loss(nn.Module):
    """A network that computes its loss itself."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.network(rows).square().mean()
        return result


class LanguageModel(nn.Module):
    """A GPT-2 that computes its loss; its embedding is tied to its output."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        none = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        self.network = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=4000, **none))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.network(input_ids=rows, labels=rows, use_cache=False).loss
        return result


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Sequential(nn.Linear(128, 1024), nn.GELU(), nn.Linear(1024, 128)) for _ in range(6)]
        self.blocks = nn.ModuleList(wide)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = checkpoint(block, rows, use_reentrant=False)
        return rows.square().mean()


def perceptron() -> nn.Module:
    return Loss(nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)))


def convolutions() -> nn.Module:
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 24 * 24, 10)]
    return Loss(nn.Sequential(*first, *second))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "perceptron": (perceptron, lambda: torch.randn(512, 512)),
    "checkpointing, few rows": (Checkpointed, lambda: torch.randn(4, 128)),  # most is held in the optimizer's step
    "GPT-2 of 2 layers, tied": (LanguageModel, lambda: torch.randint(4000, (4, 128))),
    "CNN": (convolutions, lambda: torch.randn(16, 3, 48, 48)),
    "checkpointing": (Checkpointed, lambda: torch.randn(512, 128)),
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that takes steps for many weights at once, as GPUs do by default, and rehearsals too."""
    is_real = torch.autograd._profiler_enabled()
    return torch.optim.AdamW(model.parameters(), foreach=True if is_real else None)


def averaging_nothing(_, bucket):  # type: ignore[no-untyped-def] # torch reads annotations, here texts
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(bucket.buffer())
    return done


def prepared(accelerator: Accelerator, *objects: Any) -> tuple[Any, ...]:
    """Prepare models and optimizers; in the group of `peak_of_rank_0`, gradients have to be left as they are."""
    prepared: tuple[Any, ...] = accelerator.prepare(*objects)
    for each in prepared:
        if torch.autograd._profiler_enabled() and isinstance(each, DistributedDataParallel):
            each.register_comm_hook(None, averaging_nothing)
    return prepared


def train(name: str, plugin: FullyShardedDataParallelPlugin | None = None) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    make_model, make_rows = MODELS[name]
    model: Any = make_model()
    rows = make_rows()
    # GPUs take steps for many weights at once by default, CPUs do not.
    optimizer: Any = adamw(model)
    model, optimizer = prepared(accelerator, model, optimizer)
    for _ in range(int(os.environ.get("STEPS", "3"))):
        loss = model(rows)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def train_adversaries() -> None:
    accelerator = Accelerator(cpu=True)
    generator: Any = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, 512))
    judge: Any = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1))
    of_generator: Any = adamw(generator)
    of_judge: Any = adamw(judge)
    noise, real = torch.randn(512, 32), torch.randn(512, 512)
    generator, judge, of_generator, of_judge = prepared(accelerator, generator, judge, of_generator, of_judge)
    for _ in range(3):
        made = generator(noise)
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()
        accelerator.backward(loss)
        of_judge.step()
        of_judge.zero_grad()
        accelerator.backward(F.softplus(-judge(made)).mean())
        of_generator.step()
        of_generator.zero_grad()


def peak_of(function: Callable[[], None]) -> int:
    """Return the greatest number of bytes that torch's allocator gave while a function ran, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    peak, events = 0, list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    for event in events:
        events.extend(event.children)
        if event.typed[0] == torch._C._profiler._EventType.Allocation:
            peak = max(peak, event.typed[1].total_allocated)
    return peak


def peak_of_rank_0(function: Callable[[], None]) -> int:
    """Do so as rank 0 of 2 that exchange nothing.

    Over gloo it is up to a third more, each time another number: its threads let buffers go at moments of their own.
    """
    os.environ.update(Topology.of_machine(0, 2).as_variables())
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return peak_of(function)


def forked(measure: Callable[[Callable[[], None]], int], function: Callable[[], None]) -> int:
    """Measure in a process of its own, without threads that look at frames, which keep alive what these hold."""
    torch.set_num_threads(1)  # threads of more would not be there after a fork
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
        return executor.submit(measure, function).result()


@pytest.fixture(autouse=True, scope="module")
def _imported_once() -> None:
    """Import here what each process that is forked would import itself."""
    importlib.import_module("torch._dynamo")
    importlib.import_module("transformers.models.gpt2.modeling_gpt2")


RUNS = {**{name: functools.partial(train, name) for name in MODELS}, "GAN": train_adversaries}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_live_bytes_are_those_of_a_real_step(name: str, ranks: int, tmp_path: Path):
    (trace,) = rehearsed(RUNS[name], folder=tmp_path, world_size=ranks, ranks=(0,)).traces
    real = forked(peak_of if ranks == 1 else peak_of_rank_0, RUNS[name])
    assert max(map(sum, trace.memory)) == pytest.approx(real, rel=0.003)


def shard(name: str, *, reshards: bool) -> None:
    by_class, least = ("transformer_based_wrap", None) if "GPT" in name else ("size_based_wrap", 2 * 10**5)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshards,
        auto_wrap_policy=by_class,
        transformer_cls_names_to_wrap=["GPT2Block"] if "GPT" in name else None,
        min_num_params=least,
    )
    train(name, plugin)


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("name", ["perceptron", "GPT-2 of 2 layers, tied", "checkpointing"])
def test_live_bytes_of_shards_are_those_of_a_real_step(name: str, reshards: bool, tmp_path: Path):
    run = functools.partial(shard, name, reshards=reshards)
    (trace,) = rehearsed(run, folder=tmp_path, world_size=2, ranks=(0,)).traces
    real = forked(peak_of_rank_0, run)
    assert max(map(sum, trace.memory)) == pytest.approx(real, rel=0.003)


SENDING = {
    "averaged": functools.partial(train, "checkpointing, few rows"),
    "shards": functools.partial(shard, "checkpointing, few rows", reshards=True),
}


def sent_in_a_step() -> dict[str, float]:
    """Return the bytes that each rank sends in a step over the network of this process, by the run and the ranks."""
    found = {}
    for name, run in SENDING.items():
        for ranks in (2, 4):
            sent = []
            for os.environ["STEPS"] in ("2", "6"):
                before = _sent_bytes()
                notebook_launcher(run, num_processes=ranks, start_method="fork", progress="off")
                sent.append((_sent_bytes() - before) / ranks)
            found[f"{name}, {ranks}"] = (sent[1] - sent[0]) / 4
    return found


def _sent_bytes() -> int:
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.lstrip().startswith("lo:")).split()[9])


@pytest.fixture(scope="module")
def on_wire(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """What was sent in a network that nothing else uses."""
    script = tmp_path_factory.mktemp("sent") / "sent.py"
    # The first line is what each rank would import itself.
    script.write_text(
        "import json, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor\n"
        "from training.rehearsal.test_memory_of_real_steps import sent_in_a_step\n"
        "print(json.dumps(sent_in_a_step()))\n",
        encoding="utf-8",
    )
    command = ["unshare", "--net", "sh", "-c", f"ip link set lo up && exec {sys.executable} {script}"]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="makes a network of its own")
@pytest.mark.limit(180)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SENDING)
def test_bytes_that_are_sent_are_those_on_the_wire(
    name: str, ranks: int, on_wire: dict[str, float], tmp_path: Path
) -> None:
    (trace,) = rehearsed(SENDING[name], folder=tmp_path, world_size=ranks, ranks=(0,)).traces
    # gloo sends as much for a reduce_scatter as for an all_reduce.
    sent = sum(size * (2 if operation == "reduce_scatter" else 1) for operation, size in trace.sent.items())
    assert sent == pytest.approx(on_wire[f"{name}, {ranks}"], rel=0.01)

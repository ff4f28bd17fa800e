"""What a rehearsal walks through, writes down and leaves alone."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training.rehearsal.rehearsing import rehearsed

from nb_accelerate import Accelerator, ConfigError, DeepSpeedPlugin, FullyShardedDataParallelPlugin, rehearse
from nb_accelerate.training.rehearsal.memory import Mark, Memory
from nb_accelerate.training.rehearsal.report import Rehearsal, Trace


class Count(nn.Module):
    """A layer that counts its forwards."""

    computed = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        Count.computed += 1
        return self.layer(x)


def train(
    epochs: int = 3, *, accelerator: Accelerator | None = None, rows: int = 128, model: nn.Module | None = None
) -> tuple[Accelerator, Any]:
    accelerator = accelerator or Accelerator(cpu=True)
    model = Count() if model is None else model
    loader: Any = DataLoader(TensorDataset(torch.ones(rows, 4)), batch_size=4, shuffle=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=epochs * len(loader))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(epochs):
        for (x,) in loader:
            loss = F.mse_loss(model(x), x[:, :1])
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 1.0)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return accelerator, model


def count_forwards() -> None:
    train()
    if Count.computed != 2:
        raise ValueError(f"{Count.computed} forwards were computed")


def test_two_steps_are_computed_and_all_are_walked_through(tmp_path: Path):
    found = rehearsed(count_forwards, folder=tmp_path)
    assert found.findings == []
    first, last = found.traces
    assert [len(one.rows) for one in first.trained] == [8, 8, 8]
    assert len(first.rates[0]) == len(last.rates[0]) == 24
    assert first.rates[0][0] == 0.1 > first.rates[0][-1]
    assert found.table.rows == [("0, 3", "3", "8", "32", "", "24", "16", "0.1 > 0.0138")]


def accumulate_in_16_bits(precision: str) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=3)
    loader: Any = DataLoader(TensorDataset(torch.ones(128, 4)), batch_size=4)
    model: Any = nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(x), x[:, :1]))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_window_counts_as_one_step_with_all_its_rows(precision: str, tmp_path: Path):
    found = rehearsed(accumulate_in_16_bits, precision, folder=tmp_path)
    assert found.findings == []
    assert found.traces[0].step_rows == [12, 12, 8]
    exchanges = [exchange.what for exchange in found.traces[0].exchanges]
    assert sum("gradients" in what for what in exchanges) == 3


def train_two_networks() -> None:
    accelerator = Accelerator(cpu=True)
    makes: Any = nn.Sequential(nn.Linear(2, 4))
    judges: Any = nn.Linear(4, 1)
    first: Any = torch.optim.Adam(judges.parameters())
    second: Any = torch.optim.Adam(makes.parameters())
    loader: Any = DataLoader(TensorDataset(torch.ones(128, 4)), batch_size=4)
    makes, judges, first, second, loader = accelerator.prepare(makes, judges, first, second, loader)
    for (x,) in loader:
        made = makes(torch.randn(len(x), 2, device=accelerator.device))
        accelerator.backward(judges(x).mean() - judges(made.detach()).mean())
        first.step()
        first.zero_grad()
        accelerator.backward(judges(made).mean())
        second.step()
        second.zero_grad()


def test_models_that_train_each_other_exchange_as_in_a_run(tmp_path: Path):
    found = rehearsed(train_two_networks, folder=tmp_path)
    judged, made = 4 * (4 + 1), 4 * (2 * 4 + 4)  # bytes of gradients, of the first twice in a step
    assert found.traces[0].sent["all_reduce"] == pytest.approx(2 * 3 / 4 * (2 * judged + made))
    assert found.findings == []
    exchanges = [exchange.what for exchange in found.traces[0].exchanges if "gradients" in exchange.what]
    first, computed, walked, *_ = [at for at, what in enumerate(exchanges) if what == "the gradients of Sequential"]
    assert exchanges[first + 1 : computed] == ["the gradients of Linear"] * 2
    assert exchanges[first + 1 : computed + 1] == exchanges[computed + 1 : walked + 1]


def train_wide(rows: int, zero_stage: int | None = None) -> None:
    plugin = None if zero_stage is None else DeepSpeedPlugin(zero_stage=zero_stage)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin)
    layers = [nn.Linear(64, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 64, bias=False)]
    model = nn.Sequential(*layers)
    loader = torch.utils.data.DataLoader(torch.ones(40 * rows, 64), batch_size=rows)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("ranks", "rows"), [(1, 1024), (4, 512)])
def test_memory_is_what_stays_and_what_backward_holds_at_most(ranks: int, rows: int, tmp_path: Path):
    weights = 2 * 64 * 1024 * 4
    found = rehearsed(train_wide, rows, folder=tmp_path, world_size=ranks, ranks=(0,))
    (trace,) = found.traces
    peak = max(trace.memory, key=sum)
    buckets = weights if ranks > 1 else 0
    assert peak[:2] == (weights, weights // 2)  # the first layer has no gradient yet
    assert peak.buckets == buckets
    assert peak.optimizer == pytest.approx(2 * weights, abs=1024)
    # At the backward of ReLU: its output, which was kept, the gradients of both its sides, and the batch.
    hidden = rows * 1024 * 4
    assert 3 * hidden < peak.of_rows < 3.2 * hidden
    assert "backward of step 2" in found.memory
    assert found.memory in repr(found)
    assert found.sent.partition(": ")[2] == ("" if ranks == 1 else "786.4 kB by all_reduce")
    # Products of both layers: forward, gradients of weights, and the gradient of what the second is given.
    assert trace.computed == (0, (2 + 2 + 1) * 2 * rows * 64 * 1024)
    assert found.ok


@pytest.mark.parametrize(("stage", "shared"), [(1, ("optimizer",)), (3, ("weights", "gradients", "optimizer"))])
def test_what_deepspeed_shards_is_counted_by_formulas(stage: int, shared: tuple[str, ...], tmp_path: Path):
    found = rehearsed(train_wide, 512, stage, folder=tmp_path, ranks=(0,))
    weights = 2 * 64 * 1024 * 4
    held = dict.fromkeys(("weights", "gradients"), weights) | {"optimizer": 3 * weights + 1024}
    peak = max(found.traces[0].memory, key=sum)._asdict()
    for name, size in held.items():
        assert peak[name] == (size // 4 if name in shared else size)
    assert peak["buckets"] == 0
    assert [finding.kind for finding in found.findings] == ["note"]
    assert found.sent == ""  # it exchanges something else


@pytest.mark.slow
def test_the_memory_of_larger_batches_follows_from_that_of_smaller_ones(tmp_path: Path):
    found, larger = (rehearsed(train_wide, rows, folder=tmp_path, ranks=(0,), capacity=10**10) for rows in (1600, 6400))
    ((half, of_half), (quarter, _)) = found.traces[0].smaller
    assert (half, quarter) == (800, 400)
    most, of_larger = (max(map(sum, each.traces[0].memory)) for each in (found, larger))
    per_row = (most - of_half) / (1600 - half)
    assert of_larger == pytest.approx(most + 4800 * per_row, rel=0.002)
    assert "costs at most" not in found.memory
    assert len(found.traces) == 1


def test_computing_is_compared_with_links():
    trace = Trace(0, sent={"all_reduce": 1e9}, computed=(65e12, 8.1e12), ended=True)  # in a second each
    found = Rehearsal((trace,), 2, 60.0, "T4", 10**10, (65e12, 8.1e12))
    assert "computes 73.1 TFLOP" in found.sent
    assert "sending at 4.0 Gbit/s" in found.sent


@pytest.mark.parametrize(
    ("capacity", "verdict"), [(10**7, "does not fit"), (2 * 10**9, "it fits"), (11 * 10**8, "close")]
)
def test_whether_it_fits_is_said_with_a_margin(capacity: int, verdict: str):
    memory = Memory(weights=10**6, gradients=10**6, optimizer=2 * 10**6, activations=10**6)
    trace = Trace(0, memory=[memory], marks=[Mark(0, "the backward", 2, 4)], ended=True)
    found = Rehearsal((trace,), 1, 60.0, "T4", capacity)
    assert verdict in found.memory
    assert found.ok is (verdict != "does not fit")
    assert [finding.kind for finding in found.findings] == ([] if found.ok else ["memory"])


def test_a_rate_that_rises_again_is_named():
    once, again = [0.0, 1.0, 0.5, 0.1], [1.0, 0.6, 0.4, 0.2, 0.9, 0.8]
    found = Rehearsal((Trace(0, rates=[once, again], ended=True),), 1, 60.0).findings
    assert [finding.kind for finding in found] == ["rate"]
    assert re.search(r"optimizer 2\b.*step 5\b.*0\.2 .*0\.9", found[0].text)


def test_the_rows_that_have_room_are_counted():
    memory = Memory(weights=10**9, gradients=10**9, optimizer=2 * 10**9, activations=10**9)
    step = memory._replace(activations=0, temporaries=3 * 10**9)  # as many, whatever the rows
    marks = [Mark(0, "the backward", 2, 4), Mark(1, "the optimizer's step", 2, 4)]
    trace = Trace(0, memory=[memory, step], marks=marks, ended=True)
    # (0.9 * 16 - 1) / 1.15 - 4 = 7.65 GB, and 0.25 GB a row
    assert "up to 30 rows" in Rehearsal((trace,), 1, 60.0, "T4", 16 * 10**9).memory
    assert "and no batch fits" in Rehearsal((trace,), 1, 60.0, "T4", 5 * 10**9).memory
    assert "and no batch fits" in Rehearsal((trace,), 1, 60.0, "T4", 9 * 10**9).memory  # the steps do not


def shard() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    accelerator, _ = train(accelerator=Accelerator(cpu=True, fsdp_plugin=plugin), model=model)
    accelerator.save_state("shards")


@pytest.mark.slow
def test_sharded_models_are_rehearsed(tmp_path: Path):
    found = rehearsed(shard, folder=tmp_path)
    assert found.findings == []
    whats = [exchange.what for exchange in found.traces[0].exchanges]
    assert whats.count("the shards of Sequential") == whats.count("the gradients of Sequential") == 24


def shard_wide() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10**6)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 1024, bias=False))
    loader = torch.utils.data.DataLoader(torch.ones(80, 1024), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()


def test_sharded_models_hold_their_shards_and_the_layers_that_are_gathered(tmp_path: Path):
    found = rehearsed(shard_wide, folder=tmp_path)
    layer = 1024 * 2048 * 4
    for trace in found.traces:
        assert {held.weights for held in trace.memory[-10:]} == {2 * layer // 4}
        assert max(held.optimizer for held in trace.memory) == pytest.approx(layer, abs=2048)
        assert layer < max(held.gathered for held in trace.memory) < 3.1 * layer
        assert trace.sent["all_gather"] == pytest.approx(2 * 2 * layer * 3 / 4)  # in forward and in backward
        assert trace.sent["reduce_scatter"] == pytest.approx(2 * layer * 3 / 4)


def train_what_is_too_large(*, sharded: bool) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10**7)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin if sharded else None)
    with torch.device("meta"):
        model: Any = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))
    model = model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    loader: Any = DataLoader(TensorDataset(torch.ones(64, 1)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for (x,) in loader:
        loss = model(x.expand(-1, 4096 * 2048).reshape(-1, 4096)).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if used > 2 * 10**9 or loss.item() != 1:
        raise ValueError(f"{used} bytes were used, and the loss was {loss}")


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_large_tensors_are_neither_computed_nor_in_memory(sharded: bool, tmp_path: Path):
    found = rehearsed(functools.partial(train_what_is_too_large, sharded=sharded), folder=tmp_path)
    assert found.ok, found
    weights = 8 * (4096 * 4096 + 4096) * 4 // (4 if sharded else 1)
    for trace in found.traces:
        peak = max(trace.memory, key=sum)
        assert peak.weights == weights
        assert peak.optimizer == pytest.approx(2 * weights, abs=10**5)
        assert peak.of_rows > 9 * 4 * 2048 * 4096 * 4
        assert max(held.gathered for held in trace.memory) < 3 * 4096 * 4096 * 4 + 10**6
        assert (max(held.gathered for held in trace.memory) > 4096 * 4096 * 4) is sharded
    assert "svg" in found._repr_html_()


def train_on_rows_above_zero() -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Linear(8, 10**6)
    loader: Any = DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for (x,) in loader:
        out = model(x)
        accelerator.backward(out[out > 0].sum() + out.sum())
        optimizer.step()
        optimizer.zero_grad()


def test_shapes_that_depend_on_numbers_that_were_not_computed_are_noted(tmp_path: Path):
    (finding,) = rehearsed(train_on_rows_above_zero, folder=tmp_path, ranks=(0,)).findings
    assert finding.kind == "note"
    assert "aten::index" in finding.text


def train_with_a_closure() -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Linear(4, 1)
    loader: Any = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.LBFGS(model.parameters()), loader)
    for (x,) in loader:

        def closure(x: torch.Tensor = x) -> Any:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)


def test_how_often_a_closure_is_called_is_not_guessed(tmp_path: Path):
    found = rehearsed(train_with_a_closure, folder=tmp_path)
    assert [finding.kind for finding in found.findings] == ["note"]


def write_everything() -> None:
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir="project")
    accelerator.init_trackers("run", config={"lr": 0.1})
    _, model = train(1, accelerator=accelerator)
    accelerator.log({"loss": 1.0})
    accelerator.save_state("checkpoint")
    accelerator.load_state("checkpoint")
    assert accelerator.save_state("later", async_save=True).wait() == Path("later")
    accelerator.save_model(model, "weights")
    accelerator.save({"a": 1}, "a.pt")
    if accelerator.is_main_process:
        os.makedirs("out", exist_ok=True)
        torch.save(model.state_dict(), "out/model.pt")
        assert torch.load("out/model.pt").keys() == model.state_dict().keys()
        np.save("out/numbers.npy", np.ones(2))
        Path("out/log.json").write_text(json.dumps({"a": 1}))
        with open("kept.txt", "a") as file:
            file.write("more")
        assert Path("kept.txt").read_text() == "kept more"
        os.remove("kept.txt")
        shutil.copy("out/model.pt", "out/best.pt")
        assert {path.name for path in Path("out").glob("*.pt")} == {"model.pt", "best.pt"}
        assert sorted(os.listdir("out")) == ["best.pt", "log.json", "model.pt", "numbers.npy"]
        os.replace("out/best.pt", "out/last.pt")
        assert Path("out/last.pt").exists()
        assert not Path("out/best.pt").exists()
        assert {path.name for path in Path().iterdir()} >= {"kept.txt", "out", "weights"}
        with os.scandir() as entries:
            assert {entry.name for entry in entries if entry.is_dir()} >= {"out", "weights"}
        assert next(os.scandir("out")).name in os.listdir("out")
    accelerator.wait_for_everyone()
    assert torch.load("out/model.pt").keys() == model.state_dict().keys()  # of rank 0, on all ranks
    accelerator.end_training()


def resume_from_the_newest() -> None:
    """Save in a folder that is there, and resume from the newest, as trainers do, without a barrier between."""
    accelerator, model = train(1)
    if accelerator.is_main_process:
        time.sleep(0.3)  # so that ranks that did not wait would be before it
        for step in (3, 6):
            os.makedirs(f"there/checkpoint-{step}")
            torch.save(step, f"there/checkpoint-{step}/state.pt")
    accelerator.gather(torch.ones(2))
    newest = max(os.listdir("there"))
    if torch.load(f"there/{newest}/state.pt") != 6:
        raise ValueError(newest)
    copy.deepcopy(accelerator.unwrap_model(model))  # for weights that are averaged over steps


def test_folders_have_what_rank_0_has_written_as_soon_as_ranks_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "ranks").mkdir()
    assert rehearsed(resume_from_the_newest, folder=tmp_path / "ranks").findings == []
    assert list((tmp_path / "there").iterdir()) == []


def test_nothing_is_written_and_what_was_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (here / "kept.txt").write_text("kept ")
    found = rehearsed(write_everything, folder=tmp_path)
    assert found.findings == []
    assert [entry.name for entry in here.iterdir()] == ["kept.txt"]
    assert (here / "kept.txt").read_text() == "kept "


def read_losses() -> None:
    accelerator, model = train(1)
    best = 1.0
    if model(torch.ones(1, 4)).item() < best:  # computed: its shape is new
        best = 0.0
    for _ in range(2):
        if model(torch.ones(1, 4)).sum() < best:
            accelerator.print("better")


def test_numbers_that_were_not_computed_are_named_with_the_branches_that_hang_on_them(tmp_path: Path):
    (finding,) = rehearsed(read_losses, folder=tmp_path).findings
    assert finding.kind == "invented"
    assert "decides" in finding.text
    assert "test_rehearsals.py line" in finding.text


def train_for_ever() -> None:
    train(10**9, rows=32)


def test_a_rehearsal_ends_in_time_and_says_how_far_it_came(tmp_path: Path):
    found = rehearsed(train_for_ever, folder=tmp_path, seconds=0.5)
    assert found.ok
    assert not found.traces[0].ended
    assert "comes later" in repr(found)


def send_from_rank_0() -> None:
    rank, world_size = Accelerator(cpu=True).process_index, dist.get_world_size()
    values: list[Any] = [f"from {rank}", {"rank": rank}]
    dist.broadcast_object_list(values)
    tensor = torch.full((2,), float(rank))
    dist.broadcast(tensor, 0)
    part = torch.zeros(1)
    dist.scatter(part, [torch.full((1,), float(other)) for other in range(world_size)] if rank == 0 else None)
    if (values, tensor.tolist(), part.item()) != (["from 0", {"rank": 0}], [0.0, 0.0], float(rank)):
        raise ValueError(f"{values} {tensor} {part}")


def test_ranks_get_what_rank_0_sends(tmp_path: Path):
    assert rehearsed(send_from_rank_0, folder=tmp_path).findings == []


def gather_texts() -> None:
    accelerator = Accelerator(cpu=True)
    tokens = torch.ones(2, 3 + accelerator.process_index, dtype=torch.int64)
    tokens = accelerator.pad_across_processes(tokens, dim=1)
    accelerator.gather_for_metrics((tokens, torch.ones(2)))
    accelerator.gather(torch.ones(()))
    accelerator.gather_for_metrics(["text"] * (1 + accelerator.process_index), use_gather_object=True)


def test_what_ranks_pad_or_send_as_objects_may_have_any_size(tmp_path: Path):
    assert rehearsed(gather_texts, folder=tmp_path).findings == []


def exchange_in_pairs() -> None:
    rank = Accelerator(cpu=True).process_index
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(torch.ones(rank + 1), group=pairs[rank // 2])
    if rank == 0:
        dist.send(torch.ones(1), 3)
    elif rank == 3:
        dist.recv(torch.ones(1), 0)


def test_what_only_some_ranks_exchange_is_no_alarm(tmp_path: Path):
    found = rehearsed(exchange_in_pairs, folder=tmp_path)
    assert [finding.kind for finding in found.findings] == ["note"]


def end_at_once(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    if accelerator.process_index == rank:
        os._exit(3)
    accelerator.wait_for_everyone()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_dies_is_an_error_and_the_others_do_not_wait_for_it(rank: int, tmp_path: Path):
    found = rehearsed(end_at_once, rank, folder=tmp_path)
    (finding,) = found.findings
    assert finding.kind == "error"
    assert re.search(rf"rank {rank}: .*exit code 3", finding.text)
    assert max(trace.seconds for trace in found.traces) < 30


def test_ranks_that_do_not_exist_are_refused():
    for ranks in ([8], "some", []):
        with pytest.raises(ConfigError, match="0 to 7"):
            rehearse(train, ranks=ranks)
    with pytest.raises(ConfigError, match="multiple"):
        rehearse(train, num_processes=8, num_machines=3)
    with pytest.raises(ConfigError, match="memory="):
        rehearse(train, device="Voodoo2")


@pytest.mark.slow
def test_a_launch_rehearses_the_ends_of_each_machine():
    found = rehearse(train, (1,), kwargs={"rows": 1024}, num_processes=32, num_machines=2)
    assert [trace.rank for trace in found.traces] == [0, 15, 16, 31]
    assert found.ok
    assert found.traces[0].step_rows == [4] * 8
    assert "<table>" in found._repr_html_()

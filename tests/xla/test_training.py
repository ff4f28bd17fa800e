"""Training on XLA gives the numbers of plain PyTorch on the CPU."""

import copy
import logging
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch_xla
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch_xla.debug import metrics

from nb_accelerate import Accelerator, DistributedType, checkpoints
from nb_accelerate.base.progress_page import Phase, ProgressPage, here, layout
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process import context
from nb_accelerate.utils import DataLoaderConfiguration, set_seed

TOLERANCE = 1e-5
"""Greatest difference of any weight after two dozen steps in float32: XLA adds up in another order."""

BF16_TOLERANCE = 2e-3
"""The same after eight steps of which most is computed in bfloat16, which keeps eight bits: it rounds elsewhere."""


@pytest.fixture(autouse=True)
def new_process(started_runtime: None):
    context.reset()
    set_seed(0)
    yield
    context.reset()


class Tied(nn.Module):
    """A language model of the simplest kind: the weights of its embedding are those of its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.hidden = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 20, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(torch.relu(self.hidden(self.norm(self.embedding(tokens)))))


def rows(number: int = 64, length: int = 5) -> TensorDataset:
    return TensorDataset(torch.randint(0, 20, (number, length), generator=torch.Generator().manual_seed(1)))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def greatest_difference(one: nn.Module, other: nn.Module) -> float:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    return max((ours[name].cpu().double() - theirs[name].double()).abs().max().item() for name in ours)


def train_plainly(model: nn.Module, loader: DataLoader, epochs: int, every: int = 1) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    for _ in range(epochs):
        for number, (tokens,) in enumerate(loader, start=1):
            (loss_of(model, tokens) / every).backward()
            if number % every == 0 or number == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("every", [1, 3])
def test_a_tied_model_trains_as_in_plain_pytorch(every: int):
    model = Tied()
    plain = copy.deepcopy(model)
    weight = model.embedding.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    accelerator = Accelerator(gradient_accumulation_steps=every)
    assert accelerator.distributed_type == DistributedType.XLA == DistributedType.TPU
    assert accelerator.device == torch.device("xla", 0)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(rows(), batch_size=8)
    )
    assert model.output.weight is model.embedding.weight is weight
    assert any(one is weight for group in optimizer.param_groups for one in group["params"])
    for _ in range(3):
        for (tokens,) in loader:
            assert tokens.device.type == "xla"
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    train_plainly(plain, DataLoader(rows(), batch_size=8), 3, every)
    assert greatest_difference(model, plain) < TOLERANCE


def programs(epoch: Callable[[], None]) -> tuple[int, int, int, float]:
    """How many programs an epoch submits, compiles and runs, and how many operations XLA was given for all of them."""

    def counted() -> tuple[int, int, int, float]:
        counters = [int(metrics.counter_value(name) or 0) for name in ("UncachedCompile", "ExecuteComputation")]
        submitted, operations = (metrics.metric_data("TensorsGraphSize") or (0, 0.0))[:2]
        return submitted, *counters, operations

    torch_xla.sync()
    before = counted()
    epoch()
    torch_xla.sync()
    return tuple(now - then for now, then in zip(counted(), before, strict=True))


@pytest.mark.may_leave("environment")  # torch_xla sets a variable when its loader is used for the first time
def test_programs_are_those_of_a_loop_of_torch_xla_that_keeps_its_loss(monkeypatch: pytest.MonkeyPatch):
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    monkeypatch.setattr(
        "nb_accelerate.training.accelerator.losses._REPORT_SECONDS", 0.0
    )  # the loss of each step is read

    # Each loop has shapes of its own, or the second would find what the first has compiled.
    bare = nn.Linear(31, 7).to("xla")
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    theirs = MpDeviceLoader(DataLoader(TensorDataset(torch.randn(64, 31)), batch_size=8), "xla:0")

    def alone() -> None:
        for (inputs,) in theirs:
            loss = bare(inputs).square().mean()
            loss.backward()
            kept.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()

    kept: list[torch.Tensor] = []
    expected = programs(alone)
    theirs._parallel_loader.close()

    accelerator = Accelerator()
    model = nn.Linear(37, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(torch.randn(64, 37)), batch_size=8)
    )

    def prepared() -> None:
        for (inputs,) in loader:
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    assert programs(prepared) == expected
    assert expected[2] == len(kept) == 8


def test_without_a_prepared_loader_each_step_is_submitted():
    accelerator = Accelerator()
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.ones(2, 4, device=accelerator.device)
    before = metrics.counter_value("MarkStep") or 0
    for _ in range(5):
        accelerator.backward(model(inputs).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert 4 <= metrics.counter_value("MarkStep") - before <= 5


def test_bf16_computes_in_bfloat16_and_learns_as_on_the_cpu():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    plain = copy.deepcopy(model)
    inputs = torch.randn(32, 8)
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(inputs), batch_size=8)
    )
    with accelerator.autocast():
        assert (torch.ones(2, 2, device="xla") @ torch.ones(2, 2, device="xla")).dtype is torch.bfloat16
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for (batch,) in loader:
        output = model(batch)
        assert output.dtype is torch.float32
        accelerator.backward(output.square().mean())
        optimizer.step()
        optimizer.zero_grad()
    for batch in inputs.split(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = plain(batch)
        output.float().square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert greatest_difference(model, plain) < 5e-3


def small_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


@pytest.mark.parametrize(("precision", "tolerance"), [("no", TOLERANCE), ("bf16", BF16_TOLERANCE)])
def test_gpt2_with_tied_embeddings_trains_as_in_plain_pytorch(precision: str, tolerance: float):
    model, plain = small_gpt2(), small_gpt2()
    accelerator = Accelerator(mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(rows(32), batch_size=4)
    )
    assert model.lm_head.weight is model.transformer.wte.weight
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for (tokens,) in loader:
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    decay = torch.optim.lr_scheduler.StepLR(theirs, step_size=3, gamma=0.5)
    for (tokens,) in DataLoader(rows(32), batch_size=4):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = plain(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        decay.step()
        theirs.zero_grad()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert greatest_difference(model, plain) < tolerance


@pytest.mark.may_leave("threads")  # of tqdm
@pytest.mark.parametrize("backend", ["openxla", "aot_torchxla_trace_once"])
def test_a_compiled_model_trains_as_in_plain_pytorch(backend: str):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    plain = copy.deepcopy(model)
    inputs = torch.randn(16, 4)
    accelerator = Accelerator(dynamo_backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(inputs), batch_size=4))
    for (batch,) in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in inputs.split(4):
        plain(batch).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
    assert greatest_difference(accelerator.unwrap_model(model, keep_torch_compile=False), plain) < TOLERANCE


def test_a_backend_that_cannot_compile_for_xla_is_refused_with_those_that_can():
    accelerator = Accelerator(dynamo_backend="inductor")
    with pytest.raises(ConfigError, match="dynamo_backend='inductor' does not compile"):
        accelerator.prepare(nn.Linear(2, 2))


def test_fp16_is_refused_with_the_alternative():
    with pytest.raises(ConfigError, match="Write mixed_precision='no' or 'bf16'"):
        Accelerator(mixed_precision="fp16")


def test_random_numbers_of_the_device_follow_the_seed_and_are_restored():
    accelerator = Accelerator()

    def drawn() -> torch.Tensor:
        return torch.rand(4, device=accelerator.device).cpu()

    set_seed(5)
    first = drawn()
    set_seed(6)
    other = drawn()
    set_seed(5)
    assert torch.equal(drawn(), first)
    assert not torch.equal(first, other)


def test_a_seed_does_not_start_the_runtime():
    import subprocess
    import sys

    code = (
        "import torch_xla.core.xla_model\n"
        "from nb_accelerate.utils import DataLoaderConfiguration, set_seed\n"
        "from nb_accelerate.base.devices import find_kind\n"
        "set_seed(3)\n"
        "print(find_kind('xla').is_initialized())\n"
        "from nb_accelerate import Accelerator\n"
        "Accelerator()\n"
        "print(find_kind('xla').is_initialized(), torch_xla.core.xla_model.get_rng_state())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "3"]


def evaluated(accelerator: Accelerator, number: int) -> list[int]:
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(number)), batch_size=4))
    return [one for (batch,) in loader for one in accelerator.gather_for_metrics(batch).tolist()]


def test_gather_for_metrics_returns_each_row_once():
    assert evaluated(Accelerator(), 7) == list(range(7))


def state_of(accelerator: Accelerator):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    loader = DataLoader(rows(), batch_size=8, shuffle=True)
    return accelerator.prepare(model, optimizer, scheduler, loader)


def train(accelerator: Accelerator, model, optimizer, scheduler, batches, most: int | None = None) -> None:
    for number, (tokens,) in enumerate(batches, start=1):
        accelerator.backward(loss_of(model, tokens))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number == most:
            return


def test_a_run_that_is_resumed_in_an_epoch_ends_with_the_same_weights(tmp_path):
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model, optimizer, scheduler, loader = state_of(accelerator)
    train(accelerator, model, optimizer, scheduler, loader)
    for number, (tokens,) in enumerate(loader, start=1):
        accelerator.backward(loss_of(model, tokens))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number == 3:
            accelerator.save_state(tmp_path / "state")
            drawn = random.random(), np.random.rand(), torch.rand(1).item(), torch.rand(1, device="xla").item()
    whole = {name: value.cpu() for name, value in model.state_dict().items()}
    context.reset()
    set_seed(99)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    model, optimizer, scheduler, loader = state_of(accelerator)
    accelerator.load_state(tmp_path / "state")
    assert model.output.weight is model.embedding.weight
    assert drawn == (random.random(), np.random.rand(), torch.rand(1).item(), torch.rand(1, device="xla").item())
    train(accelerator, model, optimizer, scheduler, accelerator.skip_first_batches(loader, 3))
    assert all(torch.equal(value.cpu(), whole[name]) for name, value in model.state_dict().items())


def test_a_checkpoint_of_xla_is_read_on_the_cpu_and_the_other_way_round(tmp_path):
    accelerator = Accelerator()
    model, optimizer, scheduler, loader = state_of(accelerator)
    train(accelerator, model, optimizer, scheduler, loader, most=2)
    total = torch.tensor(2.5, device="xla")
    accelerator.log({"loss": total})
    total.zero_()
    accelerator.save_state(tmp_path / "xla")
    assert checkpoints(tmp_path / "xla")[0].metrics == {"loss": 2.5}
    weights = {name: value.cpu() for name, value in model.state_dict().items()}
    moments = [value["exp_avg"].cpu() for value in optimizer.state.values()]

    context.reset()
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = state_of(accelerator)
    accelerator.load_state(tmp_path / "xla")
    assert accelerator.device.type == "cpu"
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value["exp_avg"], one) for value, one in zip(optimizer.state.values(), moments, strict=True))
    train(accelerator, model, optimizer, scheduler, loader, most=2)
    accelerator.save_state(tmp_path / "cpu")
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    context.reset()
    accelerator = Accelerator()
    model, optimizer, scheduler, loader = state_of(accelerator)
    accelerator.load_state(tmp_path / "cpu")
    assert accelerator.device.type == "xla"
    assert all(torch.equal(value.cpu(), weights[name]) for name, value in model.state_dict().items())
    assert all(value["exp_avg"].device.type == "xla" for value in optimizer.state.values())


@pytest.mark.parametrize("safe", [True, False])
def test_saved_models_are_those_of_the_cpu(tmp_path, safe: bool):
    from safetensors.torch import load_file

    accelerator = Accelerator()
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path, safe_serialization=safe)
    read = load_file(tmp_path / "model.safetensors") if safe else torch.load(tmp_path / "pytorch_model.bin")
    assert {value.device.type for value in read.values()} == {"cpu"}
    state = accelerator.get_state_dict(model)
    assert {value.device.type for value in state.values()} == {"cpu"}
    assert all(torch.equal(value, state[name]) for name, value in read.items())
    assert len({value.shape for value in read.values()}) == len({value.shape for value in state.values()})
    again = Tied()
    again.load_state_dict(read, strict=not safe)
    assert greatest_difference(model, again) == 0


def test_saved_objects_hold_tensors_of_the_cpu(tmp_path):
    accelerator = Accelerator()
    accelerator.save({"a": [torch.ones(2, device="xla")]}, tmp_path / "a.bin")
    assert torch.load(tmp_path / "a.bin")["a"][0].device.type == "cpu"
    accelerator.save(
        {"a": torch.ones(2, device="xla"), "b": torch.zeros(2, device="xla")},
        tmp_path / "a.safetensors",
        safe_serialization=True,
    )
    from safetensors.torch import load_file

    assert {name: value.tolist() for name, value in load_file(tmp_path / "a.safetensors").items()} == {
        "a": [1, 1],
        "b": [0, 0],
    }


def steps_of_lengths(lengths: list[int]) -> None:
    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(lengths)

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.ones(lengths[index], dtype=torch.long)

    accelerator = Accelerator()
    model = nn.Embedding(5, 13)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Rows(), batch_size=1)
    )
    for tokens in loader:
        accelerator.backward(model(tokens).mean())
        optimizer.step()
        optimizer.zero_grad()


def test_steps_whose_shapes_change_get_one_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="nb_accelerate"):
        steps_of_lengths([3, 3, 4, 5, 6, 7, 8, 9])
    (said,) = [record.getMessage() for record in caplog.records]
    assert "XLA compiled step 5 again, as it did 3 steps" in said
    assert "batch from (1, 5) to (1, 6)" in said
    assert "Pad all batches to one shape" in said


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> bytearray:
    """The progress page that a notebook would read."""
    memory = bytearray(layout.SIZE)
    monkeypatch.setattr("nb_accelerate.base.progress_page.page._page", ProgressPage(memory))
    here().begin_request()
    return memory


def test_the_panel_is_told_of_compilations_and_of_changing_shapes(page: bytearray):
    steps_of_lengths([23, 23, 24, 25, 26, 27])
    seen = read(page)
    assert seen.compiled >= 5
    assert 0 < seen.compiling < 100
    assert "batch from (1, 25) to (1, 26)" in seen.warning


def test_a_step_that_was_not_compiled_is_not_expected_to_be(page: bytearray):
    phases: list[int] = []
    enter = here().enter
    here().enter = lambda phase: (phases.append(phase), enter(phase))[1]
    steps_of_lengths([29] * 9)
    expected = phases.count(Phase.COMPILING)
    assert phases.index(Phase.COMPILING) < phases.index(Phase.DATA, phases.index(Phase.FORWARD))
    assert 1 <= expected <= 4
    assert not read(page).warning


def test_steps_of_one_shape_and_a_smaller_last_one_get_no_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="nb_accelerate"):
        steps_of_lengths([11] * 8 + [10])
    assert not caplog.records

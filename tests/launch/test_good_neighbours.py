"""Other libraries, unchanged, inside a launched function: a rank's environment is torchrun's."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
from fixtures.ranks import RunRanks

pytestmark = [pytest.mark.slow, pytest.mark.limit(180)]


def skip_without(package: str) -> None:
    # Asked for and not imported: some change this process' environment when they are.
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def rows() -> Any:
    import torch

    torch.manual_seed(0)
    x = torch.randn(64, 8)
    return torch.utils.data.TensorDataset(x, x @ torch.arange(8.0).unsqueeze(1))


def new_model() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Linear(8, 1)


def same_on_both(weights: list[Any]) -> bool:
    import torch

    return torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], new_model().weight)


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_hand_written_ddp(run_ranks: RunRanks, method: str) -> None:
    def train() -> Any:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(new_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sampler: Any = torch.utils.data.DistributedSampler(rows())
        for x, y in torch.utils.data.DataLoader(rows(), 8, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return model.module.weight.detach()

    assert same_on_both(run_ranks(train, deadline=120, start_method=method))


def test_hugging_faces_accelerate(run_ranks: RunRanks) -> None:
    skip_without("accelerate")

    def train() -> Any:
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(rows(), 8)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
        return accelerator.unwrap_model(model).weight.detach()

    assert same_on_both(run_ranks(train, deadline=120))


def test_lightning_fabric(run_ranks: RunRanks) -> None:
    skip_without("lightning_fabric")

    def train() -> Any:
        import torch
        from lightning_fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, num_nodes=1, strategy="ddp")
        fabric.launch()
        assert fabric.world_size == 2
        model = new_model()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for x, y in fabric.setup_dataloaders(torch.utils.data.DataLoader(rows(), 8)):
            optimizer.zero_grad()
            fabric.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
        return model.module.weight.detach()

    assert same_on_both(run_ranks(train, deadline=120))


def test_transformers_trainer(run_ranks: RunRanks, tmp_path: Any) -> None:
    skip_without("transformers")

    def train(folder: str) -> Any:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
        data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (32, 16))]
        arguments = TrainingArguments(
            folder, max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no"
        )
        trainer = Trainer(model, arguments, train_dataset=data)  # type: ignore[arg-type]
        trainer.train()
        return trainer.args.world_size, trainer.state.global_step, model.transformer.wte.weight.detach()

    (size, steps, first), (_, _, second) = run_ranks(train, str(tmp_path), deadline=150)
    assert (size, steps) == (2, 3)
    assert first.equal(second)


def test_accelerates_own_tests_of_where_it_is(run_ranks: RunRanks) -> None:
    def where() -> tuple[str, ...]:
        import torch.distributed as dist

        assert dist.is_torchelastic_launched()
        return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))

    assert run_ranks(where) == [("0", "0", "2", "2"), ("1", "1", "2", "2")]

"""Layers that several ranks compute together: plans, rows, random numbers, and what is refused."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin
from nb_accelerate.base.config.loader import DataLoaderConfiguration
from nb_accelerate.base.config.parallelism import (
    ParallelismConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.comm import SingleCollectives
from nb_accelerate.training.comm.data_parallel import between_groups
from nb_accelerate.training.process import context
from nb_accelerate.training.process.rng import set_seed


class Tied(nn.Module):
    """A language model whose embedding and last layer share a weight, with a plan of its own."""

    _tp_plan: ClassVar[Any] = {"up": "colwise", "down": "rowwise", "missing": "colwise"}

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.dropout = nn.Dropout(0.5)
        self.down = nn.Linear(6, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        return self.head(hidden + self.dropout(self.down(self.up(hidden).tanh())))


def tensor_parallel(plan: Any = None, tp_size: int = 2, **sizes: int) -> Accelerator:
    context.reset()
    handler = None if plan is None else TorchTensorParallelConfig(plan=plan)
    return Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=tp_size, tp_handler=handler, **sizes))


TIED_PLAN = {"embed": "embedding_rowwise", "head": "colwise_gather_output", "up": "colwise", "down": "rowwise"}


def weights(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def step_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.contract("training: tensor parallel")
@pytest.mark.parametrize("plan", [None, {**TIED_PLAN, "norm": "replicate"}])
def test_a_plan_may_come_with_the_model_and_ties_stay_ties(run_ranks, plan):
    tokens = torch.arange(20).reshape(2, 10) % 11

    def train() -> Any:
        accelerator = tensor_parallel(plan)
        model = weights(accelerator.process_index).eval()
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.5)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses, norms = [], []
        for _ in range(3):
            loss = step_of(model, tokens.to(accelerator.device))
            accelerator.backward(loss)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        kinds = {name: type(one).__name__ for name, one in model.named_parameters()}
        state = accelerator.get_state_dict(model)
        return (
            losses,
            norms,
            kinds,
            model.head.weight is model.embed.weight,
            {k: v.cpu() for k, v in state.items()},
        )

    reference = weights().eval()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    expected, expected_norms = [], []
    for _ in range(3):
        loss = step_of(reference, tokens)
        loss.backward()
        expected_norms.append(nn.utils.clip_grad_norm_(reference.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    results = run_ranks(train)
    for losses, norms, kinds, is_tied, _ in results:
        assert losses == pytest.approx(expected, abs=1e-6)
        assert norms == pytest.approx(expected_norms, abs=1e-6)
        assert is_tied
        assert (kinds["up.weight"], kinds["norm.weight"]) == ("DTensor", "Parameter")
        assert (kinds["embed.weight"] == "DTensor") == (plan is not None)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(results[0][4][name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_model_of_transformers_brings_its_plan(run_ranks):
    transformers = pytest.importorskip("transformers")  # not above: each rank of each test would import it
    tokens = torch.arange(24).reshape(2, 12) % 32

    def make() -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        return transformers.LlamaForCausalLM(config)

    def train() -> Any:
        accelerator = tensor_parallel()
        model = make()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        losses = []
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        own = sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in model.parameters())
        return losses, own

    reference = make()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    expected = []
    for _ in range(3):
        loss = reference(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses, own in run_ranks(train):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert own < 0.55 * sum(one.numel() for one in reference.parameters())


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.rand(7))  # other rows on each rank that reads it


@pytest.mark.slow
def test_ranks_of_a_group_read_the_same_rows_in_any_kind_of_loader(run_ranks):
    def read() -> Any:
        context.reset()
        accelerator = Accelerator(
            cpu=True,
            parallelism_config=ParallelismConfig(dp_replicate_size=2, tp_size=2),
            step_scheduler_with_optimizer=False,
        )
        torch.manual_seed(accelerator.process_index)
        rows = TensorDataset(torch.arange(11))
        found: list[Any] = []
        for loader in (
            DataLoader(rows, batch_size=2),
            DataLoader(rows, batch_size=2, shuffle=True),
            DataLoader(
                rows, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(accelerator.process_index)
            ),
            DataLoader(Stream(), batch_size=2),
        ):
            prepared = accelerator.prepare(loader)
            seen = [[batch if isinstance(batch, torch.Tensor) else batch[0] for batch in prepared] for _ in range(2)]
            seen.append(
                [
                    accelerator.gather_for_metrics(batch if isinstance(batch, torch.Tensor) else batch[0])
                    for batch in prepared
                ]
            )
            found.append([[one.tolist() for one in epoch] for epoch in seen])
        with accelerator.split_between_processes(list("abcd")) as part:
            found.append(part)
        places = (
            accelerator.data_parallel_rank,
            accelerator.data_parallel_shard_rank,
            accelerator.tensor_parallel_rank,
        )
        total = accelerator.reduce(torch.tensor(1.0), "sum").item()
        return found, places, total, accelerator.gather(torch.tensor([accelerator.data_parallel_rank])).tolist()

    results = run_ranks(read, world_size=4)
    assert results[0][0] == results[1][0]
    assert results[2][0] == results[3][0]
    assert results[0][0][0][:2] != results[2][0][0][:2]
    for kind in results[0][0][:3]:
        assert sorted(row for batch in kind[2] for row in batch) == list(range(11))
    assert len([row for batch in results[0][0][3][2] for row in batch]) == 7
    assert [one[0][4] for one in results] == [["a", "b"]] * 2 + [["c", "d"]] * 2
    assert [one[1] for one in results] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert all(one[2:] == (2.0, [0, 1]) for one in results)


def test_all_ranks_of_one_group_draw_the_same_numbers_and_rows(run_ranks):
    def train(dispatch: bool) -> Any:
        context.reset()
        accelerator = Accelerator(
            cpu=True,
            torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2),
            dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch),
        )
        set_seed(3, device_specific=True)  # other numbers on each rank, until a model is prepared
        rows = TensorDataset(torch.arange(9) % 11)
        model, loader = accelerator.prepare(weights(), DataLoader(rows, batch_size=2, shuffle=True))
        set_seed(3, device_specific=True)
        losses, order = [], []
        for (tokens,) in loader:
            order += accelerator.gather_for_metrics(tokens).tolist()
            losses.append(step_of(model, tokens[None]).item())
        return losses, order, accelerator.parallelism_config.tp_size, accelerator.num_processes, len(loader)

    for dispatch in (False, True):
        first, second = run_ranks(train, dispatch)
        assert first == second
        assert sorted(first[1]) == list(range(9))
        assert first[2:] == (2, 2, 5)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"ups": "colwise"}, r"mean 'up'\?"),
        ({"up": "colwse"}, "'colwse'.*mean 'colwise'"),
        ({"head": "colwise_gather_output"}, "embed share.*shards head"),
        ({"embed": "embedding_colwise", "head": "colwise_gather_output"}, "share a weight .*two ways"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan, message):
    """In one process, as none of these needs others."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from nb_accelerate.training.strategies.tensor_parallel import TensorParallelizer

    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ConfigError, match=message):
            TensorParallelizer(init_device_mesh("cpu", (2,)), plan).parallelize(Tied(), lambda _: None)
    finally:
        destroy_process_group()


def test_options_that_cannot_be_are_refused(run_ranks):
    with pytest.raises(ConfigError, match="enable_async_tp=True"):
        TorchTensorParallelConfig(enable_async_tp=True)
    with pytest.raises(ConfigError, match="a dict of styles"):
        TorchTensorParallelConfig(plan=["up"])  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ConfigError, match="torch_device_mesh was given"):
        TorchTensorParallelPlugin(tp_size=2, torch_device_mesh=3)
    with pytest.raises(ConfigError, match=r"lays out 2.*tp_size=2\)"):
        ParallelismConfig(tp_size=2).check_ranks(3)

    def make(options: dict[str, Any], model: Any) -> None:
        context.reset()
        Accelerator(cpu=True, **options).prepare(model)

    both = {"fsdp_plugin": FullyShardedDataParallelPlugin(), "parallelism_config": ParallelismConfig(tp_size=2)}
    with pytest.raises(ConfigError, match="left to shard over"):
        run_ranks(make, both, nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="Linear brings no plan"):
        run_ranks(make, {"parallelism_config": ParallelismConfig(tp_size=2)}, nn.Linear(2, 2))
    odd = {
        "parallelism_config": ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan={"0": "colwise"}))
    }
    with pytest.raises(ConfigError, match="0 has out_features=3"):
        run_ranks(make, odd, nn.Sequential(nn.Linear(2, 3)))


def test_one_process_needs_no_layout_and_has_no_groups():
    context.reset()
    accelerator = tensor_parallel()
    model = accelerator.prepare(nn.Linear(2, 3))
    assert isinstance(model.weight, nn.Parameter)
    assert accelerator.torch_device_mesh is None
    assert (accelerator.tensor_parallel_rank, accelerator.context_parallel_rank) == (0, 0)
    tokens = torch.arange(4)
    with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[0], no_restore_buffers={tokens}):
        assert tokens.tolist() == [0, 1, 2, 3]
    alone = SingleCollectives()
    assert between_groups(alone, 1) is alone

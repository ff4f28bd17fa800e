"""FSDP on two ranks: losses, norms and weights are those of one process in plain PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fixtures.block_models import Model, Tied
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nb_accelerate.base.config.fsdp import FullyShardedDataParallelPlugin as Plugin
from nb_accelerate.base.config.kwargs import GradScalerKwargs
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.strategies.sharding import gather_whole, local_part

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 12
ROWS = 8  # of all ranks together, in one step


def make_data() -> TensorDataset:
    inputs = torch.randn(STEPS * ROWS, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def train_by_hand(*, accumulate: int = 1, max_norm: float | None = None, norm_type: float = 2.0) -> Any:
    """The same training in one process, on whole batches."""
    model, data = Model(), make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = data[step * ROWS : (step + 1) * ROWS]
        loss = nn.functional.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        (loss / accumulate).backward()
        if (step + 1) % accumulate == 0 or step + 1 == STEPS:
            if max_norm is not None:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, [weight.detach() for weight in model.parameters()]


def train_sharded(
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    order: str = "together",
    on_meta: bool = False,
    **options: Any,
) -> Any:
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, cpu=True, fsdp_plugin=Plugin(**options))
    with torch.device("meta" if on_meta and accelerator.process_index else "cpu"):
        model = Model(seed=accelerator.process_index)  # all ranks train that of rank 0
    before = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = accelerator.prepare(DataLoader(make_data(), batch_size=ROWS // accelerator.num_processes))
    if order == "together":
        optimizer, model = accelerator.prepare(optimizer, model)
    elif order == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    elements = sum(local_part(weight).numel() for weight in model.parameters())
    losses, norms = [], []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            if max_norm is not None and accelerator.sync_gradients:
                # Also by the parameters that the model had before it was sharded.
                clipped = before if order == "model first" else model.parameters()
                norms.append(accelerator.clip_grad_norm_(clipped, max_norm, norm_type).item())
            optimizer.step()
            optimizer.zero_grad()
    weights = [gather_whole(weight, keep=True) for weight in model.parameters()]
    return losses, norms, weights, elements, accelerator.distributed_type


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_norm": 0.5}, {}),
    ({"max_norm": 0.5}, {"order": "model first", "min_num_params": 100}),
    ({"max_norm": 0.5}, {"order": "optimizer first"}),
    ({"accumulate": 5, "max_norm": 0.1}, {"reshard_after_forward": False}),
    ({"max_norm": 0.1, "norm_type": float("inf")}, {"auto_wrap_policy": "no_wrap"}),
    ({"max_norm": 0.5, "norm_type": 3.0}, {"transformer_cls_names_to_wrap": "Block"}),
    ({"accumulate": 2, "max_norm": 0.5}, {"cpu_offload": True, "activation_checkpointing": True, "on_meta": True}),
    ({}, {"sharding_strategy": "SHARD_GRAD_OP", "forward_prefetch": True, "ignored_modules": r"first|blocks\.0"}),
]


@pytest.mark.contract("training: FSDP2")
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_ranks_train_as_one_process_of_plain_pytorch(run_ranks, world_size):
    def train_all() -> list[Any]:
        return [train_sharded(**case, **how) for case, how in CASES]

    expected_of_cases = [train_by_hand(**case) for case, _ in CASES]
    whole = sum(weight.numel() for weight in Model().parameters())
    ranks = run_ranks(train_all, world_size=world_size)
    for results in ranks:
        for (*ours, _, kind), expected in zip(results, expected_of_cases, strict=True):
            assert str(kind) == "FSDP"
            for mine, theirs in zip(ours, expected, strict=True):
                assert len(mine) == len(theirs)
                for one, other in zip(mine, theirs, strict=True):
                    # AdamW divides by small numbers: rounding of 1e-8 in a gradient may move a weight by 1e-6.
                    torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=0, atol=1e-5)
    for number in range(len(CASES) - 1):  # the last one leaves parts whole
        assert sum(results[number][3] for results in ranks) == whole  # each rank has a part, and no more


def test_an_optimizer_that_has_stepped_keeps_its_state_and_a_window_that_was_left_leaves_nothing(run_ranks):
    def train(sharded: bool, steps: int = 4) -> Any:
        accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin() if sharded else None)
        torch.manual_seed(0)
        model: Any = Model()
        temperature = nn.Parameter(torch.tensor([1.5]))  # of no model
        optimizer: Any = torch.optim.AdamW([*model.parameters(), temperature], lr=0.01)
        inputs = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(5))

        def loss_of(rows: torch.Tensor) -> torch.Tensor:
            return (model(rows) * temperature).square().mean()

        loss_of(inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        if sharded:
            optimizer, model = accelerator.prepare(optimizer, model)
            with accelerator.no_sync(model):
                accelerator.backward(loss_of(inputs) * 1000)
            optimizer.zero_grad()
        mine = inputs[accelerator.process_index :: accelerator.num_processes]
        norms = []
        for _ in range(steps):
            loss = loss_of(mine)
            accelerator.backward(loss)
            norms.append(accelerator.clip_grad_norm_([*model.parameters(), temperature], 0.3).item())
            accelerator.clip_grad_value_([*model.parameters(), temperature], 0.02)
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        return norms, temperature.item(), {name: value.clone() for name, value in state.items()}

    norms, temperature, weights = train(False)
    for rank, (ours, mine, state) in enumerate(run_ranks(train, True)):
        assert ours == pytest.approx(norms, abs=1e-5)
        assert mine == pytest.approx(temperature, abs=1e-6)
        assert state.keys() == (weights.keys() if rank == 0 else set())  # collected where it may be written
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_of_shards_is_that_of_a_whole_model_and_the_other_way_round(run_ranks, tmp_path: Path):
    def train(sharded: bool, load: Path | None, save: Path) -> Any:
        from nb_accelerate.training.process import context

        context.reset()
        whole = Plugin(state_dict_type="FULL_STATE_DICT")
        accelerator = Accelerator(cpu=True, fsdp_plugin=whole if sharded else None)
        model: Any = Model(seed=3 if load else 0)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader: Any = DataLoader(make_data(), batch_size=ROWS // accelerator.num_processes)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if load:
            accelerator.load_state(load)
        losses = []
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(save)
        accelerator.save_model(model, save / "alone")
        return losses

    def twice(first: Path) -> Any:
        return train(True, None, first), train(True, first, tmp_path / "again")

    plain = train(False, None, tmp_path / "plain"), train(False, tmp_path / "plain", tmp_path / "plain again")
    for ours in run_ranks(twice, tmp_path / "sharded"):
        for mine, expected in zip(ours, plain, strict=True):
            assert mine == pytest.approx(expected, abs=1e-6)
    # The files have no trace of sharding: one process loads them, and ranks load those of one process.
    assert train(False, tmp_path / "sharded", tmp_path / "c") == pytest.approx(plain[1], abs=1e-6)
    for ours in run_ranks(train, True, tmp_path / "plain", tmp_path / "d"):
        assert ours == pytest.approx(plain[1], abs=1e-6)
    files = {file.name for file in (tmp_path / "plain").iterdir()} | {"random_states_1.pkl"}
    assert {file.name for file in (tmp_path / "sharded").iterdir()} == files
    from safetensors.torch import load_file

    for folder in ("sharded", "sharded/alone"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert {name: value.shape for name, value in saved.items()} == {
            name: value.shape for name, value in Model().state_dict().items()
        }


def test_two_models_accumulate_although_one_optimizer_drops_gradients_first(run_ranks):
    def train() -> Any:
        accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, fsdp_plugin=Plugin())
        models = [Model(0), Model(1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        prepared = accelerator.prepare(*models, *optimizers)
        for inputs, targets in accelerator.prepare(DataLoader(make_data(), batch_size=ROWS // 2)):
            with accelerator.accumulate(*prepared[:2]):
                for model, optimizer in zip(prepared[:2], prepared[2:], strict=True):
                    accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
        return [weight.full_tensor().detach() for model in prepared[:2] for weight in model.parameters()]

    expected = []
    for seed in (0, 1):
        model, data = Model(seed), make_data()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            inputs, targets = data[step * ROWS : (step + 1) * ROWS]
            (nn.functional.mse_loss(model(inputs), targets) / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        expected += [weight.detach() for weight in model.parameters()]
    for weights in run_ranks(train):
        for value, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=1e-6)


def test_tied_weights_train_as_one_if_they_are_in_one_block(run_ranks):
    words = torch.arange(8)

    def train(sharded: bool) -> Any:
        accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin() if sharded else None)
        model: Any = Tied()
        options = {"transformer_cls_names_to_wrap": ["Block"]}
        if sharded:
            accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin(**options))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        mine = words[accelerator.process_index :: accelerator.num_processes].to(accelerator.device)
        for _ in range(3):
            accelerator.backward(nn.functional.cross_entropy(model(mine), mine))
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        assert not state or state["head.weight"] is state["words.weight"] or not sharded
        return {name: value.cpu().clone() for name, value in state.items()}

    expected = train(False)
    ours = run_ranks(train, True)[0]
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_16_bit_numbers_train_as_float32_within_their_precision_and_batch_norm_computes_in_float32(
    run_ranks, precision, tolerance
):
    def train() -> Any:
        scale = GradScalerKwargs(init_scale=64.0)  # no step is skipped
        accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=[scale], fsdp_plugin=Plugin())
        model: Any = Model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        dtypes = set()
        model.norm.register_forward_hook(lambda norm, _, out: dtypes.add((norm.weight.dtype, out.dtype)))
        model.blocks[0].up.register_forward_hook(lambda part, _, out: dtypes.add((part.weight.dtype, out.dtype)))
        losses, norms = [], []
        for inputs, targets in accelerator.prepare(DataLoader(make_data(), batch_size=ROWS // 2)):
            loss = nn.functional.mse_loss(model(inputs), targets)
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, norms, dtypes, {weight.dtype for weight in model.parameters()}

    losses, norms, _ = train_by_hand(max_norm=0.5)
    half = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])
    for ours, clipped, dtypes, weights in run_ranks(train):
        assert ours == pytest.approx(losses, abs=tolerance)
        assert clipped == pytest.approx(norms, rel=10 * tolerance)
        assert dtypes == {(half, half), (torch.float32, half)}
        assert weights == {torch.float32}  # those that the optimizer trains


def test_a_configuration_file_shards_the_models_of_its_ranks(run_ranks, tmp_path: Path):
    """One that version 1 was configured with; files of version 2 have fewer keys, of the same names."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nuse_cpu: true\nfsdp_config:\n"
        "  fsdp_version: 1\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_backward_prefetch: BACKWARD_PRE\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
        "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_use_orig_params: false\n  fsdp_offload_params: true\n"
    )

    def train() -> Any:
        accelerator = Accelerator()
        model = accelerator.prepare(Model())
        plugin = accelerator.state.fsdp_plugin
        parts = sorted(type(part).__name__ for part in model.modules() if "FSDP" in type(part).__name__)
        return parts, plugin.reshard_after_forward, plugin.cpu_offload, plugin.state_dict_type

    for found in run_ranks(train, env={"NB_ACCELERATE_CONFIG_FILE": str(file)}):
        assert found == (["FSDPBlock", "FSDPBlock", "FSDPModel"], False, True, "FULL_STATE_DICT")


def test_what_cannot_be_done_with_shards_is_refused_and_the_environment_asks_for_them(run_ranks):
    def ask() -> list[str]:
        from nb_accelerate.local_sgd import LocalSGD

        said = []

        def note(action: Any) -> None:
            with pytest.raises(ConfigError) as caught:
                action()
            said.append(str(caught.value))

        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(Model())
        assert accelerator.is_fsdp2
        assert Accelerator().is_fsdp2  # a further one, as libraries make them
        note(lambda: LocalSGD(accelerator, model, 2))
        note(lambda: accelerator.join_uneven_inputs([model]).__enter__())
        said.append(str(sorted(type(part).__name__ for part in model.modules() if "FSDP" in type(part).__name__)))
        with torch.device("meta"):
            note(lambda: accelerator.prepare(Model()))
        accelerator = Accelerator(fsdp_plugin=Plugin(ignored_modules="frist"))
        note(lambda: accelerator.prepare(Model()))
        return said

    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block"}
    for said in run_ranks(ask, env=variables):
        local_sgd, join, parts, meta, ignored = said
        assert "LocalSGD" in local_sgd
        assert "even_batches" in join
        assert parts == "['FSDPBlock', 'FSDPBlock', 'FSDPModel']"
        assert "device meta on rank" in meta
        assert "ignored_modules='frist' matches" in ignored

"""Models whose layers ranks compute together, from files that they map: ``device_map="ranks"``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nb_accelerate import PartialState, init_empty_weights
from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.bigmodel.mapped import WeightFiles, files_of
from nb_accelerate.training.strategies.tensor_parallel import take_slices

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks

TOKENS = torch.arange(6)[None]
BLOCKS = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def language_model(kind: str = "llama", **given: Any) -> Any:
    """A tiny one, with sizes that 2 and 4 divide, except that of its vocabulary."""
    import transformers  # ranks of the other tests need not wait for it

    sizes = {"vocab_size": 33, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.AutoConfig.for_model(kind, pad_token_id=0, **(sizes | heads | given))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=33, n_embd=32, n_layer=2, n_head=4)).eval()


def saved(model: nn.Module, folder: Path) -> Path:
    """Write the weights of a model, tied ones once."""
    once = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name in dict(model.named_buffers())}
    save_file(once | buffers, folder / "model.safetensors")
    return folder / "model.safetensors"


def loaded(make: Any, file: Path) -> tuple[Any, WeightFiles]:
    with init_empty_weights():
        model = make().eval()
    files = WeightFiles([file])
    take_slices(model, files)
    return model, files


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Scaled(nn.Embedding):
    """With a buffer that no checkpoint has, as embeddings of Gemma have one."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


class Rows(nn.Module):
    """A model of no library, with a plan of its own: biases, buffers, ties, and 7 rows, which no number divides."""

    _tp_plan: ClassVar[Any] = {
        **BLOCKS,
        "embed": "embedding_rowwise",
        "norm": "replicated_with_grad_allreduce",
    }

    def __init__(self, width: int = 4, inner: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.embed = Scaled(7, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, inner), "down": nn.Linear(inner, width)}) for _ in range(depth)
        )
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block["down"](block["up"](hidden).tanh())
        return self.norm(hidden.flatten(0, -2))


class Untied(Rows):
    """With a last layer of its own, of which rank 3 of 4 has nothing."""

    _tp_plan: ClassVar[Any] = {**Rows._tp_plan, "head": "colwise_gather_output"}

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.head = nn.Linear(4, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(tokens))


GROUPED_HEADS = {"num_key_value_heads": 2}
TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize(("settings", "world_size"), [(GROUPED_HEADS, 2), (TIED, 4)])
@pytest.mark.slow
@pytest.mark.limit(180)
def test_ranks_write_the_words_of_one_process(
    run_ranks: RunRanks, tmp_path: Path, settings: Any, world_size: int
) -> None:
    plain = language_model(**settings)
    file = saved(plain, tmp_path)

    def write() -> Any:  # in forks of a process that has transformers
        torch.manual_seed(PartialState().process_index)
        model, _ = loaded(lambda: language_model(**settings), file)
        sampled = model.generate(TOKENS, max_new_tokens=8, do_sample=True)
        with torch.no_grad():
            logits = model(TOKENS).logits
        own = sum(local(one).numel() for one in model.parameters())
        return logits, model.generate(TOKENS, max_new_tokens=8, do_sample=False), sampled, own

    with torch.no_grad():
        expected = plain(TOKENS).logits
    words = plain.generate(TOKENS, max_new_tokens=8, do_sample=False)
    whole = sum(one.numel() for one in plain.parameters())
    results = run_ranks(write, world_size=world_size, start_method="fork", deadline=150, env={"OMP_NUM_THREADS": "1"})
    for logits, written, sampled, own in results:
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(written, words)
        assert torch.equal(sampled, results[0][2])
        assert own < 1.15 * whole / world_size  # norms are whole on each, and the vocabulary cannot be divided


@pytest.mark.parametrize(("kind", "world_size"), [pytest.param(Untied, 4, marks=pytest.mark.slow), (Rows, 2)])
@pytest.mark.limit(180)
def test_a_rank_has_views_of_its_slices(run_ranks: RunRanks, tmp_path: Path, kind: type[Rows], world_size: int) -> None:
    plain = kind().eval()
    plain.norm.running_mean.uniform_()
    file = saved(plain, tmp_path)

    def compute() -> Any:
        model, files = loaded(kind, file)
        tensors = {name: local(one) for name, one in model.state_dict().items()}
        views = {name for name, one in tensors.items() if files_of(one) is files or not one.numel()}
        ties = model.head.weight is model.embed.weight
        takes_gradients = any(one.requires_grad for one in model.parameters())
        return model(TOKENS), {name: one.clone() for name, one in tensors.items()}, views, ties, takes_gradients

    whole = {name: one.detach() for name, one in plain.state_dict().items()}
    results = run_ranks(compute, world_size=world_size, deadline=150, env={"OMP_NUM_THREADS": "1"})
    for rank, (given, slices, views, ties, takes_gradients) in enumerate(results):
        torch.testing.assert_close(given, plain(TOKENS).detach(), rtol=1e-5, atol=1e-6)
        assert views == whole.keys()
        for name, tensor in whole.items():
            is_cut = kind is Untied or name not in {"embed.weight", "head.weight"}
            dim = {"up": 0, "down": 1, "embed": 0, "head": 0}.get(name.split(".")[-2]) if is_cut else None
            if name.endswith("down.bias"):
                dim = None
            parts = [tensor] * world_size if dim is None else tensor.chunk(world_size, dim)
            assert torch.equal(slices[name], parts[rank] if rank < len(parts) else tensor[:0])
        assert ties == (kind is Rows)  # the plan does not name the head, so that the embedding is whole too
        assert not takes_gradients


@pytest.mark.limit(180)
def test_numbers_of_another_kind_are_converted(run_ranks: RunRanks, tmp_path: Path) -> None:
    file = saved(Untied(), tmp_path)

    def kinds() -> Any:
        with init_empty_weights():
            model = Untied().bfloat16()
        take_slices(model, WeightFiles([file]))
        half = {one.dtype for one in model.parameters()}
        with init_empty_weights():
            model = Untied()
        take_slices(model, WeightFiles([file]), dict.fromkeys(WeightFiles([file]), torch.float64))
        return half, {one.dtype for one in model.parameters()}

    assert run_ranks(kinds, deadline=150) == [({torch.bfloat16}, {torch.float64})] * 2


@pytest.mark.slow
def test_a_process_that_is_alone_takes_everything_and_needs_no_plan(tmp_path: Path) -> None:
    plain = gpt2()
    model, files = loaded(gpt2, saved(plain, tmp_path))
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    assert all(files_of(one) is files for one in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight


NO_PLAN = (
    'device_map="ranks" on 2 ranks was asked for, and GPT2LMHeadModel brings no plan .* model._tp_plan = {.*"auto"'
)
HEADS = "k_proj has 2 heads, which cannot be divided among 4 ranks. The number of ranks has to divide 2: 1, 2."


@pytest.mark.parametrize(
    ("make", "world_size", "message"),
    [
        pytest.param(gpt2, 2, NO_PLAN, marks=pytest.mark.slow),
        pytest.param(lambda: language_model(**GROUPED_HEADS), 4, HEADS, marks=pytest.mark.slow),
        (lambda: Untied(inner=9), 2, "out_features=9.* that divides 9: 1, 3, 9."),
    ],
)
@pytest.mark.limit(120)
def test_a_model_that_cannot_be_divided_is_refused(
    run_ranks: RunRanks, tmp_path: Path, make: Any, world_size: int, message: str
) -> None:
    file = saved(make(), tmp_path)
    with pytest.raises(ConfigError, match=message):
        run_ranks(lambda: loaded(make, file) and None, world_size=world_size, start_method="fork", deadline=90)


def test_a_weight_that_is_missing_or_has_another_shape_changes_nothing(tmp_path: Path) -> None:
    with init_empty_weights():
        model = Untied()
    other: Any = Untied()
    other.head.bias = None
    missing = WeightFiles([saved(other, tmp_path)])
    with pytest.raises(CheckpointError, match=r"head\.bias, and this Untied"):
        take_slices(model, missing)
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"blocks\.0\.up\.weight .*\(6, 4\)"):
        take_slices(model, WeightFiles([saved(Untied(inner=6), tmp_path / "other")]))
    assert all(one.is_meta for one in model.parameters())


@pytest.mark.parametrize("by", ["ranks", "cpu"])
@pytest.mark.slow
def test_four_ranks_hold_one_copy_of_the_weights(run_ranks: RunRanks, tmp_path: Path, by: str) -> None:
    """As the kernel counts: a page that n processes share counts as 1/n in each (PSS)."""
    sizes = {"width": 2048, "inner": 8192, "depth": 3}
    with init_empty_weights():
        shapes = {name: one.shape for name, one in Rows(**sizes).named_parameters()}
    buffers = Rows(width=2048).norm.state_dict(prefix="norm.")
    file = tmp_path / "model.safetensors"
    save_file({**{name: torch.zeros(shape) for name, shape in shapes.items()}, **buffers}, file)

    def measure() -> Any:
        def now() -> tuple[int, int]:
            torch.distributed.barrier()
            kinds = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
            torch.distributed.barrier()
            return int(kinds["Pss:"]) << 10, int(kinds["Anonymous:"]) << 10

        (tmp_path / "small").mkdir(exist_ok=True)
        small = tmp_path / "small" / f"{PartialState().process_index}.safetensors"
        save_file(dict(Untied().state_dict()), small)
        kept = loaded(Untied, small)[0]  # what else it takes to be a rank
        kept(TOKENS)
        before = now()
        if by == "ranks":
            model, _ = loaded(lambda: Rows(**sizes), file)
        else:
            with init_empty_weights():
                model = Rows(**sizes).eval()
            model.load_state_dict(dict(WeightFiles([file])), assign=True, strict=False)
        with torch.no_grad():
            model(TOKENS)
        pss, private = (after - was for after, was in zip(now(), before, strict=True))
        return pss, private

    weights = file.stat().st_size
    assert weights > 400e6
    results = run_ranks(measure, world_size=4, deadline=120, env={"OMP_NUM_THREADS": "1"})
    print(by, weights, results)
    assert 0.9 * weights < sum(pss for pss, _ in results) < 1.2 * weights
    assert all(private < 0.05 * weights for _, private in results)

"""What ranks exchange: any structure, any dtype, the same for every implementation."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from nb_accelerate import utils
from nb_accelerate.errors import (
    CannotPadNestedTensorWarning,
    CollectiveMismatchError,
    ConfigError,
    DistributedOperationException,
)
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.comm.operations import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from nb_accelerate.training.pytree import find_batch_size, map_tensors, paths_of_tensors, send_to_device, tensors_in
from nb_accelerate.utils import copy_tensor_to_devices

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    extra: Any = None
    hidden: Any = field(init=False, default=3)


class Encoding(UserDict):
    """Like a tokenizer's: a dict with more to it."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings


def structures():
    tensor = torch.arange(2.0)
    with_default = defaultdict(list)
    with_default["a"] = tensor
    return [
        tensor,
        [tensor, (tensor, {"a": tensor})],
        Point(tensor, [tensor]),
        Output(tensor, {"more": tensor}),
        OrderedDict(b=tensor, a=tensor),
        with_default,
        Encoding({"ids": tensor}, encodings="kept"),
        torch.Size([2]),
        "text",
        None,
    ]


@pytest.mark.parametrize("data", structures(), ids=lambda data: type(data).__name__)
def test_structures_keep_their_types(data):
    changed = map_tensors(lambda tensor: tensor + 1, data)
    assert type(changed) is type(data)
    assert [tensor.tolist() for tensor in tensors_in(changed)] == [[1.0, 2.0]] * len(tensors_in(data))
    if isinstance(data, Encoding):
        assert changed.encodings == "kept"
        assert data["ids"].tolist() == [0, 1]
    if isinstance(data, defaultdict):
        assert changed["new"] == []


def test_paths_name_tensors_in_the_order_in_which_they_are_visited():
    tensor = torch.ones(1)
    data = {"a": [tensor, Point(tensor, 3)], "b": Output(tensor, (tensor,)), 1: Encoding({"ids": tensor})}
    assert paths_of_tensors(data) == ["['a'][0]", "['a'][1].x", "['b'].logits", "['b'].extra[0]", "[1]['ids']"]
    assert len(tensors_in(data)) == 5
    assert paths_of_tensors(tensor) == [""]


def test_leaves_that_are_not_tensors_are_refused_where_only_tensors_can_be():
    with pytest.raises(TypeError, match=r"a str \('text'\) where"):
        tensors_in({"a": ["text"]}, strict=True)


def test_batch_size_is_that_of_the_first_tensor_with_rows():
    assert find_batch_size({"loss": torch.tensor(1.0), "rows": [torch.ones(3, 2)]}) == 3
    assert find_batch_size("nothing") is None


def test_objects_that_can_move_move_themselves():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert type(send_to_device(packed, "cpu")) is type(packed)
    assert send_to_device({"a": torch.ones(1), "b": "text"}, "meta")["a"].device.type == "meta"


def exchange(world_size):
    """The contract, for whatever collectives a process has."""
    collectives = Accelerator(cpu=True).core.collectives
    rank = collectives.rank
    assert collectives.world_size == world_size
    ranks = list(range(world_size))
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    kinds += [torch.complex64]
    if hasattr(torch, "float8_e4m3fn"):
        kinds.append(torch.float8_e4m3fn)
    tensors = {str(kind): torch.tensor([[rank, 1], [0, rank]]).to(kind) for kind in kinds}
    tensors["odd"] = torch.full((3, 1), rank, dtype=torch.uint8)
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).t() + rank
    tensors["empty"] = torch.empty(0, 2)
    tensors["large"] = torch.full((600_000,), float(rank))
    gathered = gather(collectives, tensors)
    assert gathered.keys() == tensors.keys()
    for name, tensor in gathered.items():
        assert tensor.dtype == tensors[name].dtype
        if name in {str(kind) for kind in kinds}:
            expected = torch.cat([torch.tensor([[other, 1], [0, other]]).to(tensor.dtype) for other in ranks])
            assert torch.equal(tensor.to(torch.complex64), expected.to(torch.complex64)), name
    assert gathered["odd"].flatten().tolist() == [other for other in ranks for _ in range(3)]
    assert torch.equal(gathered["transposed"], torch.cat([torch.arange(6.0).reshape(2, 3).t() + o for o in ranks]))
    assert gathered["empty"].shape == (0, 2)
    assert gathered["large"][::600_000].tolist() == ranks
    if world_size > 1:
        assert gather(collectives, torch.tensor(rank)).tolist() == ranks

    mine = {"a": torch.ones(2, 2) * rank, "b": torch.ones(2), "n": torch.tensor([rank, 1])}
    total = reduce(collectives, mine, "sum")
    assert total["a"].tolist() == [[sum(ranks)] * 2] * 2
    assert total["n"].tolist() == [sum(ranks), world_size]
    assert mine["a"].tolist() == [[rank] * 2] * 2  # what was given is not changed
    assert reduce(collectives, mine["a"], "mean")[0, 0].item() == pytest.approx(sum(ranks) / world_size)
    assert reduce(collectives, mine["b"], "sum", scale=0.5).tolist() == [world_size / 2] * 2
    largest = reduce(collectives, {**mine, "minus": -mine["a"]}, "max")
    assert largest["a"].tolist() == [[world_size - 1] * 2] * 2
    assert largest["minus"].tolist() == [[0] * 2] * 2
    assert largest["n"].tolist() == [world_size - 1, 1]
    assert reduce(collectives, mine["b"], "none").tolist() == [1, 1]
    with pytest.raises(ConfigError, match=r"reduction='men'.*Did you mean 'mean'"):
        reduce(collectives, mine, "men")

    last = world_size - 1
    sent = broadcast(collectives, [torch.tensor([rank]), (torch.ones(2, dtype=torch.bool) * bool(rank),)], last)
    assert sent[0].tolist() == [last]
    assert sent[1][0].tolist() == [bool(last)] * 2

    assert gather_object(collectives, [rank, "x"]) == [item for other in ranks for item in (other, "x")]
    with pytest.raises(TypeError, match=r"given a str, .* gather_object\(\[item\]\)"):
        gather_object(collectives, "x")
    items = [rank, {"rank": rank}]
    assert broadcast_object_list(collectives, items, last) is items
    assert items == [last, {"rank": last}]

    size = 1 + (rank + 1) % world_size  # the last rank has least
    ragged = {"rows": torch.ones(size, 2), "columns": torch.ones(2, size), "loss": torch.tensor(1.0)}
    padded = pad_across_processes(collectives, ragged, pad_index=-1)
    assert padded["rows"].shape == (world_size, 2)
    assert padded["rows"][size:].eq(-1).all()
    assert padded["loss"].dim() == 0
    for dim in (1, -1):
        wide = pad_across_processes(collectives, ragged["columns"], dim=dim, pad_first=True)
        assert wide[0].tolist() == [0.0] * (world_size - size) + [1.0] * size
    collectives.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_exchange_any_structure_of_any_dtype(run_ranks, world_size):
    run_ranks(exchange, world_size, world_size=world_size)


def test_one_process_exchanges_with_itself():
    exchange(1)


def test_a_structure_of_small_tensors_travels_in_one_collective(run_ranks):
    def count():
        from nb_accelerate.training.comm import TorchCollectives

        calls = []
        whole = TorchCollectives.all_gather
        TorchCollectives.all_gather = lambda self, tensor: calls.append(1) or whole(self, tensor)
        Accelerator(cpu=True).gather([torch.ones(3), torch.ones(2, dtype=torch.int64), torch.tensor(True)] * 4)
        return len(calls)

    assert run_ranks(count, env={"ACCELERATE_DEBUG_MODE": "0"}) == [1, 1]
    assert run_ranks(count) == [2, 2]  # on CPU, ranks first compare what they are about to send


def differ(cases):
    """What ranks are told when they do not agree, and how long that took."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    found = {}
    for name, (operation, make) in cases.items():
        try:
            getattr(accelerator, operation if isinstance(operation, str) else operation[rank])(make(rank))
        except CollectiveMismatchError as error:
            found[name] = str(error)
    assert accelerator.gather(torch.tensor(rank)).tolist() == [0, 1, 2]  # and all go on
    return found


def test_ranks_that_do_not_agree_are_told_who_and_where_instead_of_waiting(run_ranks):
    cases = {
        "shape": ("gather", lambda rank: {"rows": torch.ones(3), "logits": [torch.ones(2, 4 + (rank == 2))]}),
        "dtype": ("reduce", lambda rank: [torch.ones(2).to(torch.float64 if rank == 1 else torch.float32)]),
        "bytes": ("gather", lambda rank: torch.ones((2, 3) if rank else (3, 2))),  # as many, so nothing would abort
        "dimensions": ("pad_across_processes", lambda rank: torch.ones((2,) * (rank + 1))),
        "structure": ("gather", lambda rank: {name: torch.ones(1) for name in "ab"[: rank + 1]}),
        "operation": (("gather", "gather", "reduce"), lambda rank: torch.ones(2)),
        "key": ("gather", lambda rank: {"x" if rank else "y": torch.ones(2 + rank)}),
    }
    assert CollectiveMismatchError is DistributedOperationException
    first, *others = run_ranks(differ, cases, world_size=3)
    assert others == [first, first]
    assert first["shape"].startswith(
        "gather was given a tensor of shape (2, 4) and dtype float32 on rank 0 and a tensor of shape (2, 5) and dtype "
        "float32 on rank 2 in ['logits'][0]. Make them equal first: tensor = accelerator.pad_across_processes"
    )
    assert (
        "dtype float64 on rank 1 in [0]. Convert it to one dtype on all ranks, for example with .to(torch.float32)"
        in (first["dtype"])
    )
    assert "shape (3, 2) and dtype float32 on rank 0 and a tensor of shape (2, 3)" in first["bytes"]
    assert "of 1 dimensions and dtype float32 on rank 0 and a tensor of 2 dimensions" in first["dimensions"]
    assert "given 1 tensors on rank 0 and 2 on rank 1; only rank 1 has ['b']" in first["structure"]
    assert first["operation"].startswith("rank 0 called gather while")
    assert "in ['y'] and ['x']" in first["key"]


def test_checks_are_chosen_by_the_environment(run_ranks):
    def kind():
        return type(Accelerator(cpu=True).core.collectives).__name__

    assert run_ranks(kind) == ["CheckedCollectives"] * 2
    assert run_ranks(kind, env={"ACCELERATE_DEBUG_MODE": "false"}) == ["TorchCollectives"] * 2
    assert run_ranks(kind, env={"ACCELERATE_DEBUG_MODE": "true"}) == ["CheckedCollectives"] * 2

    def send():
        accelerator = Accelerator(cpu=True)
        try:
            broadcast(accelerator.core.collectives, torch.ones(2 + accelerator.process_index))
        except CollectiveMismatchError as error:
            return str(error)
        return None

    for text in run_ranks(send, env={"ACCELERATE_DEBUG_MODE": "1"}):
        assert re.match(r"broadcast .*\(2,\)", text)


def test_a_script_may_turn_the_checks_on(run_ranks):
    def send():
        from nb_accelerate import PartialState, utils

        state, seen = PartialState(), [PartialState().debug]
        state.debug = True
        try:
            utils.broadcast(torch.ones(2 + state.process_index))
        except utils.operations.DistributedOperationException:
            seen.append(state.debug)
        state.debug = False
        return [*seen, state.debug]

    assert run_ranks(send) == [[False, True, False]] * 2


def test_the_tensor_of_one_rank_is_copied_to_all_that_do_not_know_it(run_ranks):
    def copy():
        accelerator = Accelerator(cpu=True)
        rank = accelerator.process_index
        mine = torch.arange(6, dtype=torch.int16).reshape(2, 3).T if rank == 1 else None
        found = copy_tensor_to_devices(mine)
        with pytest.raises(ValueError, match=r"0, 1 have one"):
            copy_tensor_to_devices(torch.ones(1))
        with pytest.raises(ValueError, match="no rank has one"):
            copy_tensor_to_devices()
        return found

    for found in run_ranks(copy):
        assert torch.equal(found, torch.arange(6, dtype=torch.int16).reshape(2, 3).T)


def test_nested_tensors_are_left_as_they_are_with_a_warning(run_ranks):
    def pad():
        accelerator = Accelerator(cpu=True)
        rank = accelerator.process_index
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
            nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
        with pytest.warns(CannotPadNestedTensorWarning, match=r"to_padded_tensor\(0\)"):
            found = accelerator.pad_across_processes({"a": torch.ones(rank + 1), "b": nested, "c": torch.ones(3)})
        return found["a"].tolist(), found["b"] is nested, found["c"].tolist()

    assert run_ranks(pad) == [([1, 0], True, [1, 1, 1]), ([1, 1], True, [1, 1, 1])]
    assert run_ranks(pad, world_size=1) == [([1], True, [1, 1, 1])]


def test_gather_warns_that_gradients_do_not_pass_where_that_may_matter(run_ranks):
    def gathers():
        accelerator = Accelerator(cpu=True)
        embeddings = torch.ones(2, 3, requires_grad=True) * 2
        loss = embeddings.sum()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            accelerator.gather(loss), accelerator.gather(loss.repeat(2)), accelerator.gather(embeddings.detach())
            accelerator.gather_for_metrics(embeddings)
            with torch.no_grad():
                accelerator.gather(embeddings)
            quiet = [str(one.message) for one in found if "gradients" in str(one.message)]
            gathered = accelerator.gather({"x": embeddings})["x"]
            utils.gather(embeddings)
        told = [one.filename.endswith("test_collectives.py") for one in found if "gradients" in str(one.message)]
        return quiet, told, gathered.requires_grad

    assert run_ranks(gathers) == [([], [True, True], False), ([], [], False)]

"""What users hand over besides plain batches of tensors: objects that move themselves, nothing at all, tables."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.data.plan.plan import split_between
from nb_accelerate.training.data.plan.samplers import BatchSamplerShard
from nb_accelerate.training.pytree import send_to_device


class Graph:
    """Moves itself, and knows only the device."""

    def __init__(self):
        self.nodes = torch.ones(3)
        self.moves = []

    def to(self, device):
        self.nodes = self.nodes.to(device)
        self.moves.append(str(device))
        return self


@dataclass
class Sample:
    graph: Graph
    label: torch.Tensor


def test_objects_inside_of_containers_move_themselves():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"g": Graph(), "pair": (packed, torch.ones(2)), "samples": [Sample(Graph(), torch.ones(1))], "kind": Graph}
    moved = send_to_device(batch, "meta")
    assert moved["g"].nodes.device.type == "meta"
    assert moved["pair"][0].data.device.type == "meta"
    assert moved["pair"][0].batch_sizes.device.type == "cpu"  # where torch wants them: it was moved by its own method
    assert moved["pair"][1].device.type == "meta"
    assert moved["samples"][0].graph.nodes.device.type == "meta"
    assert moved["samples"][0].label.device.type == "meta"
    assert moved["kind"] is Graph
    assert batch["g"].nodes.device.type == batch["samples"][0].graph.nodes.device.type == "cpu"  # who gave it keeps it


def test_a_prepared_loader_moves_objects_inside_of_its_batches():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(range(4), batch_size=2, collate_fn=lambda rows: {"g": Graph()}))
    assert [batch["g"].moves for batch in loader] == [[str(accelerator.device)]] * 2


def test_numbers_without_dimensions_and_tensors_without_rows_travel(run_ranks):
    def exchange():
        from nb_accelerate.utils import broadcast, copy_tensor_to_devices, gather, pad_across_processes, reduce

        rank = Accelerator(cpu=True).process_index
        none = torch.zeros(0, 4)
        return {
            "numbers": [broadcast(torch.tensor(7 + rank)).item(), broadcast(torch.tensor(rank == 0)).item()],
            "several": [one.item() for one in broadcast([torch.tensor(1.5 + rank), torch.tensor(3 - rank)])],
            "owned": copy_tensor_to_devices(torch.tensor(5) if rank == 0 else None).item(),
            "no rows": [tuple(gather(none).shape), tuple(gather(torch.zeros(2, 0)).shape), gather(none).dtype],
            "none of several": [tuple(one.shape) for one in gather([none, torch.zeros(0), torch.ones(2)])],
            "all without": [tuple(one.shape) for one in gather([none, torch.zeros(0, dtype=torch.int64)])],
            "broadcast": [tuple(one.shape) for one in broadcast([none, torch.zeros(0)])],
            "reduced": tuple(reduce(none).shape),
            "padded": gather(pad_across_processes(torch.full((rank, 2), 1.0), dim=0)).tolist(),
        }

    expected = {
        "numbers": [7, True],
        "several": [1.5, 3],
        "owned": 5,
        "no rows": [(0, 4), (4, 0), torch.float32],
        "none of several": [(0, 4), (0,), (4,)],
        "all without": [(0, 4), (0,)],
        "broadcast": [(0, 4), (0,)],
        "reduced": (0, 4),
        "padded": [[0.0, 0.0], [1.0, 1.0]],
    }
    assert run_ranks(exchange) == [expected, expected]


def test_split_between_processes_gives_parts_of_the_type_that_was_given():
    given = {
        "numpy": (np.arange(5), lambda part: part.tolist()),
        "tensor": (torch.arange(5), lambda part: part.tolist()),
        "range": (range(5), list),
        "tuple": (tuple(range(5)), list),
    }
    if importlib.util.find_spec("pandas"):
        import pandas as pd

        given["pandas"] = (pd.DataFrame({"a": range(5)}), lambda part: part["a"].tolist())
    if importlib.util.find_spec("datasets"):
        import datasets

        given["datasets"] = (datasets.Dataset.from_dict({"a": range(5)}), lambda part: list(part["a"]))
    for name, (inputs, rows) in given.items():
        plain = [split_between(inputs, rank, 2, pad=False) for rank in range(2)]
        assert [rows(part) for part in plain] == [[0, 1, 2], [3, 4]], name
        assert all(type(part) is type(inputs) for part in plain), name
        assert [rows(split_between(inputs, rank, 2, pad=True)) for rank in range(2)] == [[0, 1, 2], [3, 4, 4]], name
    assert [split_between({"prompt": "abcde"}, rank, 2, pad=True) for rank in range(2)] == [{"prompt": "abcde"}] * 2
    matrix = split_between(np.arange(6).reshape(3, 2), 1, 2, pad=True)
    assert matrix.tolist() == [[4, 5], [4, 5]]
    assert split_between(np.arange(0), 0, 2, pad=True).tolist() == []


def test_split_between_processes_splits_the_values_of_any_mapping():
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"ids": [1, 2, 3], "mask": torch.arange(3)})
    part = split_between(encoding, 1, 2, pad=True)
    assert type(part) is transformers.BatchEncoding
    assert part["ids"] == [3, 3]
    assert part["mask"].tolist() == [2, 2]
    assert encoding["ids"] == [1, 2, 3]


def test_large_batches_are_read_from_a_shuffled_order_in_one_pass(monkeypatch):
    read = []

    def counted(self):
        read.append(self.numel())
        return plain(self)

    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    batches = BatchSampler(RandomSampler(range(200_000), generator=torch.Generator().manual_seed(0)), 20_000, False)
    rows = [row for batch in BatchSamplerShard(batches) for row in batch]
    monkeypatch.undo()
    assert sum(read) <= 200_000  # each row is converted once, however large batches are
    expected = torch.randperm(200_000, generator=torch.Generator().manual_seed(0)).tolist()
    assert rows == expected

"""`show_map`: the bytes of a model by layer and device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from nb_accelerate import PartialState, infer_auto_device_map, init_empty_weights, show_map
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.bigmodel.device_memory import get_balanced_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fixtures.ranks import RunRanks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)


class Model(nn.Module):
    """A tied head, a scale beside the layers, and layers of 2 MiB each in float32, of which the last one is larger."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, 256)
        self.scale = nn.Parameter(torch.ones(256))
        self.layers = nn.ModuleList([*(Block(256) for _ in range(6)), Block(512)])
        self.register_buffer("positions", torch.zeros(256))
        self.head = nn.Linear(256, 1024, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture
def empty() -> Model:
    with init_empty_weights():
        model = Model()
    model.head.weight = model.embedding.weight
    return model


DEVICE_MAP: Mapping[str, int | str] = {
    "scale": 0,
    "positions": 0,
    "embedding": 0,
    "head": 0,
    "layers.0": 0,
    "layers.1": 0,
    "layers.2": 1,
    "layers.3": "cpu",
    "layers.4": "disk",
    "layers.5": "disk",
    "layers.6": "disk",
}


def test_equal_layers_that_follow_each_other_are_one_row(empty: Model):
    shown = show_map(empty, DEVICE_MAP)
    assert shown.rows == [
        ("scale", "1.0 kB", "GPU 0"),
        ("embedding", "1.0 MB", "GPU 0"),  # where the tied head counts
        ("layers.0-1", "2 x 2.1 MB", "GPU 0"),
        ("layers.2", "2.1 MB", "GPU 1"),
        ("layers.3", "2.1 MB", "cpu"),
        ("layers.4-5", "2 x 2.1 MB", "disk"),
        ("layers.6", "8.4 MB", "disk"),
        ("positions", "1.0 kB", "GPU 0"),
        ("in all", "5.2 MB", "GPU 0"),
        ("in all", "2.1 MB", "GPU 1"),
        ("in all", "2.1 MB", "cpu"),
        ("in all", "13 MB", "disk"),
    ]
    assert re.search(r"^layers\.0-1 +2 x 2\.1 MB +GPU 0$", repr(shown), re.MULTILINE)
    assert '<td style="text-align:right">2 x 2.1 MB</td>' in shown._repr_html_()


def test_a_layer_on_two_devices_has_a_row_for_each(empty: Model):
    rows = show_map(empty, {"": 1, "layers.3.down": "cpu"}).rows
    assert rows[2:6] == [
        ("layers.0-2", "3 x 2.1 MB", "GPU 1"),
        ("layers.3", "1.0 MB", "GPU 1"),
        ("layers.3", "1.0 MB", "cpu"),
        ("layers.4-5", "2 x 2.1 MB", "GPU 1"),
    ]


@pytest.mark.parametrize("way", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_before_loading_it_is_the_map_that_would_be_inferred(empty: Model, way: str):
    memory: dict[int | str, int | str] = {0: "21MiB", 1: "21MiB", "cpu": "20MiB"}
    limits: Mapping[int | str, int | str] = memory
    if way != "sequential":
        limits = get_balanced_memory(empty, memory, ["Block"], low_zero=way == "balanced_low_0")
    expected = infer_auto_device_map(empty, limits, ["Block"])
    assert show_map(empty, way, max_memory=memory) == show_map(empty, expected)


def test_a_model_without_a_map_is_shown_where_it_is(empty: Model):
    assert {device for *_, device in show_map(Model()).rows} == {"cpu"}
    assert {device for *_, device in show_map(empty).rows} == {"cpu"}  # as this machine would place it
    half_loaded = Model()
    half_loaded.layers.to("meta")
    assert ("in all", "21 MB", "meta") in show_map(half_loaded).rows
    placed = Model()
    placed.hf_device_map = {"": 1, "layers": "cpu"}  # type: ignore[assignment]
    assert {row[2] for row in show_map(placed).rows} == {"GPU 1", "cpu"}


@pytest.mark.slow
@pytest.mark.limit(150)
def test_of_a_sharded_weight_it_is_what_this_rank_has(run_ranks: RunRanks):
    def show() -> object:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        PartialState(cpu=True)
        model = Model()
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.layers[:6]:
            layer.up.weight = nn.Parameter(distribute_tensor(layer.up.weight, mesh, [Shard(0)]))
        return show_map(model).rows

    rows = run_ranks(show, deadline=120)[1]
    assert ("layers.0-5", "6 x 1.6 MB", "cpu") in rows


@pytest.mark.parametrize(
    ("device_map", "words"),
    [("ranks", "Write one of: 'auto'"), ({"embedding": 0}, "no device for .*layers.0.up.weight")],
)
def test_maps_that_place_nothing_are_refused(empty: Model, device_map: Mapping[str, int] | str, words: str):
    with pytest.raises(ConfigError, match=words):
        show_map(empty, device_map)

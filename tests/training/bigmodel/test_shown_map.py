"""`show_map`: what the parts of a model take, and where they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from nb_accelerate import PartialState, infer_auto_device_map, init_empty_weights, show_map
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.bigmodel.device_memory import get_balanced_memory
from nb_accelerate.training.bigmodel.shown_map import Part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fixtures.ranks import RunRanks

MB = 2**20


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


def rows(parts: tuple[Part, ...]) -> list[tuple[str, int, float, str, str]]:
    return [(part.name, part.num, part.bytes / MB, part.device, part.place) for part in parts]


@pytest.fixture
def empty() -> Model:
    with init_empty_weights():
        model = Model()
    model.head.weight = model.embedding.weight
    return model


KIB = 2**-10
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
    assert rows(shown.parts) == [
        ("scale", 1, KIB, "GPU 0", "GPU 0"),
        ("positions", 1, KIB, "GPU 0", "GPU 0"),
        ("embedding", 1, 1, "GPU 0", "GPU 0"),
        ("layers.0-1", 2, 2, "GPU 0", "GPU 0"),
        ("layers.2", 1, 2, "GPU 1", "GPU 1"),
        ("layers.3", 1, 2, "GPU 0", "cpu memory"),
        ("layers.4-5", 2, 2, "GPU 0", "disk"),
        ("layers.6", 1, 8, "GPU 0", "disk"),
    ]
    assert {place: taken / MB for place, taken in shown.places.items()} == {
        "GPU 0": 5 + 2 * KIB,
        "GPU 1": 2,
        "cpu memory": 2,
        "disk": 12,
    }
    assert shown.notes == ("head.weight: the same tensor as embedding.weight, where it counts",)


def test_a_layer_on_two_devices_is_shown_by_its_parts(empty: Model):
    parts = show_map(empty, {"": 1, "layers.3.down": "cpu", "layers.5.up": torch.device("cpu")}).parts
    assert rows(parts)[3:] == [
        ("layers.0-2", 3, 2, "GPU 1", "GPU 1"),
        ("layers.3.up", 1, 1, "GPU 1", "GPU 1"),
        ("layers.3.down", 1, 1, "GPU 1", "cpu memory"),
        ("layers.4", 1, 2, "GPU 1", "GPU 1"),
        ("layers.5.up", 1, 1, "GPU 1", "cpu memory"),
        ("layers.5.down", 1, 1, "GPU 1", "GPU 1"),
        ("layers.6", 1, 8, "GPU 1", "GPU 1"),
    ]


def test_without_a_gpu_the_cpu_computes_and_places_differ(empty: Model):
    parts = show_map(empty, {"": "cpu", "layers": "disk"}).parts
    assert {(part.device, part.place) for part in parts} == {("cpu", "cpu memory"), ("cpu", "disk")}


@pytest.mark.parametrize("way", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_before_loading_it_is_the_map_that_would_be_inferred(empty: Model, way: str, caplog: pytest.LogCaptureFixture):
    memory: dict[int | str, int | str] = {0: "11MiB", 1: "11MiB", "cpu": "20MiB"}
    limits: Mapping[int | str, int | str] = memory
    if way != "sequential":
        limits = get_balanced_memory(empty, memory, ["Block"], dtype=torch.float16, low_zero=way == "balanced_low_0")
    expected = infer_auto_device_map(empty, limits, ["Block"], dtype=torch.float16)
    caplog.clear()
    shown = show_map(empty, way, max_memory=memory, dtype="float16")
    assert shown.device_map == expected
    assert shown.limits == {"GPU 0": 11 * MB, "GPU 1": 11 * MB, "cpu memory": 20 * MB}
    assert sum(shown.places.values()) == sum(part.num * part.bytes for part in shown.parts) == 10.5 * MB + 1024
    assert caplog.records == []  # the GPUs may be those of another machine


def test_an_empty_model_is_shown_as_this_machine_would_place_it(empty: Model):
    shown = show_map(empty)
    assert shown.device_map == {"": "cpu"}
    assert set(shown.places) == {"cpu memory"}
    assert shown.limits["cpu memory"] > 100 * MB


def test_a_model_in_memory_is_shown_as_it_is():
    shown = show_map(Model())
    assert {(part.device, part.place) for part in shown.parts} == {("cpu", "cpu memory")}
    assert (shown.device_map, shown.limits) == ({}, {})
    half_loaded = Model()
    half_loaded.layers.to("meta")
    assert show_map(half_loaded).places["nowhere yet"] == 20 * MB


@pytest.mark.skipif(sys.platform != "linux", reason="which file is mapped where is read from /proc")
def test_mapped_weights_rest_in_their_files(tmp_path: Path):
    # torch maps this file; transformers and safetensors map theirs in the same way.
    torch.save(Model().state_dict(), tmp_path / "weights.bin")
    model = Model()
    model.load_state_dict(torch.load(tmp_path / "weights.bin", mmap=True), assign=True)
    model.head.weight = model.embedding.weight
    model.layers[3].up.weight.data = model.layers[3].up.weight.clone()
    model.layers[4].share_memory()  # is a mapped file for the system
    model.hf_device_map = {"": "disk"}  # type: ignore[assignment]
    shown = show_map(model)
    assert rows(shown.parts)[3:] == [
        ("layers.0-2", 3, 2, "cpu", "weights.bin"),
        ("layers.3", 1, 2, "cpu", "cpu memory, weights.bin"),
        ("layers.4", 1, 2, "cpu", "cpu memory"),
        ("layers.5", 1, 2, "cpu", "weights.bin"),
        ("layers.6", 1, 8, "cpu", "weights.bin"),
    ]
    assert shown.places["cpu memory"] == 3 * MB
    assert shown.places["mapped files"] == sum(part.num * part.bytes for part in shown.parts) - 3 * MB


def test_the_device_of_a_placed_model_is_that_which_its_map_computes_on():
    model = Model()
    model.hf_device_map = {"": 1, "layers": "cpu"}  # type: ignore[assignment]
    assert {part.device for part in show_map(model).parts} == {"GPU 1"}
    assert {part.place for part in show_map(model).parts} == {"cpu memory"}


@pytest.mark.slow
@pytest.mark.limit(150)
def test_of_a_sharded_weight_it_is_what_this_rank_has(run_ranks: RunRanks):
    def show() -> list[tuple[str, int, float, str, str]]:
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        PartialState(cpu=True)
        model = Model()
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.layers[:6]:
            layer.up.weight = nn.Parameter(distribute_tensor(layer.up.weight, mesh, [Shard(0)]))
        return rows(show_map(model).parts)

    layers = [row for row in run_ranks(show, deadline=120)[1] if row[0].startswith("layers")]
    assert layers == [("layers.0-5", 6, 1.5, "cpu", "cpu memory"), ("layers.6", 1, 8, "cpu", "cpu memory")]


def test_as_text_it_is_a_table_and_a_bar_for_each_place(empty: Model):
    text = repr(show_map(empty, DEVICE_MAP))
    table, below = text.split("\n\n")
    assert table.splitlines()[0].split("  ")[0] == "module"
    assert re.search(r"^layers\.0-1 +2 x 2\.0 MiB  GPU 0 +GPU 0$", table, re.MULTILINE)
    assert re.search(r"^layers\.6 +8\.0 MiB  GPU 0 +disk$", table, re.MULTILINE)
    bars = {line.split("  ")[0].strip(): line.count("█") for line in below.splitlines()}
    assert {name: bars[name] for name in ("GPU 0", "GPU 1", "cpu memory", "disk")} == {
        "GPU 0": 13,  # of 30, which are 12 MiB
        "GPU 1": 5,
        "cpu memory": 5,
        "disk": 30,
    }


def test_a_bar_ends_where_the_memory_of_its_device_ends(empty: Model):
    shown = show_map(empty, {"": 0, "layers": "cpu"}, max_memory={0: "4MiB", "cpu": "40MiB"})
    gpu, host, *_ = repr(shown).split("\n\n")[1].splitlines()
    assert (gpu.count("█"), gpu.count("░"), gpu.split("  ")[-1].strip()) == (1, 2, "1.0 MiB of 4.0 MiB")
    assert (host.count("█"), host.count("░"), host.split("  ")[-1].strip()) == (15, 15, "20.0 MiB of 40.0 MiB")


def test_as_html_names_are_escaped_and_rows_have_the_colour_of_their_bar():
    model = nn.Module()
    model.add_module("<b>", nn.Linear(1024, 1024, bias=False))
    model.add_module("other", nn.Linear(1024, 512, bias=False))
    html = show_map(model, {"<b>": 0, "other": 1})._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    dots = re.findall(r"color:(#\w+)\">■ </span>(GPU \d)", html)
    bars = re.findall(r"(GPU \d)</td>.*?background:(#(?!8884)\w+);width:([\d.]+)%", html)
    assert [(place, colour) for colour, place in dots] == [(place, colour) for place, colour, _ in bars]
    assert len({colour for colour, _ in dots}) == 2
    assert [width for *_, width in bars] == ["100.0", "50.0"]


@pytest.mark.parametrize(
    ("device_map", "words"),
    [("ranks", "Write one of: 'auto'"), ({"embedding": 0}, "no device for .*layers.0.up.weight")],
)
def test_maps_that_place_nothing_are_refused(empty: Model, device_map: Mapping[str, int] | str, words: str):
    with pytest.raises(ConfigError, match=words):
        show_map(empty, device_map)


def test_it_needs_nothing_of_the_notebook_half():
    code = (
        "import sys, torch\nfrom nb_accelerate import show_map\n"
        "show_map(torch.nn.Linear(2, 2))._repr_html_()\n"
        "assert not [name for name in sys.modules if name.startswith('nb_accelerate.notebook')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

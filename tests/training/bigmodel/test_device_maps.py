"""Device maps, beside accelerate's."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import accelerate.utils as theirs  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn

from nb_accelerate.errors import ConfigError
from nb_accelerate.training.bigmodel.device_map import check_device_map, clean_device_map, infer_auto_device_map
from nb_accelerate.training.bigmodel.device_memory import get_balanced_memory, get_max_memory
from nb_accelerate.training.bigmodel.sizes import compute_module_sizes
from nb_accelerate.training.bigmodel.ties import device_of, find_shared_tensors


class Block(nn.Module):
    """A residual block, which stays whole."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.ones(width))


class Stage(nn.Module):
    """Some blocks, with a parameter and perhaps a buffer beside them."""

    def __init__(self, blocks: list[nn.Module], draw: random.Random) -> None:
        super().__init__()
        if draw.random() < 0.4:
            self.gain = nn.Parameter(torch.ones(draw.randrange(1, 200)))
        self.blocks = nn.ModuleList(blocks)
        if draw.random() < 0.3:
            self.register_buffer("mask", torch.ones(draw.randrange(1, 200)))


def random_model(draw: random.Random, *, simple: bool) -> nn.Module:
    """Return a model on `meta`. A simple one has neither ties, nor tensors beside submodules."""
    with torch.device("meta"):
        width = draw.randrange(4, 40)

        def block() -> nn.Module:
            return (
                Block(width, draw.choice([width, 2 * width, 4 * width]))
                if draw.random() < 0.7
                else nn.Linear(width, width)
            )

        if simple:
            stages: list[nn.Module] = [
                nn.Sequential(*(block() for _ in range(draw.randrange(1, 5)))) for _ in range(draw.randrange(1, 6))
            ]
            return nn.Sequential(nn.Embedding(draw.randrange(10, 100), width), *stages, nn.Linear(width, 30))
        model = nn.Module()
        vocabulary = draw.randrange(10, 300)
        model.embedding = nn.Embedding(vocabulary, width)
        model.stages = nn.ModuleList(
            Stage([block() for _ in range(draw.randrange(1, 5))], draw) for _ in range(draw.randrange(1, 5))
        )
        model.head = nn.Linear(width, vocabulary, bias=draw.random() < 0.5)
        if draw.random() < 0.5:
            model.head.weight = model.embedding.weight
        if draw.random() < 0.3:
            model.again = draw.choice(list(model.modules())[1:])
        return model


def limits_of(draw: random.Random, total: float) -> dict[int | str, int]:
    limits: dict[int | str, int] = {gpu: int(total * draw.uniform(0.05, 0.8)) for gpu in range(draw.randrange(0, 4))}
    limits["cpu"] = int(total * draw.uniform(0.1, 2.0))
    return limits


def bytes_by_device(model: nn.Module, device_map: dict[str, Any]) -> dict[Any, float]:
    found: dict[Any, float] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        device = device_of(name, device_map)
        found[device] = found.get(device, 0) + tensor.numel() * tensor.element_size()
    return found


def units(name: str, module: nn.Module | None) -> list[str]:
    """Return the names of the blocks, layers and tensors that visit a device by themselves."""
    if module is None or isinstance(module, Block) or not any(module.children()):
        return [name]
    parts: list[tuple[str, Any]] = [
        *module.named_children(),
        *((own, None) for own, _ in module.named_parameters(recurse=False)),
        *((own, None) for own, _ in module.named_buffers(recurse=False)),
    ]
    return [unit for part, child in parts for unit in units(f"{name}.{part}" if name else part, child)]


def is_feasible(model: nn.Module, device_map: dict[str, Any], limits: dict[Any, int], *, stay: bool) -> bool:
    """Whether each device has room for what is on it and for the largest block that visits it.

    Buffers of what is offloaded may ``stay`` on the first GPU.
    """
    used, sizes = bytes_by_device(model, device_map), compute_module_sizes(model)
    buffers, modules = compute_module_sizes(model, buffers_only=True), dict(model.named_modules(remove_duplicate=False))

    def visitor(*away: str) -> float:
        visits = [unit for name, at in device_map.items() if at in away for unit in units(name, modules.get(name))]
        return max((sizes.get(unit, 0) for unit in visits), default=0)

    gpus = [device for device in limits if isinstance(device, int)]
    visits = {"cpu": visitor("disk")}
    if gpus:
        staying = sum(buffers.get(name, 0) for name, at in device_map.items() if at in ("cpu", "disk"))
        visits[gpus[0]] = visitor("cpu", "disk") + stay * staying
    return all(
        used.get(device, 0) + (visits.get(device, 0) if used.get(device) else 0) <= limit
        for device, limit in limits.items()
    )


def theirs_or_none(model: nn.Module, **options: Any) -> dict[str, Any] | None:
    """Return accelerate's map; None where it raises, or leaves a tensor without a device."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = dict(theirs.infer_auto_device_map(model, **options))
            theirs.check_device_map(model, found)
    except (IndexError, ValueError):
        return None
    return found


def random_case(seed: int) -> tuple[nn.Module, dict[Any, int]]:
    draw = random.Random(seed)
    model = random_model(draw, simple=seed % 2 == 0)
    return model, limits_of(draw, compute_module_sizes(model)[""])


@pytest.mark.parametrize(
    ("fallback", "stay"),
    [
        (False, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, False), (True, False), (True, True))),
    ],
)
def test_maps_are_those_of_accelerate_or_have_more_on_the_first_devices(fallback: bool, stay: bool) -> None:
    options: dict[str, Any] = {"no_split_module_classes": ["Block"], "fallback_allocation": fallback}
    options["offload_buffers"] = not stay
    equal = 0
    for seed in range(2400, 2550):
        model, limits = random_case(seed)
        ours = infer_auto_device_map(model, limits, **options)
        check_device_map(model, ours)
        for group in find_shared_tensors(model):
            assert len({device_of(name, ours) for name in group}) == 1, seed
        modules = dict(model.named_modules(remove_duplicate=False))
        assert not any(isinstance(modules[name.rpartition(".")[0]], Block) for name in ours if name), seed
        assert is_feasible(model, ours, limits, stay=stay), seed

        expected = theirs_or_none(model, max_memory=dict(limits), **options)
        equal += ours == expected
        if expected is None or ours == expected or not is_feasible(model, expected, limits, stay=stay):
            continue
        # No room is kept for visitors that do not come: a device that is filled earlier has more of the model.
        order = [*limits, "disk"]
        of_ours, of_theirs = bytes_by_device(model, ours), bytes_by_device(model, expected)
        assert [of_ours.get(device, 0) for device in order] >= [of_theirs.get(device, 0) for device in order], seed
    assert equal > (30 if fallback else 60)


def test_balanced_memory_is_that_of_accelerate() -> None:
    for seed in range(30):
        model, limits = random_case(seed)
        for low_zero in (False, True):
            for whole in (None, ["Block"], "Block"):
                ours = get_balanced_memory(model, limits, whole, low_zero=low_zero)
                assert ours == theirs.get_balanced_memory(model, dict(limits), whole, low_zero=low_zero), seed


def test_balanced_maps_give_each_gpu_a_like_part() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(60)))
    limits = get_balanced_memory(model, {0: "1MB", 1: "1MB", 2: "1MB", "cpu": "1MB"})
    used = bytes_by_device(model, infer_auto_device_map(model, limits))
    assert set(used) == {0, 1, 2}
    assert max(used.values()) <= 1.6 * min(used.values())


def test_all_parts_that_ties_join_come_to_one_device() -> None:
    parts = [nn.Linear(10, 10, bias=False) for _ in range(6)]
    parts[3].weight = parts[0].weight
    parts[3].scale = nn.Parameter(torch.ones(10))
    parts[5].scale = parts[3].scale
    model = nn.Sequential(*parts)
    # 0 with 3 and 5 has 2 * 400 + 40 bytes.
    found = infer_auto_device_map(model, {0: 1300, 1: 1300, "cpu": 0})
    assert found == {"0": 0, "3": 0, "5": 0, "1": 0, "2": 1, "4": 1}


def test_room_is_kept_for_visitors_only() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
    assert infer_auto_device_map(model, {0: 1600, "cpu": 0}) == {"": 0}
    assert infer_auto_device_map(model, {0: 1599, "cpu": 800}) == {"0": 0, "1": 0, "2": "cpu", "3": "cpu"}
    assert infer_auto_device_map(model, {"cpu": 1599}) == {"0": "cpu", "1": "cpu", "2": "disk", "3": "disk"}


def test_buffers_of_what_is_offloaded_stay_on_the_first_gpu() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
    model[3].register_buffer("table", torch.ones(100))
    limits: dict[int | str, int] = {0: 1200, "cpu": 10_000}
    assert list(infer_auto_device_map(model, limits, offload_buffers=True).values()).count(0) == 1
    assert list(infer_auto_device_map(model, limits).values()).count(0) == 0


def test_a_module_on_one_device_is_named_as_a_whole() -> None:
    found: dict[str, int | str] = {"a.x.0": 0, "a.x.1": 0, "a.y": 0, "b.x": 0, "b.y": 1}
    assert clean_device_map(found) is found
    assert found == {"a": 0, "b.x": 0, "b.y": 1}
    assert clean_device_map({"a.x": 0, "b.x": 1, "b.y": 1}, "b") == {"a.x": 0, "b": 1}
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert infer_auto_device_map(model, {"cpu": 1000}, clean_result=False) == {"0": "cpu", "1": "cpu"}


def test_maps_that_lack_a_tensor_are_refused_and_those_that_name_none_are_warned_of() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    check_device_map(model, {"": "cpu"})
    check_device_map(model, {"0.weight": 0, "0.bias": 0, "1": "cpu"})
    with pytest.raises(ConfigError, match=r"device for 0\.bias, 1\.weight"):
        check_device_map(model, {"0.weight": 0})
    with pytest.warns(UserWarning, match="does not have: 2"):
        check_device_map(model, {"": 0, "2": 1})


def test_text_in_limits_becomes_bytes_in_place_as_in_accelerate() -> None:
    ours: dict[int | str, int | str] = {"cpu": "2GiB", "disk": "1KB"}
    those = dict(ours)
    get_max_memory(ours)
    theirs.get_max_memory(those)
    assert ours == those == {"cpu": 2 << 30, "disk": 1000}


def test_limits_that_cannot_be_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    assert list(get_max_memory({"disk": "1TB", "cpu": "2GiB", 1: "1GB", 0: 7})) == [0, 1, "cpu", "disk"]
    assert re.search(r"0, 1, .*sees 0", caplog.text)
    with pytest.raises(ConfigError, match="device 'gpu'"):
        get_max_memory({"gpu": 7})
    with pytest.raises(ConfigError, match="is not a size"):
        get_max_memory({"cpu": "much"})
    assert list(get_max_memory()) == ["cpu"]


def test_the_way_of_each_part_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), {"cpu": 440}, verbose=True)
    assert capsys.readouterr().out.splitlines() == ["0: disk (440 bytes)", "1: disk (440 bytes)"]

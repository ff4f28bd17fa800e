"""The modules of accelerate's names, and the page that lists what they lack."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from structure.parity import DIFFERENCES, NO_EXCUSE, OUT_OF_SCOPE, PAGE, ROOT, SHOWN_IN, reason
from torch import nn

import nb_accelerate.utils

MODULES = ("state", "data_loader", "optimizer", "scheduler", "tracking", "logging", "local_sgd", "launchers")
PARTS = tuple(module.name for module in pkgutil.iter_modules(nb_accelerate.utils.__path__))


def _names(path: str) -> dict[str, object]:
    """The public names of a module that passes names on: those of ``__all__``, else all it imports."""
    module = importlib.import_module(f"nb_accelerate.{path}")
    public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return {name: getattr(module, name) for name in public}


@pytest.mark.parametrize("path", [*MODULES, *(f"utils.{part}" for part in PARTS)])
def test_a_module_of_accelerates_name_has_every_name_it_lists(path: str):
    names = _names(path)
    assert names
    assert None not in names.values()


def test_utils_has_the_names_of_its_modules_and_no_others():
    names: dict[str, object] = {}
    for part in PARTS:
        names |= _names(f"utils.{part}")
    assert sorted(names) == nb_accelerate.utils.__all__
    for name, value in names.items():
        assert getattr(nb_accelerate.utils, name) is value, name
    assert set(nb_accelerate.utils.__all__) <= set(dir(nb_accelerate.utils))


def test_no_name_is_listed_by_two_modules_of_utils():
    listed = [name for part in PARTS for name in _names(f"utils.{part}")]
    assert len(listed) == len(set(listed))


def test_constants_are_those_of_accelerate():
    theirs = vars(pytest.importorskip("accelerate.utils.constants"))
    wanted = {name: value for name, value in theirs.items() if name.isupper()}
    assert len(wanted) > 35
    assert {name: getattr(nb_accelerate.utils.constants, name, None) for name in wanted} == wanted


def test_helpers_of_modeling_return_what_accelerates_do():
    theirs = pytest.importorskip("accelerate.utils.modeling")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(3, 4))
    model[2].weight = model[0].weight
    model[1].register_buffer("extra", torch.ones(5), persistent=False)
    sizes, children = theirs.compute_module_sizes(model), list(model.named_children())
    for name, arguments in {
        "compute_module_total_buffer_size": [(model,), (model, "float16")],
        "get_non_persistent_buffers": [(model[1],), (model,), (model, True), (model[1:], True)],
        "get_module_size_with_ties": [(["2.weight"], sizes["0"], sizes, children), ([], 5, sizes, children)],
    }.items():
        for given in arguments:
            assert getattr(nb_accelerate.utils.modeling, name)(*given) == getattr(theirs, name)(*given), name
    assert nb_accelerate.utils.modeling.get_non_persistent_buffers(model, True, True) == {"1.extra"}
    ours, those = (module.get_state_dict_offloaded_model(model) for module in (nb_accelerate.utils.modeling, theirs))
    assert ours.keys() == those.keys()
    assert all(torch.equal(ours[key], those[key]) for key in ours)
    for module in (nb_accelerate.utils.modeling, theirs):
        found = module.get_state_dict_from_offload(model[2], "2.weight", {"2.weight": "", "0.weight": ""})
        assert found.pop("2.weight").equal(model[2].weight)
        assert found == {"0.weight": ""}
    layout = {"dp_shard_size": 2, "tp_size": 4}
    accelerate = importlib.import_module("accelerate")
    mesh = nb_accelerate.ParallelismConfig(**layout)._get_mesh()
    assert mesh == accelerate.ParallelismConfig(**layout)._get_mesh() == (("dp_shard", "tp"), (2, 4))


@pytest.mark.slow
def test_modules_need_no_import_of_their_own():
    code = """
import nb_accelerate as accelerate
assert not hasattr(accelerate, "no_such_thing")
accelerate.utils.operations.gather, accelerate.utils.set_seed, accelerate.state.PartialState, accelerate.logging
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    for name in MODULES:
        assert getattr(nb_accelerate, name) is importlib.import_module(f"nb_accelerate.{name}")
    for name in PARTS:
        assert getattr(nb_accelerate.utils, name) is importlib.import_module(f"nb_accelerate.utils.{name}")


def test_a_name_that_utils_lacks_points_to_the_page():
    with pytest.raises(AttributeError, match=r"parity\.md"):
        nb_accelerate.utils.torch_xla_of_no_kind  # noqa: B018


def test_utils_imports_torch_when_it_is_used():
    code = """
import sys
from nb_accelerate import is_rich_available
from nb_accelerate.utils import ProjectConfiguration, compare_versions, is_wandb_available, patch_environment
is_wandb_available()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_what_the_page_lists_is_not_there():
    """The other direction needs accelerate, and is slow."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("- `accelerate"):
            continue
        module, *names = re.findall(r"`([^`]+)`", line)
        for name in names:
            if re.fullmatch(r"\w+", name):
                place = importlib.import_module(
                    "nb_accelerate.utils" if module == "accelerate.hooks" else _ours(module)
                )
                assert not hasattr(place, name), f"{name} exists; run python tests/structure/parity.py"


def _ours(module: str) -> str:
    return "nb_accelerate.utils" if module == "accelerate.hooks" else module.replace("accelerate", "nb_accelerate", 1)


def test_a_name_without_a_reason_is_noticed():
    assert reason("accelerate.utils: gather_for_breakfast") == NO_EXCUSE
    assert reason("accelerate.utils: fsdp2_prepare_model") == NO_EXCUSE
    assert reason("accelerate: DistributedType.MULTI_NPU") == OUT_OF_SCOPE


def test_each_difference_on_the_page_has_a_test_and_each_test_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    tests = re.findall(r"^def (test_\w+)", SHOWN_IN.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(tests) == sorted(DIFFERENCES)
    for test, text in DIFFERENCES.items():
        assert f"- {text} (`{test}`)" in page, "run python tests/structure/parity.py"


def test_nothing_is_missing_without_a_reason():
    assert NO_EXCUSE not in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.limit(120)
def test_the_page_lists_all_that_accelerate_has_and_we_have_not():
    pytest.importorskip("accelerate")
    script = Path(__file__).with_name("parity.py")
    run = subprocess.run(
        [sys.executable, str(script), "--check"], cwd=ROOT, timeout=100, check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, f"{run.stderr}\nRun python tests/structure/parity.py"

"""``mixed_precision="fp8"``: what is refused, with torchao or without it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from nb_accelerate import utils
from nb_accelerate.base.config.distributed import PrecisionType
from nb_accelerate.base.config.file import read_config
from nb_accelerate.base.config.kwargs import AutocastKwargs, GradScalerKwargs
from nb_accelerate.base.devices import MPS
from nb_accelerate.base.devices.cuda import CUDA
from nb_accelerate.errors import ConfigError, MissingDependencyError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.precision import select_precision
from nb_accelerate.utils import AORecipeKwargs


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (MPS, "torch does not offer it on mps devices. Write mixed_precision='no' or 'fp16' or 'bf16'"),
        (replace(CUDA, supports_fp8=lambda: False), "no units for 8-bit floating point .* 8.9 .*'bf16' or 'fp16'"),
    ],
    ids=["mps", "an older GPU"],
)
def test_hardware_that_does_not_compute_in_8_bits_is_refused(kind, message):
    with pytest.raises(ConfigError, match=f"mixed_precision='fp8' was asked for.*{message}"):
        select_precision(PrecisionType.FP8, kind, autocast=AutocastKwargs(), scaler=GradScalerKwargs())


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingDependencyError, match=r"mixed_precision='fp8' needs .*install torchao"):
        Accelerator(cpu=True, mixed_precision="fp8")


@pytest.mark.parametrize(("backend", "library"), [("TE", "TransformerEngine"), ("msamp", "MS-AMP")])
def test_other_libraries_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, backend, library):
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", backend)
    with pytest.raises(ConfigError, match=f"asks for {library}.*ACCELERATE_FP8_BACKEND=AO"):
        Accelerator(cpu=True, mixed_precision="fp8")


def test_recipes_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="gathered in bfloat16"):
        AORecipeKwargs(enable_fsdp_float8_all_gather=True)
    with pytest.raises(ConfigError, match=r"mixed_precision='bf16'.*Write mixed_precision='fp8'"):
        Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[AORecipeKwargs()])


def test_a_configuration_file_says_which_library(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("mixed_precision: fp8\nfp8_config:\n  backend: TE\n  pad_inner_dim: false\n")
    file = read_config(path)
    assert file is not None
    variables = file.as_variables()
    assert (variables["ACCELERATE_FP8_BACKEND"], variables["ACCELERATE_FP8_PAD_INNER_DIM"]) == ("TE", "false")


def test_what_is_not_installed_has_made_no_layers_and_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    made_elsewhere = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(made_elsewhere(1, 1)))
    assert utils.has_transformer_engine_layers(model)
    assert not utils.has_transformer_engine_layers(model[0])
    assert not utils.has_ao_layers(model)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ImportError, match="pip install torchao"):
        utils.convert_model_to_fp8_ao(model)
    with pytest.raises(ImportError, match=r"wants_it needs .*install torchao"):
        utils.torchao_required(_wants_it)(model)


def _wants_it(_: nn.Module) -> None:
    """Need torchao."""

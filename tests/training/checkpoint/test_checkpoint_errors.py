"""Errors of saving and loading checkpoints: what is wrong is said, before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.ranks import RunRanks
from torch import nn
from training.checkpoint.test_checkpoints import Counter, _filled

from nb_accelerate.base.config.project import ProjectConfiguration
from nb_accelerate.errors import CheckpointError, ConfigError
from nb_accelerate.training.accelerator import Accelerator
from nb_accelerate.training.checkpoint.model import load_checkpoint_in_model
from nb_accelerate.training.process import context


def _saved(where: Path) -> tuple[Accelerator, nn.Module]:
    accelerator, model = _filled(1.0)
    accelerator.save_state(where)
    with torch.no_grad():
        model.weight.fill_(5.0)
    return accelerator, model


def test_the_home_folder_is_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    project = ProjectConfiguration(project_dir="~/project", automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    assert accelerator.save_state() == tmp_path / "project" / "checkpoints" / "checkpoint_0"
    accelerator.save_model(nn.Linear(2, 2), "~/model")
    load_checkpoint_in_model(nn.Linear(2, 2), "~/model", strict=True)
    assert {path.name for path in tmp_path.iterdir()} == {"project", "model"}


def test_a_state_that_is_loaded_before_prepare_is_refused(tmp_path: Path):
    _saved(tmp_path)
    context.reset()
    with pytest.raises(CheckpointError, match="after prepare"):
        Accelerator(cpu=True).load_state(tmp_path)


def test_a_file_of_the_old_format_that_was_cut_off_is_named(tmp_path: Path):
    accelerator, _ = _saved(tmp_path)
    accelerator.save_state(tmp_path, safe_serialization=False)
    whole = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        accelerator.load_state(tmp_path)


def test_a_model_that_does_not_fit_is_refused_with_the_names(tmp_path: Path):
    _saved(tmp_path)
    context.reset()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2, bias=False)
    model, _ = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="bias, which the model"):
        accelerator.load_state(tmp_path)
    assert torch.equal(model.weight, before)


def test_the_numbers_of_registered_objects_have_to_agree(tmp_path: Path):
    accelerator, _ = _saved(tmp_path)
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl"):
        accelerator.load_state(tmp_path)
    accelerator.save_state(tmp_path)
    context.reset()
    fewer, _ = _filled(1.0)
    with pytest.raises(CheckpointError, match=r"1 registered .* 0"):
        fewer.load_state(tmp_path)


def test_a_rank_that_left_out_a_save_has_its_numbers_in_the_next(run_ranks: RunRanks, tmp_path: Path):
    def save_and_load(where: str) -> tuple[bool, list[str]]:
        import logging

        from training.checkpoint.test_checkpoints import _parts

        from nb_accelerate import Accelerator

        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        accelerator = Accelerator(cpu=True)
        loader = _parts(accelerator)[3]
        if accelerator.is_main_process:
            accelerator.save_state(f"{where}/best")
        next(iter(loader))
        accelerator.save_state(f"{where}/last")
        drawn = torch.rand(1)
        accelerator.wait_for_everyone()
        logging.getLogger("nb_accelerate").addHandler(handler)
        accelerator.load_state(f"{where}/last")
        return bool(torch.rand(1) == drawn), lines

    assert run_ranks(save_and_load, str(tmp_path)) == [(True, []), (True, [])]


def test_a_file_that_would_run_code_is_refused_unless_it_is_trusted(tmp_path: Path):
    accelerator, _ = _filled(1.0)
    counter = Counter()
    counter.count = Path("somewhere")
    accelerator.register_for_checkpointing(counter)
    accelerator.save_state(tmp_path)
    counter.count = 0
    name = f"{type(Path()).__module__}.{type(Path()).__qualname__}"
    with pytest.raises(CheckpointError, match=rf"would run its code.*add_safe_globals\(\[{name}\]\)"):
        accelerator.load_state(tmp_path)
    assert counter.count == 0
    with torch.serialization.safe_globals([type(Path())]):
        accelerator.load_state(tmp_path)
    assert counter.count == Path("somewhere")
    counter.count = 0
    accelerator.load_state(tmp_path, load_kwargs={"weights_only": False})
    assert counter.count == Path("somewhere")
    torch.save({"weight": Path("somewhere")}, tmp_path / "weights.bin")
    with pytest.raises(CheckpointError, match="would run its code"):
        load_checkpoint_in_model(nn.Linear(2, 2), tmp_path / "weights.bin")


def test_numbers_of_numpy_run_no_code(tmp_path: Path):
    accelerator, _ = _filled(1.0)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    state = {"best": np.float64(0.5), "steps": np.int64(3), "history": np.arange(3.0), "names": np.array(["a", "b"])}
    counter.count = state
    accelerator.save_state(tmp_path)
    counter.count = None
    accelerator.load_state(tmp_path)
    assert str(counter.count) == str(state)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a, where: a.save_state(), "automatic_checkpoint_naming=True"),
        (lambda a, where: a.load_state(), "input_dir"),
        (lambda a, where: a.load_state(where / "nowhere"), "There is no folder"),
        (lambda a, where: a.load_state(where, map_location="gpu"), "on_device"),
        (lambda a, where: a.register_for_checkpointing(Counter(), object()), "state_dict"),
        (lambda a, where: a.save_state(where, exclude=True), "exclude"),
    ],
)
def test_arguments_that_cannot_be(tmp_path: Path, call: Any, words: str):
    accelerator, _ = _filled(1.0)
    with pytest.raises(ConfigError, match=words):
        call(accelerator, tmp_path)
    assert accelerator.core.registry.objects == []

"""The blocks of accelerate's quick tour do on an XLA device what they do on the CPU, where other tests check them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training.tours import (
    test_evaluation_and_processes as evaluation,
    test_saving as saving,
    test_training as training,
)
from training.tours.stage import START, play

from nb_accelerate.training.process import context

BLOCKS = {
    "main use": (START, training.MAIN_USE),
    "main use, placed by hand": (START, training.MAIN_USE_ON_A_DEVICE),
    "four objects": (START, training.FOUR_OBJECTS),
    "accumulation": (training.ACCUMULATION,),
    "clipping": (training.CLIPPING,),
    "precision": (
        training.PRECISION.replace("fp16", "bf16").replace("iter(dataloader)", "iter(accelerator.prepare(dataloader))"),
    ),
    "unwrapping": (START, training.UNWRAPPING),
    "script": (training.SCRIPT,),
    "evaluation": (START, "model = accelerator.prepare(model)", evaluation.EVALUATION),
    "evaluation with gather": (START, "model = accelerator.prepare(model)", evaluation.EVALUATION_WITH_GATHER),
    "one process": (START, evaluation.ONE_PROCESS),
    "states": (saving.STATES,),
}


@pytest.mark.may_leave("threads")  # tqdm's monitor, which lives as long as the process
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_does_what_it_does_on_the_cpu(
    started_runtime: None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, Any]] = []
    for argument in ("cpu=True", "cpu=False"):
        folder = tmp_path / argument
        folder.mkdir()
        monkeypatch.chdir(folder)
        context.reset()
        names = f"save_directory = {str(folder)!r}"
        found.append(play(names, *(block.replace("cpu=True", argument) for block in BLOCKS[name])))
        ran_on = context.current()
        assert ran_on is not None
        assert ran_on.kind.name == ("cpu" if argument == "cpu=True" else "xla")
    context.reset()
    on_cpu, on_xla = found
    assert on_xla["done"] == ["static" if word == "dynamic" else word for word in on_cpu["done"]]
    assert on_xla["references"] == on_cpu["references"]
    assert len(on_xla["predictions"]) == len(on_cpu["predictions"])
    for mine, other in zip(on_xla["predictions"], on_cpu["predictions"], strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
    assert on_xla.get("weights") == pytest.approx(on_cpu.get("weights"), abs=1e-5)

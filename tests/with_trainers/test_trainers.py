"""Published trainers compute with this package in accelerate's place what they compute with accelerate."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PACKAGES = {"accelerate": [], "nb_accelerate": [str(HERE / "in_accelerates_place.py")]}

TRAINERS = {
    "transformers": "",
    "trl": "",
    "trl_dpo": "",
    "peft": "",
    "sentence_transformers": "",
    "pytorch_accelerated": "",
    "skorch": "DistributedDataParallel is not needed when a module doesn't have any parameter",
    "torchkeras": "DistributedDataParallel is not needed when a module doesn't have any parameter",
    "denoising_diffusion_pytorch": "don't know how to restore data location",
}
"""Programs of `programs.py`, and what ends them on two ranks with accelerate: it wraps losses, and loads to "cpu:0"."""


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH")}
    return {
        **kept,
        "PYTHONPATH": str(HERE.parents[1]),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders in which each package has trained, by its name."""
    folder = tmp_path_factory.mktemp("runs")
    started = {
        package: subprocess.Popen(
            [sys.executable, *before, str(HERE / "programs.py"), str(folder / package)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(folder),
        )
        for package, before in PACKAGES.items()
    }
    try:
        for process in started.values():
            printed, _ = process.communicate(timeout=200)
            assert process.returncode == 0, printed
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
    return {package: folder / package for package in PACKAGES}


def found(folder: Path, ranks: int) -> list[list[Any]] | None:
    """What each rank has written; None if not all of them have."""
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files] if all(file.exists() for file in files) else None


@pytest.mark.limit(240)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_computes_what_it_computes_with_accelerate(runs: dict[str, Path], trainer: str, ranks: int) -> None:
    folders = {package: folder / f"{trainer}-{ranks}" for package, folder in runs.items()}
    ours = found(folders["nb_accelerate"], ranks)
    assert ours is not None, (folders["nb_accelerate"] / "0.log").read_text()
    assert [package for package, *_ in ours] == ["nb_accelerate"] * ranks
    theirs = found(folders["accelerate"], ranks)
    if ranks == 2 and (reason := TRAINERS[trainer]):
        assert theirs is None, "accelerate runs it now: compare"
        assert reason in (folders["accelerate"] / "0.log").read_text()
        assert len({weights for *_, weights in ours}) == 1
        assert all(math.isfinite(loss) for _, losses, _ in ours for loss in losses)
        return
    assert theirs is not None, (folders["accelerate"] / "0.log").read_text()
    assert [rest for _, *rest in ours] == [rest for _, *rest in theirs]


@pytest.mark.limit(240)
def test_rehearsals_of_trainers_raise_no_alarm(tmp_path: Path) -> None:
    command = [sys.executable, *PACKAGES["nb_accelerate"], str(HERE / "rehearsals.py"), str(tmp_path)]
    subprocess.run(command, env=environment(tmp_path), cwd=tmp_path, timeout=200, check=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.keys() == TRAINERS.keys()
    for findings, steps in found.values():
        assert steps
        assert {kind for kind, _ in findings} <= {"invented"}

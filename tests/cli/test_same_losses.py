"""Scripts of the kind that people bring along, with arguments of their own: the same losses whoever starts them."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
OURS = [sys.executable, "-m", "nb_accelerate", "launch", "--cpu", "--quiet", "--num_processes=2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
# accelerate's way to several processes on CPUs leads through mpirun; its --multi_gpu starts torchrun without any GPU.
THEIRS = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2"]
THEIRS += ["--main_process_port=0"]

pytestmark = [pytest.mark.slow, pytest.mark.limit(120)]


def language_data(folder: Path) -> list[str]:
    letters = random.Random(0)
    words = ["rank", "gather", "reduce", "loss", "step", "batch"]
    text = " ".join(letters.choice(words) for _ in range(300))
    (folder / "text.txt").write_text(text)
    return ["--train_file", str(folder / "text.txt"), "--gradient_accumulation_steps", "2", "--block_size", "24"]


def table_data(folder: Path) -> list[str]:
    numbers = random.Random(0)
    for name, rows in (("train", 93), ("validation", 29)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            for _ in range(rows):
                values = [round(numbers.gauss(0, 1), 4) for _ in range(4)]
                csv.writer(file).writerow([*values, sum(value > 0 for value in values[:2])])
    return ["--train_file", str(folder / "train.csv"), "--validation_file", str(folder / "validation.csv")]


@pytest.mark.parametrize(("name", "data"), [("language_model", language_data), ("classification", table_data)])
def test_losses_are_those_of_accelerate_and_of_torchrun(
    name: str, data: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    arguments = data(tmp_path)
    environ = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HOME": str(tmp_path)}
    environ["TMPDIR"] = str(tmp_path)  # torchrun leaves folders for logs
    runs = {}
    for starter, command, library in (
        ("ours", OURS, "nb_accelerate"),
        ("torchrun", TORCHRUN, "nb_accelerate"),
        ("accelerate", THEIRS, "accelerate"),
    ):
        own = [*arguments, "--library", library, "--output", str(tmp_path / f"{starter}.json")]
        line = [*command, str(SCRIPTS / f"{name}.py"), *own]
        runs[starter] = subprocess.Popen(line, env=environ, stderr=subprocess.PIPE, text=True)
    found = {}
    for starter, run in runs.items():
        _, error = run.communicate(timeout=100)
        written = tmp_path / f"{starter}.json"
        # accelerate's ranks may abort in C++ when they exit, after they have written all ("terminate called").
        assert run.returncode == 0 or (starter == "accelerate" and written.exists()), error
        found[starter] = json.loads(written.read_text())
    assert found["ours"]["processes"] == 2
    assert found["torchrun"] == found["ours"]
    assert found["accelerate"]["processes"] == 2
    assert found["accelerate"]["losses"] == pytest.approx(found["ours"]["losses"], rel=1e-6)
    for theirs, ours in zip(found["accelerate"]["validation"], found["ours"]["validation"], strict=True):
        assert theirs == pytest.approx(ours, rel=1e-6)

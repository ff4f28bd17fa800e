"""A rank has what `xmp.spawn` gives its processes, says what it lacks, and may have all devices by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

IS_2_8 = metadata.version("torch_xla").startswith("2.8.")


@pytest.mark.limit(120)
def test_ranks_on_eight_chips_have_the_variables_that_xmp_spawn_sets() -> None:
    script = Path(__file__).with_name("topology_of_v5e.py")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    theirs, ours = json.loads(run.stdout)
    assert theirs.keys() == ours.keys() == set(map(str, range(8)))
    assert ours == theirs
    assert {one["TPU_VISIBLE_CHIPS"] for one in ours.values()} == ours.keys()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "fits: pip install 'torch_xla[tpu]=="),
        pytest.param(
            {"TPU_LIBRARY_PATH": "/lib/old.so"},
            "variable before torch_xla",
            marks=pytest.mark.skipif(IS_2_8, reason="torch_xla 2.8 ends the process where it cannot open a library"),
        ),
    ],
)
@pytest.mark.may_leave(*(["files"] if IS_2_8 else []))  # torch's, when the process is ended after the error
def test_a_libtpu_that_is_missing_or_another_is_named(variables: dict[str, str], words: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "from nb_accelerate import Accelerator; Accelerator()"],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PJRT_DEVICE": "TPU"} | variables,
    )
    assert "ConfigError: The XLA runtime" in run.stderr
    assert words in run.stderr


@pytest.mark.limit(100)
def test_a_model_is_sharded_over_all_devices_of_one_process(tmp_path: Path) -> None:
    script = Path(__file__).with_name("spmd_checks.py")
    run = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr

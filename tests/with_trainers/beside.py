"""Run a case of `placed_models.py` with either package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PLACES = {"accelerate": [], "nb_accelerate": [str(HERE / "as_accelerate.py")]}


def computed(package: str, case: str, folder: Path) -> Any:
    """What a case computes with a package as ``accelerate``."""
    folder.mkdir()
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH")}
    run = subprocess.run(
        [sys.executable, *PLACES[package], str(HERE / "placed_models.py"), case, str(folder)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**kept, "TMPDIR": str(folder), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)

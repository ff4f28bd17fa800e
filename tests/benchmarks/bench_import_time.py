"""What the imports of a notebook's first cell cost, against an interpreter that imports nothing."""

from __future__ import annotations

import functools
import subprocess
import sys

from turns import medians, ratios

PROGRAMS = {
    "python": "",
    "import nb_accelerate": "import nb_accelerate",
    "its notebook_launcher": "from nb_accelerate import notebook_launcher",
    "import IPython": "import IPython",
    "import torch": "import torch",
}


def _run(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def measure() -> list[str]:
    actions = {name: functools.partial(_run, program) for name, program in PROGRAMS.items()}
    return ratios(medians(actions, rounds=5), base="python")

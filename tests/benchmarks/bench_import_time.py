"""What the imports of a notebook's first cell cost, against an interpreter that imports nothing."""

from __future__ import annotations

import functools
import subprocess
import sys

from turns import medians, ratios

_SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.history_manager.enabled = False
"""

PROGRAMS = {
    "python": "",
    "import nb_accelerate": "import nb_accelerate",
    "its notebook_launcher": "from nb_accelerate import notebook_launcher",
    "a shell of IPython": _SHELL,
    "the same, %load_ext nb_accelerate": f"{_SHELL}shell.run_line_magic('load_ext', 'nb_accelerate')",
    "import torch": "import torch",
}


def _run(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


def measure() -> list[str]:
    actions = {name: functools.partial(_run, program) for name, program in PROGRAMS.items()}
    return ratios(medians(actions, rounds=5), base="python")

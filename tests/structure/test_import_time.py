from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from structure.layers import TRAINING, read_picture, room_of

import nb_accelerate

PACKAGE = Path(nb_accelerate.__file__).parent


def _fresh(code: str) -> dict[str, str | list[str]]:
    """Run code in a new interpreter; it leaves what it found in ``found``."""
    program = f"import json, sys\n{code}\nprint(json.dumps(found))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(run.stdout.splitlines()[-1])


IMPORT = """
before = set(sys.modules)
import nb_accelerate
found = {"modules": sorted(set(sys.modules) - before)}
"""

LOAD_EXTENSION = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.history_manager.enabled = False
before = set(sys.modules)
shell.run_line_magic("load_ext", "nb_accelerate")
found = {"modules": sorted(set(sys.modules) - before)}
shell.run_line_magic("unload_ext", "nb_accelerate")
"""

NO_LIBRARY = {"nb_accelerate"}
FOR_PROCESSES = {"nb_accelerate", "IPython", "cloudpickle", "psutil"}


@pytest.mark.parametrize(("code", "allowed"), [(IMPORT, NO_LIBRARY), (LOAD_EXTENSION, FOR_PROCESSES)])
def test_it_imports_few_libraries_and_not_torch(code: str, allowed: set[str]):
    modules = _fresh(code)["modules"]
    assert "nb_accelerate" in modules
    # __mp_main__ and the private names are other names of modules of the standard library.
    packages = {name.partition(".")[0] for name in modules if not name.startswith("_")}
    assert packages - sys.stdlib_module_names - {"typing_extensions"} <= allowed


def test_no_module_of_the_notebook_half_or_the_base_brings_torch_along():
    rooms = read_picture(PACKAGE.parent)
    names = [
        "nb_accelerate." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
        for file in sorted(PACKAGE.rglob("*.py"))
        if (room := room_of(file, PACKAGE)) is not None
        if rooms[room].half != TRAINING and file.stem != "__main__"
    ]
    assert "nb_accelerate.cli.launch" in names
    code = f"""
import importlib
found = {{}}
for name in {names!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        found[name] = "torch"
        break
"""
    assert _fresh(code) == {}


LAUNCH_AND_COMMAND_LINE = """
import importlib, pathlib
import nb_accelerate.cli
for path in pathlib.Path(nb_accelerate.cli.__file__).parent.glob("*.py"):
    if path.stem != "notebook":
        importlib.import_module(f"nb_accelerate.cli.{path.stem}")
def rank():
    import sys
    return sorted(sys.modules)
found = {"rank": nb_accelerate.notebook_launcher(rank, num_processes=1)[0], "here": sorted(sys.modules)}
"""


def test_what_only_a_notebook_run_by_the_command_line_needs_is_imported_there():
    needed = {"nbclient", "nbconvert", "nbformat"}
    assert {name: needed & {*modules} for name, modules in _fresh(LAUNCH_AND_COMMAND_LINE).items()} == {
        "rank": set(),
        "here": set(),
    }


@pytest.mark.slow
def test_a_module_that_brings_torch_along_is_noticed():
    assert "torch" in _fresh('import torch\nfound = {"modules": sorted(sys.modules)}')["modules"]

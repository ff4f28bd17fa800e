"""Every name that transformers, diffusers, peft and trl import from accelerate is here, under the same module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from structure.imported_names import LIBRARIES, names_in, read_list

TESTS = Path(__file__).parents[1]

ABSENT: dict[str, str] = {}
"""Names that are not here on purpose, and why."""

RESOLVE = """
import importlib, json, sys
from with_trainers.as_accelerate import take_the_place

take_the_place()
unresolved = {}
for name in json.load(sys.stdin):
    module, _, last = name.rpartition(".")
    try:
        if module:
            exec(f"from {module} import {last}")
        else:
            importlib.import_module(name)
    except ImportError as error:
        unresolved[name] = str(error)
theirs = [name for name, module in sys.modules.items() if module.__name__.partition(".")[0] == "accelerate"]
print(json.dumps([unresolved, theirs]))
"""


@pytest.mark.slow
@pytest.mark.limit(180)
def test_every_imported_name_resolves_with_this_package_as_accelerate():
    names = read_list()
    run = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input=json.dumps(list(names)),
        capture_output=True,
        text=True,
        timeout=150,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
    )
    unresolved, theirs = json.loads(run.stdout)
    assert theirs == []
    missing = {name: f"{why}; imported by {', '.join(names[name])}" for name, why in unresolved.items()}
    assert {name: why for name, why in missing.items() if name not in ABSENT} == {}
    assert ABSENT.keys() == missing.keys(), "take out what is here now"


def test_the_list_has_the_names_of_each_library():
    users = read_list().values()
    assert {library for names in users for library in names} == set(LIBRARIES)
    assert all(users)


def test_names_are_read_from_imports_and_lookups():
    source = """
if is_accelerate_available():
    import accelerate.hooks
    from accelerate import Accelerator
    from accelerate.utils.memory import (clear_device_cache, release_memory as free)
    from .accelerate import local
    accelerate.hooks.AlignDevicesHook(1)
"""
    assert names_in(source) == {
        "accelerate.Accelerator",
        "accelerate.hooks",
        "accelerate.hooks.AlignDevicesHook",
        "accelerate.utils.memory.clear_device_cache",
        "accelerate.utils.memory.release_memory",
    }
    assert names_in("from .accelerate import a\naccelerate.b = 1") == set()

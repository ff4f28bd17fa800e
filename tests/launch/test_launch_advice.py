"""Each option and each command line that a message of the package advises is tried where it is printed."""

from __future__ import annotations

import ast
import io
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch.test_plan import chips, gpus, plan

import nb_accelerate
from nb_accelerate.cli import main
from nb_accelerate.compat.launching import write_basic_config
from nb_accelerate.errors import NbAccelerateError
from nb_accelerate.notebook.launch import notebook_launcher
from nb_accelerate.notebook.pool.options import PoolOptions

ADVICE = r"(?:[Ww]rite|:) (?:[A-Z_]*=auto )?(start_method=|num_processes=|nb-accelerate [a-z]+)"


def advised() -> set[tuple[str, str]]:
    """Modules with the options of a launch, and the commands, that their messages advise."""
    root, found = Path(nb_accelerate.__file__).parent, set()
    for path in root.rglob("*.py"):
        source = path.read_text()
        if not re.search("(start_method|num_processes)=[^=]|nb-accelerate ", source):
            continue
        for node in ast.walk(ast.parse(source)):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(getattr(part, "value", "")) for part in parts if isinstance(part, ast.Constant))
            found |= {(path.relative_to(root).as_posix(), advice.rstrip("=")) for advice in re.findall(ADVICE, text)}
    return found


def launch_one(**options: Any) -> list[Any]:
    taken = (row for row in ())
    options = {"num_processes": 1, "start_method": "forkserver", "progress": "off", **options}
    return notebook_launcher(lambda: [*taken], **options)


OPTIONS: dict[str, tuple[tuple[str, str], Callable[..., object], dict[str, Any]]] = {
    # Who prints it, what is called, and with which options.
    "ranks in this process": (
        ("notebook/launch/plan.py", "num_processes"),
        plan,
        {"num_processes": 2, "start_method": "inline"},
    ),
    "more ranks than GPUs": (
        ("notebook/launch/plan.py", "num_processes"),
        lambda **options: plan(gpus("0", "1"), **options),
        {"num_processes": 3},
    ),
    "some chips of a TPU": (
        ("notebook/launch/plan.py", "num_processes"),
        lambda **options: plan(chips(8), **options),
        {"num_processes": 3},
    ),
    "chips by number": (
        ("notebook/launch/plan.py", "num_processes"),
        lambda num_processes=None, **_: plan(
            chips(8), num_processes=num_processes, devices=None if num_processes else [0]
        ),
        {},
    ),
    "a fork after CUDA": (
        ("notebook/launch/plan.py", "start_method"),
        lambda **options: plan(gpus("0", in_use="CUDA was used in this notebook"), **options),
        {"start_method": "fork"},
    ),
    "what cannot be sent": (("notebook/launch/values.py", "start_method"), launch_one, {}),
    "ranks of cells that are forked": (
        ("notebook/pool/options.py", "start_method"),
        PoolOptions,
        {"start_method": "fork"},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_is_advised_works(name: str) -> None:
    (_, option), call, options = OPTIONS[name]
    with pytest.raises(NbAccelerateError) as caught:
        call(**options)
    advice = re.search(rf"write {option}=('?)([\w-]+)\1", str(caught.value), re.IGNORECASE)
    assert advice is not None, caught.value
    call(**{**options, option: advice[2] if advice[1] else int(advice[2])})


def run(*words: str, answers: str = "\n" * 40) -> None:
    """Run a command line in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO(answers))
        main([*words])


def launch(folder: Path, *flags: str, **variables: str) -> None:
    (folder / "train.py").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        run("launch", "--cpu", *flags, str(folder / "train.py"))


COMMANDS: dict[str, tuple[tuple[str, str], Callable[[Path], object]]] = {
    "no configuration": (
        ("base/config/file.py", "nb-accelerate config"),
        lambda folder: launch(folder, f"--config_file={folder / 'none.yaml'}"),
    ),
    "no answers": (("cli/config.py", "nb-accelerate config"), lambda _: run("config", answers="")),
    "an engine for a script": (
        ("cli/launch.py", "nb-accelerate launch"),
        lambda folder: launch(folder, NB_ACCELERATE_ENGINE="ray"),
    ),
    "there already": (
        ("cli/config.py", "nb-accelerate config"),
        lambda _: (run("config", "default"), run("config", "default")),
    ),
    "there already, from Python": (
        ("compat/launching.py", "nb-accelerate config"),
        lambda _: (write_basic_config(), write_basic_config()),
    ),
    "no such run": (("cli/running.py", "nb-accelerate status"), lambda _: run("stop", "1")),
}

ELSEWHERE = {
    ("cli/running.py", "nb-accelerate stop"): "cli/test_running.py, with a run that does not end",
    ("compat/refused.py", "nb-accelerate launch"): "has FLAGS and script.py for what the user has",
    ("notebook/launch/engines/ray_driver.py", "num_processes"): "with_ray",
    ("training/process/xla.py", "num_processes"): "with_xla",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_advised_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    _, act = COMMANDS[name]
    try:
        act(tmp_path)
        said = ""
    except (NbAccelerateError, SystemExit) as error:
        said = str(error)
    printed = capsys.readouterr()
    advice = re.search(
        r"(?::|Write) (?:(\w+)=(\w+) )?nb-accelerate ((?:(?!\. )[^\n])*)", said + printed.out + printed.err
    )
    assert advice is not None, (said, printed)
    if advice[1]:
        monkeypatch.setenv(advice[1], advice[2])
    run(*shlex.split(advice[3]))


def test_each_option_and_each_command_that_is_advised_has_a_trial() -> None:
    tried = {source for source, *_ in OPTIONS.values()} | {source for source, _ in COMMANDS.values()}
    assert advised() == tried | ELSEWHERE.keys()

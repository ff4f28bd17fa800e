"""``CONTRIBUTING.md`` is held to the package: what it names exists, and its tables are tried on a copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nb_accelerate.base.config.checks import suggest
from nb_accelerate.training.tracking.select import TRACKERS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nb_accelerate"
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATH = re.compile(r"[\w.]+(?:/[\w.]+)*(?:/|\.pyi?|\.toml|\.md)")
NEW = "NAME"
EXAMPLE = "training/tracking/diary.py"


def _rows() -> dict[str, list[str]]:
    """The rows of the table of variants: cells by what is added."""
    table = PAGE[PAGE.index("| to add a ") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {name: rest for name, *rest in cells}


def _paths(text: str) -> list[str]:
    """The files and folders that a text names in backticks."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [word for word in re.findall(r"`([^`\n]+)`", prose) if PATH.fullmatch(word)]


def _exists(path: str) -> bool:
    """Whether a path of the page is there, below the root or below the package; of a new file, its folder."""
    if NEW in path:
        path = path.rpartition("/")[0]
    return any((base / path).exists() for base in (ROOT, PACKAGE))


def test_every_file_it_and_its_tables_name_exists():
    beside = [ROOT / "tests/structure/what_changes.md", ROOT / "tests/second_device/README.md"]
    named = _paths("".join([PAGE, *(page.read_text(encoding="utf-8") for page in beside)]))
    assert {"notebook/launch/plan.py", "training/tracking/NAME.py", "tests/structure/test_layers.py"} <= set(named)
    assert [path for path in named if not _exists(path) and path != EXAMPLE] == []


def test_a_file_that_is_not_there_is_noticed():
    assert not _exists("notebook/launch/plans.py")
    assert not _exists("no_such_room/NAME.py")
    assert _paths("`launch/plans.py` and `Accelerator(...)` and `decks/`") == ["launch/plans.py", "decks/"]


def test_the_names_in_its_table_are_in_the_files_beside_them():
    rows = _rows()
    assert {"tracker", "strategy", "device", "panel column", "command"} <= set(rows)
    for _, lines, tests in rows.values():
        for part in lines.split("; "):
            path, _, what = part.partition(": ")
            (path,) = _paths(path)
            source = (PACKAGE / path).read_text(encoding="utf-8")
            for name in re.findall(r"`(\w+)`", what):
                assert re.search(rf"\b{name}\b", source), f"{path} has no {name}"
        assert all((ROOT / path).is_file() for path in _paths(tests))


def test_every_make_target_it_names_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([a-z-]+)", "\n".join(re.findall(r"```console.*?```|`[^`\n]+`", PAGE, re.DOTALL))))
    assert {"test", "lint", "bench"} <= named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_the_error_it_quotes_is_one_of_ours():
    (quoted,) = re.findall(r"^> `(.+), \.\.\.`$", PAGE, re.MULTILINE)
    name = "wandbb"
    assert quoted.startswith(f"log_with={name!r} is not a tracker.{suggest(name, TRACKERS)} Write one of")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, below a folder that stands first on the path of `_run`."""
    shutil.copytree(PACKAGE, tmp_path / "nb_accelerate", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def _run(copy: Path, code: str) -> str:
    check = f"import nb_accelerate; assert nb_accelerate.__file__.startswith({str(copy)!r})\n"
    program = f"import sys; sys.path.insert(0, {str(copy)!r})\n{check}{code}"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},  # which ranks trust, as they do not trust the current folder
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def _insert(file: Path, before: str, line: str) -> None:
    """Add a line in front of the first one that begins with ``before``."""
    source = file.read_text(encoding="utf-8")
    assert re.search(f"^{re.escape(before)}", source, re.MULTILINE), f"{file.name} has no line {before!r}"
    file.write_text(re.sub(f"^(?={re.escape(before)})", line, source, count=1, flags=re.MULTILINE), encoding="utf-8")


def _new_and_changed(copy: Path) -> list[str]:
    """What differs from the package, as the table writes it."""
    differing = []
    for file in (*copy.glob("nb_accelerate/**/*.py"), *copy.glob("nb_accelerate/**/*.pyi")):
        path = file.relative_to(copy / "nb_accelerate")
        if not (PACKAGE / path).exists():
            differing.append(str(path.with_stem(NEW)))
        elif (PACKAGE / path).read_bytes() != file.read_bytes():
            differing.append(str(path))
    return sorted(differing)


@pytest.mark.slow
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_a_tracker_is_added_by_the_files_of_its_row(copy: Path):
    module, row = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (copy / "nb_accelerate" / EXAMPLE).write_text(module, encoding="utf-8")
    _insert(copy / "nb_accelerate" / "training" / "tracking" / "select.py", '    "notebook": ', row)
    new, lines, _ = _rows()["tracker"]
    assert _new_and_changed(copy) == sorted([*_paths(new), *_paths(lines)])

    said = _run(
        copy,
        "from nb_accelerate import Accelerator, ConfigError\n"
        "accelerator = Accelerator(cpu=True, log_with='diary', project_dir='runs')\n"
        "accelerator.init_trackers('digits', config={'lr': 0.1})\n"
        "accelerator.log({'loss': 0.5}, step=1)\n"
        "accelerator.end_training()\n"
        "try: Accelerator(cpu=True, log_with='diry', project_dir='runs')\n"
        "except ConfigError as error: print(error)",
    )
    assert (copy / "runs" / "digits.txt").read_text(encoding="utf-8") == "1: {'loss': 0.5}\n"
    assert "Did you mean 'diary'?" in said


def test_a_command_is_added_by_the_files_of_its_row(copy: Path):
    (copy / "nb_accelerate" / "cli" / "greet.py").write_text(
        "def register(subparsers):\n"
        "    parser = subparsers.add_parser('greet', help='say hello')\n"
        "    parser.set_defaults(run=lambda _: print('hello'))\n"
    )
    source = copy / "nb_accelerate" / "cli" / "__init__.py"
    _insert(source, "_COMMANDS = (", "from nb_accelerate.cli import greet\n")
    listed = source.read_text(encoding="utf-8").replace("_COMMANDS = (", "_COMMANDS = (greet, ")
    source.write_text(listed, encoding="utf-8")
    new, lines, _ = _rows()["command"]
    assert _new_and_changed(copy) == sorted([*_paths(new), *_paths(lines)])
    assert _run(copy, "from nb_accelerate.cli import main\nmain(['greet'])\nmain(['--help'])").count("hello") == 2


def test_a_panel_column_is_added_by_the_files_of_its_row(copy: Path):
    display = copy / "nb_accelerate" / "notebook" / "display"
    _insert(display / "view.py", '    step: str = ""', '    retries: str = ""\n')
    _insert(display / "view.py", '    ("step", ', '    ("retries", "retries"),\n')
    _insert(display / "rows.py", "            step=", '            retries="3",\n')
    new, lines, _ = _rows()["panel column"]
    assert _new_and_changed(copy) == sorted([*_paths(new), *_paths(lines)])
    shown = _run(
        copy,
        "from nb_accelerate.notebook.display.drawing.html import render\n"
        "from nb_accelerate.notebook.display.state import PanelState\n"
        "from nb_accelerate.notebook.display.view import Facts\n"
        "state = PanelState(Facts(name='train', setup=()), [0, 1], 0.0)\n"
        "print(render(state.view(1.0)))",
    )
    assert ">retries</th>" in shown
    assert '<td class="nba-retries">3</td>' in shown


MIRROR = """\
from dataclasses import dataclass
from nb_accelerate.training.strategies.strategy import Strategy

@dataclass(frozen=True)
class MirrorPlugin:
    angle: float

class MirrorStrategy(Strategy):
    def __init__(self, process, collectives, options):
        super().__init__(process.device, collectives, process.distributed_type)
        self.angle = options.angle

    def wrap(self, model):
        model.angle = self.angle
        return model
"""


@pytest.mark.slow
def test_a_strategy_is_added_by_the_files_of_its_row(copy: Path):
    strategies = copy / "nb_accelerate" / "training" / "strategies"
    (strategies / "mirror.py").write_text(MIRROR)
    _insert(
        copy / "nb_accelerate" / "__init__.pyi",
        "from nb_accelerate.training.state import",
        "from nb_accelerate.training.strategies.mirror import MirrorPlugin as MirrorPlugin\n",
    )
    select = strategies / "select.py"
    _insert(
        select,
        "from nb_accelerate.training.strategies.strategy",
        "from nb_accelerate.training.strategies.mirror import MirrorStrategy\n",
    )
    _insert(select, "    fsdp: Fully", "    mirror: Any = None\n")
    _insert(
        select,
        "    return StrategyOptions",
        "    mirror = plugins.get('mirror_plugin') or (before and before.mirror)\n",
    )
    chosen = select.read_text(encoding="utf-8").replace(
        "StrategyOptions(ddp=ddp, ", "StrategyOptions(ddp=ddp, mirror=mirror, "
    )
    select.write_text(chosen, encoding="utf-8")
    _insert(
        select,
        "    if options.fsdp is not None",
        "    if options.mirror is not None:\n        return MirrorStrategy(process, collectives, options.mirror)\n",
    )
    accelerator = copy / "nb_accelerate" / "training" / "accelerator" / "accelerator.py"
    _insert(accelerator, "        fsdp_plugin: FullyShardedDataParallelPlugin", "        mirror_plugin: Any = None,\n")
    passed = accelerator.read_text(encoding="utf-8").replace(
        "plugins = {", "plugins = {'mirror_plugin': mirror_plugin, "
    )
    accelerator.write_text(passed, encoding="utf-8")
    new, lines, _ = _rows()["strategy"]
    assert _new_and_changed(copy) == sorted([*_paths(new), *_paths(lines)])
    said = _run(
        copy,
        "from nb_accelerate import notebook_launcher\n"
        "def angles():\n"
        "    from torch import nn\n"
        "    from nb_accelerate import Accelerator, MirrorPlugin\n"
        "    first = Accelerator(mirror_plugin=MirrorPlugin(45.0)).prepare(nn.Linear(2, 1))\n"
        "    return first.angle, Accelerator().prepare(nn.Linear(2, 1)).angle\n"
        "print(notebook_launcher(angles, num_processes=2, devices='cpu', start_method='fork'))",
    )
    assert said.splitlines()[-1] == "[(45.0, 45.0), (45.0, 45.0)]"


ABACUS = """\
from nb_accelerate.base.devices.kind import GLOO
from nb_accelerate.base.devices.kind import DeviceKind

ABACUS = DeviceKind(
    name="meta",  # torch has no others without hardware
    distributed_type="MULTI_CPU",
    backend=GLOO,
    passes_device_ids=False,
    visibility="ABACUS_VISIBLE_DEVICES",
    find=lambda visible, changed: tuple((visible or "0,1").split(",")),
    count=lambda: 2,
)
"""


@pytest.mark.slow
def test_a_device_is_added_by_the_files_of_its_row(copy: Path):
    if not _exists("base/devices/__init__.py"):
        pytest.skip("there is no table of devices yet")
    table = copy / "nb_accelerate" / "base" / "devices" / "__init__.py"
    (table.parent / "abacus.py").write_text(ABACUS)
    _insert(table, "from nb_accelerate.base.devices.kind", "from nb_accelerate.base.devices.abacus import ABACUS\n")
    listed = table.read_text(encoding="utf-8").replace("DEVICE_KINDS: list[DeviceKind] = [", "DEVICE_KINDS = [ABACUS, ")
    table.write_text(listed, encoding="utf-8")
    new, lines, _ = _rows()["device"]
    assert _new_and_changed(copy) == sorted([*_paths(new), *_paths(lines)])
    said = _run(
        copy,
        "from nb_accelerate import notebook_launcher\n"
        "def where():\n"
        "    from nb_accelerate import Accelerator\n"
        "    return str(Accelerator().device)\n"
        "print(notebook_launcher(where, num_processes=2))",
    )
    assert said.splitlines()[-1] == "['meta:0', 'meta:1']"


@pytest.mark.slow
def test_a_start_method_is_added_by_the_files_of_its_row(copy: Path):
    if not _exists("base/start_methods.py"):
        pytest.skip("there is no table of start methods yet")
    (copy / "nb_accelerate" / "notebook" / "launch" / "careful.py").write_text(
        "import contextlib\n"
        "from nb_accelerate.notebook.launch.servers import ExecutedServer\n"
        "@contextlib.contextmanager\n"
        "def careful(options):\n"
        "    print('starting carefully')\n"
        "    with contextlib.closing(ExecutedServer((), fresh=True)) as server:\n"
        "        yield server\n"
    )
    _insert(
        copy / "nb_accelerate" / "base" / "start_methods.py",
        '        StartMethod(name="inline"',
        '        StartMethod(name="careful", starter="nb_accelerate.notebook.launch.careful:careful"),\n',
    )
    new, lines, _ = _rows()["start method"]
    assert _new_and_changed(copy) == sorted([*_paths(new), *_paths(lines)])
    said = _run(
        copy,
        "from nb_accelerate import notebook_launcher\n"
        "def rank():\n"
        "    import os\n"
        "    return int(os.environ['RANK'])\n"
        "print(notebook_launcher(rank, num_processes=2, devices='cpu', start_method='careful'))",
    )
    assert "starting carefully" in said
    assert said.splitlines()[-1] == "[0, 1]"


@pytest.mark.slow
def test_an_engine_is_added_by_the_files_of_its_row(copy: Path):
    (copy / "nb_accelerate" / "notebook" / "launch" / "engines" / "shell.py").write_text(
        "import sys\n"
        "from nb_accelerate.notebook.launch.engines import Engine\n"
        "from nb_accelerate.notebook.remote.streams import CommandStream\n"
        "class ShellEngine(Engine):\n"
        "    def start(self, machine, command):\n"
        "        words = ['env', f'NAME={machine.name}', sys.executable, *command[1:]]\n"
        "        return CommandStream(machine.name, words)\n"
    )
    _insert(
        copy / "nb_accelerate" / "base" / "config" / "engine.py",
        '    "ray": EngineRow',
        '    "shell": EngineRow(opens=f"{_ENGINES}.shell:ShellEngine", needs=("hosts",)),\n',
    )
    new, lines, _ = _rows()["engine, which reaches machines"]
    assert _new_and_changed(copy) == sorted([*_paths(new), *_paths(lines)])
    said = _run(
        copy,
        "from nb_accelerate import notebook_launcher\n"
        "def where():\n"
        "    import os\n"
        "    return os.environ['NAME'] + os.environ['RANK']\n"
        "print(notebook_launcher(where, engine='shell', hosts=['a', 'b']))",
    )
    assert said.splitlines()[-1] == "['a0', 'b1']"

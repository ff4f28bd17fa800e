from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import nbformat
import pytest

from nb_accelerate.base.version import __version__
from nb_accelerate.cli import env, main


def test_the_console_script_is_this_command_line():
    scripts = metadata.entry_points(group="console_scripts", name="nb-accelerate")
    assert {script.value for script in scripts} == {"nb_accelerate.cli:main"}


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"nb-accelerate {__version__}\n")


@pytest.mark.parametrize("command", [pytest.param(["env"], marks=pytest.mark.slow), ["status"]])
def test_output_that_nobody_reads_is_no_error(command: list[str]):
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as closed:
        program = [sys.executable, "-m", "nb_accelerate", *command]
        ran = subprocess.run(program, stdout=closed, stderr=subprocess.PIPE, timeout=50, check=False)
    assert (ran.returncode, ran.stderr) == (141, b"")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {command} " in shown.replace("    ", "  ") for command in ("config", "env", "launch"))


@pytest.mark.contract("commands: env")
def test_env_names_python_torch_devices_and_versions(capsys: pytest.CaptureFixture[str]):
    import torch

    assert main(["env"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " ")
    assert rows["nb-accelerate"] == __version__
    assert rows["torch"] == torch.__version__
    assert rows["numpy"] == metadata.version("numpy")
    assert sys.executable in rows["python"]


def test_env_works_without_torch_and_says_so():
    code = "import sys; sys.modules['torch'] = None\nfrom nb_accelerate.cli import main\nsys.exit(main(['env']))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "installed (pip install torch)" in run.stdout
    assert "devices" not in run.stdout


def test_env_says_what_a_machine_lacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(env, "_SHARED_MEMORY", Path("nowhere"))
    monkeypatch.setattr(env, "_PACKAGES", ("no-such-package-anywhere",))
    rows = dict(env.describe())
    assert rows["shared memory"] == "no nowhere"
    assert rows["no-such-package-anywhere"] == "not installed"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("train.py", "such file"),
        ("tests", "Name the script"),
        ("missing.ipynb", "such file"),
    ],
)
def test_launch_refuses_what_it_cannot_run_in_one_sentence(name: str, reason: str, capsys: pytest.CaptureFixture[str]):
    assert main(["launch", name]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert name in shown.err
    assert reason in shown.err
    assert shown.err.count("\n") == 1


def _notebook(folder: Path, cell: str) -> Path:
    path = folder / "sample.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)]), path)
    return path


@pytest.mark.contract("commands: launch, a notebook")
def test_launch_writes_the_executed_notebook_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = _notebook(tmp_path, "print('hello from a cell')")
    before = path.read_bytes()
    assert main(["launch", str(path), "--output-dir", str(tmp_path / "out"), "--html"]) == 0
    assert "hello from a cell\n" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["sample.executed.ipynb", "sample.html"]
    assert path.read_bytes() == before


def test_launch_fails_with_the_traceback_of_the_failing_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = _notebook(tmp_path, "def risky():\n    raise LookupError('nothing here')\nrisky()")
    assert main(["launch", str(path), "--output-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "cell 1 failed: " in shown.err
    assert "LookupError: nothing here" in shown.err
    assert "sample.executed.ipynb" in shown.out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["lanch"], "invalid choice: 'lanch'"),
        (["launch", "--num_proceses", "2", "train.py"], "unknown: --num_proceses"),
        (["launch", "--fsdp", "train.py"], "mean '--use_fsdp'?"),
        (["config", "--default"], "mean 'nb-accelerate config default'?"),
        (["launch", "--mixed_precision=bf17", "train.py"], "--mixed_precision: invalid choice: 'bf17'"),
        (["launch"], "the following arguments are required: TARGET. All there is: nb-accelerate launch --help\n"),
        (["launch", "-np", "2", "train.py"], "-n/--num_processes: invalid int value: 'p'"),
        (["test", "-x"], "unknown: -x."),
        (["launch", "--standalone", "train.py"], "machine unless --num_machines"),
        (["launch", "{notebook}", "-p", "lr"], "Write -p lr=VALUE"),
        (["launch", "{notebook}", "--num_procs", "2"], "unknown: --num_procs 2"),
    ],
)
def test_what_is_mistyped_is_told_in_one_line_with_what_may_be_meant(
    line: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = _notebook(tmp_path, "pass")
    try:
        code: object = main([word.format(notebook=notebook) for word in line])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_flag_of_launch_that_the_script_gets_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:])", encoding="utf-8")
    assert main(["launch", "--cpu", str(script), "--num_processes", "2"]) == 0
    shown = capfd.readouterr()
    assert shown.out == "['--num_processes', '2']\n"
    assert f"--num_processes stands after {script}, which" in shown.err

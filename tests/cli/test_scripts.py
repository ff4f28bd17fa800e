"""`nb-accelerate launch SCRIPT`: flags, ranks, ends."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cli import flags_page
from cli.flags_page import OURS

from nb_accelerate.base.config.file import NO_FILE, read_config
from nb_accelerate.cli import main
from nb_accelerate.cli.flags import GROUPS, add_flags, why_refused
from nb_accelerate.cli.launch import launch_options

SAY_WHO = """
import json, os, sys
import torch
from nb_accelerate import Accelerator

class Defined:
    pass

accelerator = Accelerator()
said = {
    "rank": accelerator.process_index, "world_size": accelerator.num_processes, "name": __name__, "argv": sys.argv,
    "path": sys.path[0], "file": __file__, "defined": hasattr(sys.modules["__main__"], "Defined"),
    "precision": accelerator.mixed_precision, "accumulation": accelerator.gradient_accumulation_steps,
    "threads": torch.get_num_threads(),
}
with open(os.path.join(os.path.dirname(__file__), f"{accelerator.process_index}.json"), "w") as file:
    json.dump(said, file)
print("hello from", accelerator.process_index)
"""


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def said(folder: Path) -> list[dict[str, object]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("?.json"))]


def start(*arguments: str, **how: object) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = [sys.executable, "-m", "nb_accelerate", "launch", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, **how)


@pytest.mark.slow
def test_a_script_that_does_not_compile_is_shown_with_its_line(tmp_path: Path):
    running = start("--cpu", "--num_processes=2", str(write(tmp_path, "import json\ndef main(:\n")))
    _, shown = running.communicate(timeout=50)
    assert running.returncode == 1
    drawn = r"all 2 ranks\n+ *File .*train.py\", line 2\n    def main\(:\n +\^\nSyntaxError: invalid syntax\n"
    assert re.search(drawn, shown)


@pytest.mark.contract("commands: launch, a script")
def test_a_script_runs_on_every_rank_as_python_would_run_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = write(tmp_path, SAY_WHO)
    own = ["--num_processes", "7", "-m", "--", "--cpu"]
    assert main(["launch", "--cpu", "--num-processes=2", "--mixed_precision", "bf16", str(script), *own]) == 0
    shown = capsys.readouterr().out
    assert all(f"hello from {rank}\n" in shown for rank in range(2))
    for rank, found in enumerate(said(tmp_path)):
        assert (found["rank"], found["world_size"], found["precision"]) == (rank, 2, "bf16")
        assert (found["name"], found["file"], found["defined"]) == ("__main__", str(script), True)
        assert found["argv"] == [str(script), *own]
        assert found["path"] == str(tmp_path)


def test_n_is_short_for_the_number_of_processes(tmp_path: Path):
    assert main(["launch", "--cpu", "-n", "2", str(write(tmp_path, SAY_WHO))]) == 0
    assert [found["world_size"] for found in said(tmp_path)] == [2, 2]


def test_flags_come_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    script = write(tmp_path, SAY_WHO)
    text = "distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\nunheard_of: 1\n"
    file = write(tmp_path, text, "config.yaml")
    command = ["launch", "--config_file", str(file), str(script)]
    assert main(command) == 0
    assert "unheard_of" in capsys.readouterr().err
    assert [(found["world_size"], found["precision"]) for found in said(tmp_path)] == [(2, "bf16")] * 2
    (tmp_path / "1.json").unlink()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    threads = ["--num_cpu_threads_per_process", "1"]
    assert main(["launch", "--num_processes", "1", "--gradient_accumulation_steps", "3", *threads, *command[1:]]) == 0
    assert [(found["world_size"], found["precision"]) for found in said(tmp_path)] == [(1, "no")]
    assert (said(tmp_path)[0]["accumulation"], said(tmp_path)[0]["threads"]) == (3, 1)


def test_modules_packages_and_programs_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "package").mkdir()
    write(tmp_path / "package", "")
    write(
        tmp_path / "package", "from package import train\nimport sys\nprint(__spec__.name, sys.argv[1:])", "__main__.py"
    )
    write(tmp_path / "package", "", "__init__.py")
    monkeypatch.chdir(tmp_path)
    quiet = ["launch", "--cpu", "--quiet"]
    assert main([*quiet, "-m", "package", "x"]) == 0
    assert capsys.readouterr().out == "package.__main__ ['x']\n"
    assert main([*quiet, "--no_python", "sh", "-c", "echo rank $RANK of $WORLD_SIZE"]) == 0
    assert capsys.readouterr().out == "rank 0 of 1\n"
    assert main([*quiet, "--no_python", "sh", "-c", "exit 5"]) == 5
    assert re.fullmatch(r"nb-accelerate: sh .* 5\b.*\n", capsys.readouterr().err)
    assert main([*quiet, "-m", "package.nothing"]) == 1
    assert "module package.nothing" in capsys.readouterr().err


def test_an_exception_is_shown_once_with_the_lines_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = "import os\ndef work():\n    if os.environ['RANK'] == '1':\n        raise ValueError('not today')\n"
    text += "try: work()\nexcept ValueError as error:\n    error.__notes__ = ['tomorrow']\n    raise\n"
    script = write(tmp_path, text)
    assert main(["launch", "--cpu", "--quiet", "--num_processes", "2", str(script)]) == 1
    error = capsys.readouterr().err
    assert error.count("not today") == 2  # the line that raises, and the exception
    assert error.splitlines()[0].split() == ["ValueError", "rank", "1", "of", "2"]
    assert error.count("rank 1") == 1
    assert error.endswith("ValueError: not today\ntomorrow\n")
    assert f"{script}:4, in work" in error
    assert "nb_accelerate" not in error


@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("sys.exit(0)", 0), ("os._exit(0)", 0)]
)
def test_the_exit_code_is_that_of_the_script(tmp_path: Path, ending: str, code: int):
    script = write(tmp_path, f"import os, sys\nif os.environ['RANK'] == '1': {ending}\n")
    assert main(["launch", "--cpu", "--quiet", "--num_processes", "2", str(script)]) == code


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals, code: int):
    script = write(tmp_path, "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)\n")
    with start("--cpu", "--quiet", "--num_processes", "2", str(script)) as program:
        assert program.stdout is not None
        ranks = [int(program.stdout.readline().split()[1]) for _ in range(2)]
        program.send_signal(number)
        output, error = program.communicate(timeout=30)
        assert (program.returncode, output) == (code, "")
        assert "Traceback" not in error
    assert not any(map(psutil.pid_exists, ranks))


def test_ctrl_c_before_there_are_ranks_is_one_line(tmp_path: Path):
    waits = tmp_path / "config.yaml"
    os.mkfifo(waits)
    with start("--cpu", f"--config_file={waits}", str(write(tmp_path, ""))) as program:
        writer = os.open(waits, os.O_WRONLY)  # once it reads
        program.send_signal(signal.SIGINT)
        _, error = program.communicate(timeout=30)
        os.close(writer)
    assert (program.returncode, error) == (130, "nb-accelerate: interrupted\n")


NOTES_WHAT_IS_IMPORTED = """
import sys

def note(event, arguments):
    if event == "subprocess.Popen":
        print("command", "nb_accelerate.notebook.launch.launch" in sys.modules, "torch" in sys.modules, flush=True)

sys.addaudithook(note)
from nb_accelerate.cli import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_torch_is_imported_while_the_command_imports_the_rest(tmp_path: Path):
    script = write(tmp_path, "import gc, sys\nprint('rank', 'IPython' in sys.modules, gc.isenabled())\n")
    flags = ["launch", "--cpu", "--quiet", "--num_processes=1", str(script)]
    command = [sys.executable, "-c", NOTES_WHAT_IS_IMPORTED, *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert run.stdout.splitlines() == ["command False False", "rank False True"]


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_launch(tmp_path: Path):
    script = write(tmp_path, "import os, time\nwhile True:\n    print(os.getpid(), flush=True)\n    time.sleep(0.01)\n")
    with start("--cpu", "--quiet", "--num_processes", "1", str(script)) as program:
        assert program.stdout is not None
        rank = int(program.stdout.readline())
        program.stdout.close()
        assert program.wait(30) == 128 + signal.SIGPIPE
        assert program.stderr is not None
        assert program.stderr.read() == ""
    assert not psutil.pid_exists(rank)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--multi_gpu"], "none is visible here"),
        (["--cpu", "--multi_gpu"], "--cpu and --multi_gpu"),
        (["-m", "--no_python"], "--no_python were both given"),
        (["--num_machines", "2", "--num_processes", "3"], "shared out equally"),
        (["--num_machines", "2", "--num_processes", "4"], "--main_process_ip for master_addr"),
        (["--use_fsdp", "--use_deepspeed"], "--use_fsdp and --use_deepspeed"),
        (["--fsdp-offload-params", "true"], "--fsdp_offload_params is for --use_fsdp"),
        (["--zero_stage", "3", "--use_fsdp"], "--zero_stage is for --use_deepspeed"),
        (["--use_deepspeed", "--deepspeed_config_file", "nothing.json"], "such file"),
        (["--num_machines", "0"], "num_machines=0"),
        (["--num_machines=2", "--main_process_ip=127.0.0.1"], "--main_process_ip for master_addr"),
        (["--num_machines=2", "--main_process_ip=host", "--machine_rank=2"], "--machine_rank for node_rank"),
        (["--gpu_ids", "one"], "gpu_ids='one' is not a list"),
        (["--config_file", "nothing.yaml"], "configuration file"),
        (["--num_processes", "-2"], "num_processes=-2 is too small"),
        (["--main_process_port", "99999"], "--main_process_port for use_port"),
        (["--no_python", "no_such_program"], "program 'no_such_program', but none"),
        (["--html"], "is for notebooks"),
        (["--rdzv_conf", "a"], "list such"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_sentence(
    tmp_path: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["launch", *flags, str(write(tmp_path, "raise SystemExit(9)"))]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_file_for_what_is_not_here_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write(tmp_path, "distributed_type: MEGATRON_LM\nnum_processes: 2\n", "config.yaml")
    command = ["launch", "--config_file", str(file), str(write(tmp_path, ""))]
    assert main(command) == 2
    assert f"distributed_type: MEGATRON_LM, in {file}, is for" in capsys.readouterr().err
    assert main(["launch", "--cpu", *command[1:]]) == 0


@pytest.mark.parametrize("said_by", ["file", "variable"])
def test_an_engine_for_notebooks_is_refused_for_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said_by: str
):
    config = write(tmp_path, "num_processes: 1\n", "config.yaml")
    if said_by == "file":
        config.write_text("num_processes: 1\nengine_config: {engine: ssh, hosts: a}\n")
    else:
        monkeypatch.setenv("NB_ACCELERATE_ENGINE", "ssh")
    assert main(["launch", "--config_file", str(config), str(write(tmp_path, ""))]) == 2
    assert "engine='ssh'" in capsys.readouterr().err


def test_a_port_in_use_is_a_wrong_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["launch", "--cpu", "--quiet", "--main_process_port", port, str(write(tmp_path, ""))]) == 2
    assert f"use_port={port} is taken" in capsys.readouterr().err


def test_several_machines_share_out_the_processes(tmp_path: Path):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    parser.set_defaults(target="train.py")
    address = ["--main_process_ip", "10.0.0.1"]
    static = launch_options(
        parser.parse_args(["--num_machines=2", "--num_processes=8", "--machine_rank=1", *address]), NO_FILE
    )
    assert (static["num_processes"], static["num_nodes"], static["node_rank"]) == (4, 2, 1)
    assert (static["master_addr"], static["use_port"]) == ("10.0.0.1", None)
    c10d = ["--num_machines=2", "--rdzv_backend=c10d", "--rdzv_conf=join_timeout=60", *address]
    found = launch_options(parser.parse_args(c10d), NO_FILE)
    assert (found["rdzv_endpoint"], found["rdzv_conf"]) == ("10.0.0.1:29500", {"join_timeout": "60"})
    text = "distributed_type: MULTI_CPU\nnum_machines: 2\nnum_processes: 4\nmain_process_ip: host\nmachine_rank: 1\n"
    file = read_config(write(tmp_path, text, "config.yaml"))
    of_file = launch_options(parser.parse_args([]), file)
    assert (of_file["num_processes"], of_file["node_rank"], of_file["master_addr"]) == (2, 1, "host")
    assert of_file["devices"] == "cpu"


@pytest.mark.slow
def test_every_flag_of_accelerate_is_known_and_takes_as_many_values():
    """Held against accelerate's own parser: nothing is missing, and nothing swallows the script's name."""
    code = (
        "import json; from accelerate.commands.launch import launch_command_parser as make\n"
        "print(json.dumps([[action.option_strings, action.nargs] for action in make()._actions]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    theirs = {
        name.lstrip("-"): nargs == 0
        for names, nargs in json.loads(run.stdout)
        for name in names
        if name.startswith("--") and "-" not in name[2:]
    }
    ours = {flag.name: flag.convert is None for group in GROUPS for flag in group.flags if flag.name not in OURS}
    refused = {name for name in theirs if name not in ours and why_refused(name)}
    assert ours == {name: is_switch for name, is_switch in theirs.items() if name != "help" and name not in refused}


@pytest.mark.parametrize("flag", ["--use_megatron_lm", "--megatron-lm-tp-degree=2", "--fp8_format=E4M3", "-t=3"])
def test_a_flag_of_accelerate_that_is_none_here_is_refused_with_the_reason(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["launch", flag, str(write(tmp_path, "raise SystemExit(9)"))]) == 2
    name = flag.partition("=")[0]
    assert capsys.readouterr().err == f"nb-accelerate: {name}: {why_refused(name)}.\n"


def test_help_needs_no_torch(capsys: pytest.CaptureFixture[str]):
    code = (
        "import sys\nfrom nb_accelerate.cli import main\n"
        "try: main(['launch', '--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'yaml', 'IPython', 'psutil') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_the_page_of_flags_is_up_to_date():
    assert flags_page.PAGE.read_text(encoding="utf-8") == flags_page.render()

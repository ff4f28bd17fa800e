"""What other programs import of accelerate's command line: a launch as a function, the file as an object."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nb_accelerate.commands.config import load_config_from_file
from nb_accelerate.commands.launch import launch_command, launch_command_parser
from nb_accelerate.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_program_launches_a_script_with_flags_that_it_was_given(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "pathlib.Path(sys.argv[1], os.environ.get('RANK', '0')).write_text(sys.argv[2])\n"
        "sys.exit(int(sys.argv[3]))\n"
    )
    flags = ["--num_processes", "2", "--cpu", "--quiet", str(script), str(tmp_path), "--learning_rate=1"]
    launch_command(launch_command_parser().parse_args([*flags, "0"]))
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["--learning_rate=1"] * 2
    with pytest.raises(SystemExit) as caught:
        launch_command(launch_command_parser().parse_args([*flags, "3"]))
    assert caught.value.code == 3


@pytest.mark.slow
def test_the_module_of_launches_is_a_command(tmp_path: Path):
    (tmp_path / "script.py").write_text("print('here')")
    module = [sys.executable, "-m", "nb_accelerate.commands.launch", "--num_processes", "1", "--cpu", "script.py"]
    run = subprocess.run(module, cwd=tmp_path, capture_output=True, text=True, timeout=50, check=True)
    assert (run.stdout, "RuntimeWarning" in run.stderr) == ("here\n", False)


def test_a_program_reads_the_file_as_a_dict(tmp_path: Path):
    (tmp_path / "file.yaml").write_text("num_processes: 2\nmain_process_ip: null\nmixed_precision: bf16\n")
    assert load_config_from_file(str(tmp_path / "file.yaml")).to_dict() == {
        "num_processes": 2,
        "mixed_precision": "bf16",
    }
    with pytest.raises(ConfigError, match="configuration file"):
        load_config_from_file(str(tmp_path / "none.yaml"))

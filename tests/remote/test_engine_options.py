from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from nb_accelerate.base.config.engine import EngineOptions, split_host
from nb_accelerate.base.config.env import SESSION_DEFAULTS, Environment
from nb_accelerate.base.config.file import read_config
from nb_accelerate.base.config.launch import LaunchOptions
from nb_accelerate.errors import ConfigError
from nb_accelerate.notebook.launch import launcher
from nb_accelerate.notebook.launch.engines.command import filled, for_shell
from nb_accelerate.notebook.magics import args
from nb_accelerate.notebook.pool import PoolOptions

TWO = ["a:8", "me@b:4"]


@pytest.fixture(autouse=True)
def _no_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(launcher, "SESSION_DEFAULTS", SESSION_DEFAULTS)
    for name in ("ENGINE", "HOSTS", "REMOTE_PYTHON", "COMMAND_TEMPLATE"):
        monkeypatch.delenv(f"NB_ACCELERATE_{name}", raising=False)


@pytest.mark.parametrize(
    ("host", "read"),
    [
        ("a", ("a", None)),
        ("a:8", ("a", 8)),
        ("me@node-1.lab:12", ("me@node-1.lab", 12)),
        ("[fd00::1]:2", ("fd00::1", 2)),
        ("10.0.0.1", ("10.0.0.1", None)),
    ],
)
def test_a_host_has_a_name_and_perhaps_a_number(host: str, read: tuple[str, int | None]) -> None:
    assert split_host(host) == read


@pytest.mark.parametrize("host", ["", ":8", "a:0", "a:x", "a b", "-oProxyCommand=evil", "a:8:2", "fd00::1"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="Write 'a:8' or 'me@a:8'"):
        EngineOptions(engine="ssh", hosts=[host])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"engine": "shh"}, "engine='shh' is not a choice"),
        ({"engine": "ssh"}, r'hosts=\["a:8", "b:8"\], or set NB_ACCELERATE_HOSTS'),
        ({"hosts": TWO}, "hosts=.*Write engine='ssh'"),
        ({"engine": "ssh", "hosts": {"a": 8}}, "type dict.*not a list"),
        ({"engine": "ssh", "hosts": ["a:2", "a:4"]}, "names 'a' twice"),
        ({"engine": "ssh", "hosts": TWO, "address": "10.0.0.1"}, "engine='ssh'"),
        ({"engine": "command", "hosts": TWO}, "needs command_template.*docker exec"),
        ({"engine": "command", "hosts": TWO, "command_template": "ssh {host}"}, r"has no \{command\}"),
        ({"engine": "command", "hosts": TWO, "command_template": "sh -c '{command}"}, "Close the quotes"),
        ({"engine": "ssh", "hosts": TWO, "remote_python": " "}, "names no interpreter"),
        ({"engine": "dask", "hosts": TWO}, "engine='dask' is not a choice"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineOptions(**given)


@pytest.mark.parametrize(
    ("template", "is_refused"),
    [
        ("srun -N1 -n1 -w {host} {command}", True),
        ("sh -c 'cd /data && /usr/bin/srun --cpu-bind=none -w {host} {command}'", True),
        ("ssh login srun -w {host} --unbuffered {command}", False),
        ("srun -lu -w {host} {command}", False),
        ("my-srun -w {host} {command}", False),
    ],
)
def test_srun_that_keeps_back_what_ends_no_line_is_refused(template: str, is_refused: bool) -> None:
    with pytest.raises(ConfigError, match="Write srun -u") if is_refused else contextlib.nullcontext():
        EngineOptions(engine="command", hosts=TWO, command_template=template)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"num_nodes": 2, "master_addr": "10.0.0.1"}, "ranks: leave num_nodes out"),
        ({"start_method": "fork"}, "memory of this notebook"),
        ({"start_method": "inline"}, "memory of this notebook"),
    ],
)
def test_what_does_not_go_with_other_machines_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        launcher.notebook_launcher(print, engine="ssh", hosts=TWO, **given)


def test_the_call_comes_before_the_notebook_that_before_the_environment_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "accelerate").mkdir()
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.write_text(
        "num_processes: 2\nengine_config:\n  engine: ssh\n  hosts: [file:2, other:2]\n  remote_python: of_file\n"
    )
    assert Environment().engine_options() == EngineOptions(
        engine="ssh", hosts=("file:2", "other:2"), remote_python="of_file"
    )
    monkeypatch.setenv("NB_ACCELERATE_HOSTS", "environment:1 second:1")
    assert Environment().engine_options().hosts == ("environment:1", "second:1")
    monkeypatch.setitem(SESSION_DEFAULTS, "hosts", "notebook:3,second:3")
    assert Environment().engine_options().hosts == ("notebook:3", "second:3")
    found = Environment().engine_options(hosts=["call:4"])
    assert (found.engine, found.hosts, found.remote_python) == ("ssh", ("call:4",), "of_file")
    assert Environment().engine_options(engine="auto") == EngineOptions()
    monkeypatch.setenv("NB_ACCELERATE_ENGINE", "auto")
    assert Environment().engine_options() == EngineOptions()


def test_a_launch_and_ranks_that_stay_take_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched: list[LaunchOptions] = []

    def note(options: LaunchOptions, *_: object, **__: object) -> None:
        launched.append(options)
        raise InterruptedError

    monkeypatch.setattr(launcher, "LaunchOptions", lambda **given: note(LaunchOptions(**given)))
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("num_processes: 3\n")
    with pytest.raises(InterruptedError):
        launcher.notebook_launcher(print, engine="ssh", hosts=TWO, remote_python="conda run -n torch python")
    pool = PoolOptions(engine="ssh", hosts="a:8,me@b:4", remote_python="conda run -n torch python")
    assert launched[0].engine == pool.placing == pool.as_launch().engine
    assert pool.placing.machines == [("a", 8), ("me@b", 4)]
    assert pool.placing.python == ["conda", "run", "-n", "torch", "python"]
    assert launched[0].num_processes is None  # that of the file is about one machine


def test_a_cell_takes_them_as_flags() -> None:
    template = "docker exec -i {host} {command}"
    line = f"-n 12 --engine command --hosts a:8,b:4 --command-template '{template}'"
    given = args.DISTRIBUTED_CELL.parse(line)
    assert given is not None
    options = PoolOptions(**given)
    assert options.placing == EngineOptions(engine="command", hosts=("a:8", "b:4"), command_template=template)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engine_config:\n  enginee: ssh\n", "'enginee'. Did you mean"),
        ("engine_config:\n  engine: ssh\n  hosts: [a:0]\n", "hosts has 'a:0'"),
        ("engine_config: ssh\n", "is not a section"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("ssh {host} {command}", ["ssh", "a", "python3", "-c", "print('x y')"]),
        ("{command}", ["python3", "-c", "print('x y')"]),
        ("sh -c '{command}'", ["sh", "-c", """python3 -c 'print('"'"'x y'"'"')'"""]),
        ("srun -w{host} -N1 bash -c 'cd /d; {command}'", None),
    ],
)
def test_a_template_keeps_the_words_of_the_command(template: str, words: list[str] | None) -> None:
    found = filled(template, "a", ["python3", "-c", "print('x y')"])
    if words is None:
        words = ["srun", "-wa", "-N1", "bash", "-c", """cd /d; python3 -c 'print('"'"'x y'"'"')'"""]
    assert found == words


def test_the_home_of_the_other_machine_is_left_to_its_shell() -> None:
    assert for_shell(["~/my env/bin/python", "-c", "a b"]) == "~/'my env/bin/python' -c 'a b'"

"""The bytes to and from a machine, by a command and by a real ssh, and what is said where that fails."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from nb_accelerate.base.config.engine import EngineOptions
from nb_accelerate.errors import StartError
from nb_accelerate.notebook.launch.engines import Machine, open_engine
from nb_accelerate.notebook.launch.engines.command import SshEngine
from nb_accelerate.notebook.remote.frames import BEAT, MACHINE, MAGIC, FrameParser, FrameWriter, Kind
from nb_accelerate.notebook.remote.link import Link
from nb_accelerate.notebook.remote.streams import CommandStream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fixtures.sshd import Sshd

    from nb_accelerate.notebook.remote.streams import Stream

SECONDS = 30.0

ECHO = [
    sys.executable,
    "-c",
    f"import os, sys; os.write(1, {MAGIC!r}); [os.write(1, d) for d in iter(lambda: os.read(0, 65536), b'')]",
]
"""A stand-in for the host: says that it is one, and sends back what it is sent."""


def read_some(stream: Stream) -> bytes:
    assert select.select([stream.reads], [], [], SECONDS)[0]
    return os.read(stream.reads, 1 << 16)


def read_all(stream: Stream) -> bytes:
    found = b""
    while data := read_some(stream):
        found += data
    return found


def write_all(stream: Stream, data: bytes, parser: FrameParser) -> None:
    """Write more than the pipes hold, and read what comes back meanwhile."""
    while data:
        readable, writable, _ = select.select([stream.reads], [stream.writes], [], SECONDS)
        assert readable or writable
        if writable:
            data = data[os.write(stream.writes, data) :]
        if readable:
            parser.feed(os.read(stream.reads, 1 << 16))


def start(machine: str, command: Sequence[str], **options: str) -> Stream:
    chosen = EngineOptions(**{"engine": "ssh", "hosts": [machine], **options})  # type: ignore[arg-type]
    engine = open_engine(chosen)
    (only,) = engine.machines()
    return engine.start(only, command)


def failure_of(machine: str, command: Sequence[str] = ("true",), **options: str) -> str:
    with contextlib.closing(start(machine, command, **options)) as stream:
        read_all(stream)
        return stream.why_ended()


@pytest.mark.contract("machines: ssh")
def test_frames_of_every_byte_go_through_ssh_both_ways_and_no_login_text_among_them(sshd: Sshd) -> None:
    body = bytes(range(256)) * 20_000  # more than pipes and windows hold, with line ends and escape characters
    parser, writer = FrameParser(has_preamble=True), FrameWriter()
    with contextlib.closing(start("a", ECHO)) as stream:
        sent = b"".join(writer.frame(Kind.MESSAGE, 3, body) + writer.frame(Kind.QUIT, MACHINE))
        write_all(stream, sent, parser)
        frames = list(parser)
        while len(frames) < 2:
            parser.feed(read_some(stream))
            frames += parser
    assert frames == [(Kind.MESSAGE, 3, body), (Kind.QUIT, MACHINE, b"")]
    assert parser.preamble == b"Welcome\n"


@pytest.mark.parametrize(
    ("configured", "used"),
    [
        ("ControlMaster auto", "controlmaster false"),
        ("ControlMaster yes", "controlmaster false"),
        ("ExitOnForwardFailure yes", "exitonforwardfailure no"),
        ("Tunnel yes", "tunnel false"),
        ("ForwardAgent yes", "forwardagent no"),
        ("ForwardX11 yes", "forwardx11 no"),
        ("PermitLocalCommand yes", "permitlocalcommand no"),
        ("RequestTTY force", "requesttty false"),
        ("ForkAfterAuthentication yes", "forkafterauthentication no"),
        ("StdinNull yes", "stdinnull no"),
        ("SessionType none", "sessiontype default"),
        ("BatchMode no", "batchmode yes"),
    ],
)
def test_no_option_of_the_users_configuration_changes_whose_process_it_is(
    configured: str, used: str, tmp_path: Path
) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("needs ssh of OpenSSH")
    (tmp_path / "config").write_text(f"Host *\n    {configured}\n")
    ssh, *options = SshEngine(EngineOptions(engine="ssh", hosts=["a"]))._argv(Machine(name="a"), ["true"])
    command = [ssh, "-G", "-F", str(tmp_path / "config"), *options]
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    assert used in asked.stdout.splitlines()


def test_a_login_of_the_user_lives_on_when_ours_has_ended(sshd: Sshd) -> None:
    shared = f"ControlMaster auto\nControlPath {sshd.folder}/%n\nControlPersist no\n"
    (sshd.folder / "config").write_text(shared + (sshd.folder / "config").read_text())
    with contextlib.closing(start("a", ECHO)) as stream:
        read_some(stream)
        login = subprocess.Popen(["ssh", "a", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert login.stdin is not None
        assert login.stdout is not None
        assert login.stdout.readline() == "Welcome\n"
    print("still here", file=login.stdin, flush=True)
    assert login.stdout.readline() == "still here\n"
    login.communicate()
    assert login.returncode == 0


def test_nothing_is_opened_and_nothing_stays(sshd: Sshd) -> None:
    (sshd.folder / "config").write_text(
        f"LocalForward {free_port()} localhost:1\nRemoteCommand false\nRequestTTY force\n"
        + (sshd.folder / "config").read_text()
    )
    with contextlib.closing(start("a", ["sh", "-c", "echo $$; tty; exec cat"])) as stream:
        said = b""
        while said.count(b"\n") < 3:
            said += read_some(stream)
        welcome, pid, terminal = said.decode().splitlines()
        assert (welcome, terminal) == ("Welcome", "not a tty")
        remote = psutil.Process(int(pid))
        (client,) = [child for child in psutil.Process().children() if child.name() == "ssh"]
        assert os.getsid(client.pid) == client.pid  # Ctrl-C in a terminal does not reach it
        assert [each for each in client.net_connections() if each.status == psutil.CONN_LISTEN] == []
    remote.wait(SECONDS)
    assert not client.is_running()
    stream.close()


def test_a_command_that_ignores_the_end_of_its_input_is_ended_with_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nb_accelerate.notebook.remote.streams._PATIENCE", 0.1)
    stream = CommandStream("a", ["sh", "-c", "sleep 1000 & echo $!; wait"])
    child = psutil.Process(int(read_some(stream)))
    stream.close()
    child.wait(SECONDS)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no; echo 'not today.' >&2; exit 3", "sh ended with exit code 3: not today"),
        ("kill -TERM $$", "sh was ended by SIGTERM"),
        ("exec >&-; sleep 1000", "sh has closed its output"),
        ("seq 100000 >&2; exit 1", "sh ended with exit code 1: 99996; 99997; 99998; 99999; 100000"),
    ],
)
def test_how_a_command_has_ended_is_said(script: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nb_accelerate.notebook.remote.streams._PATIENCE", 2.0 if "seq" in script else 0.5)
    template = f'sh -c "{script}" {{command}}'
    ended = failure_of("a", engine="command", command_template=template)
    assert ended.partition(". To check")[0] == said


def test_a_command_that_prints_for_ever_and_is_no_host_is_ended() -> None:
    link = Link(CommandStream("a", ["sh", "-c", "while :; do echo a line; done"]))
    with pytest.raises(StartError, match=r"not answered within 0\.1"):
        link.open(0.1)
    link.close()


def test_an_interrupt_ends_the_wait_for_a_host_that_does_not_end() -> None:
    hello = FrameWriter().frame(Kind.HELLO, MACHINE, b'{"monotonic": 0}')
    speaks = f"import os, time; os.write(1, {MAGIC!r} + {b''.join(hello)!r}); time.sleep(1000)"
    stream = CommandStream("a", [sys.executable, "-c", speaks])
    link = Link(stream)
    link.open(SECONDS)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            link.close()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert link.lost == "was closed"


def test_the_clock_of_a_machine_is_that_of_the_frame_that_came_fastest() -> None:
    theirs, writer = time.monotonic() + 40.0, FrameWriter()
    frames = [writer.frame(Kind.HELLO, MACHINE, b'{"monotonic": 0}')]
    frames += [writer.frame(Kind.BEAT, MACHINE, BEAT.pack(theirs - late)) for late in (9.0, 0.0, 7.0)]
    data = MAGIC + b"".join(part for frame in frames for part in frame)
    link = Link(CommandStream("a", [sys.executable, "-c", f"import os; os.write(1, {data!r})"]))
    link.open(SECONDS)
    assert link.ahead == pytest.approx(-40.0, abs=5.0)
    link.close()


@pytest.mark.parametrize("template", ["sh -c '{command} </dev/null'", "sh -c ': | {command}'"])
def test_a_command_that_does_not_hand_on_its_stdin_is_told_so(template: str) -> None:
    host = [sys.executable, "-m", "nb_accelerate.notebook.launch.host"]
    assert "docker exec and kubectl" in failure_of("a", host, engine="command", command_template=template)


def test_a_command_that_is_not_here_is_named() -> None:
    with pytest.raises(StartError, match="reached: kubectll: No such"):
        start("a", ["true"], engine="command", command_template="kubectll exec {host} {command}")


def test_a_machine_that_nobody_knows(sshd: Sshd) -> None:
    (sshd.folder / "config").write_text("")
    assert "Could not resolve hostname" in failure_of("nowhere.invalid")


def test_no_login_without_a_password(sshd: Sshd) -> None:
    sshd.new_key("key")
    subprocess.run(["cp", sshd.folder / "key.pub", sshd.folder / "other.pub"], check=True)
    (sshd.folder / "key.pub").write_text((sshd.folder / "host_key.pub").read_text())
    assert "Permission denied" in (said := failure_of("a"))
    assert ": ssh -oBatchMode=yes a " in said


def test_the_key_of_the_machine_has_changed(sshd: Sshd) -> None:
    sshd.trust("key")
    assert "Host key verification failed" in failure_of("a")


def test_the_key_of_the_machine_is_not_known(sshd: Sshd) -> None:
    (sshd.folder / "known_hosts").write_text("")
    assert "Host key verification failed" in failure_of("b")


def test_nobody_listens(sshd: Sshd) -> None:
    config = (sshd.folder / "config").read_text()
    (sshd.folder / "config").write_text(config.replace(str(sshd.port), str(free_port())))
    assert "Connection refused" in failure_of("a")


def test_there_is_no_such_python(sshd: Sshd) -> None:
    said = failure_of("a", ["~/no_such/python", "-m", "x"], remote_python="~/no_such/python")
    assert "no_such/python" in said.partition("To check by hand")[0]


@pytest.mark.parametrize("engine", ["ssh", "command"])
def test_the_package_is_not_there(sshd: Sshd, engine: str) -> None:
    python = f"{sys.executable} -IS"  # without the packages of its environment
    options = {} if engine == "ssh" else {"command_template": "{command}"}
    command = [*python.split(), "-m", "nb_accelerate.notebook"]
    said = failure_of("a", command, remote_python=python, engine=engine, **options)
    assert "No module named" in said.partition("To check by hand")[0]
    assert "import nb_accelerate" in said


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])

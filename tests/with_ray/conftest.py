"""Tests that need Ray: `make test-ray` runs them; else they are not collected. One cluster runs at a time.

The folder is not called `ray`: tests/ is on the path of modules, where it would stand for the library.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import psutil
import pytest
from fixtures.engines import Machines
from fixtures.leaks import lasting

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]

NODES = ("127.0.0.2", "127.0.0.3")


@pytest.fixture(scope="session", autouse=True)
def _fast_imports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each process of Ray imports jsonschema, and that a grammar of web addresses if JupyterLab has brought it along.

    That takes seconds, after which Ray gives up waiting for its processes where cores are few.
    """
    folder = tmp_path_factory.mktemp("modules")
    (folder / "rfc3987_syntax.py").write_text("raise ImportError\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A cluster of two nodes with two processor cores each, on `NODES`; gives the address of its head."""
    with socket.create_server((NODES[0], 0)) as server:
        port = server.getsockname()[1]
    address = f"{NODES[0]}:{port}"
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: it has sockets
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        processes = []
        try:
            for node in NODES:
                role = ["--head", "--port", str(port), "--include-dashboard=false", "--temp-dir", folder]
                own = role if node == NODES[0] else ["--address", address]
                processes.append(start_node(*own, node=node, name="ab"[NODES.index(node)]))
            with lasting([psutil.Process(process.pid) for process in processes]):
                yield address
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(30)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def machines(cluster: str, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """Choose both nodes for the launches and pools of a test: the first with one rank, the second with two."""
    choose(monkeypatch, cluster, f"{NODES[0]}:1,{NODES[1]}:2")
    return Machines(NODES)


def choose(monkeypatch: pytest.MonkeyPatch, address: str, hosts: str) -> None:
    for name, value in {"ENGINE": "ray", "ADDRESS": address, "HOSTS": hosts}.items():
        monkeypatch.setenv(f"NB_ACCELERATE_{name}", value)


def start_node(*role: str, node: str, name: str) -> subprocess.Popen[str]:
    """Start a node, and return when it runs. It ends when its process is terminated.

    Args:
        name: what processes there find as the variable OWN.
    """
    options = ["--node-ip-address", node, "--num-cpus", "2", "--disable-usage-stats", "--block"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", *role, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "RAY_raylet_start_wait_time_s": "120", "OWN": name},
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "--block" in line:
            return process
    raise AssertionError("".join(said))

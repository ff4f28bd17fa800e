"""Tests that need Ray: `make test-ray` runs them; else they are not collected. One cluster runs at a time.

The folder is not called `ray`: tests/ is on the path of modules, where it would stand for the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import psutil
import pytest
from fixtures.engines import Machines
from fixtures.leaks import lasting
from fixtures.ray_nodes import NODES, fast_imports, two_nodes

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _fast_imports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with fast_imports(tmp_path_factory.mktemp("modules")):
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A cluster of two nodes; gives the address of its head. One of them ends in `test_contracts.py`."""
    with two_nodes() as (address, processes), lasting([psutil.Process(process.pid) for process in processes]):
        yield address


@pytest.fixture
def machines(cluster: str, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """Choose both nodes for the launches and pools of a test: the first with one rank, the second with two."""
    chosen = {"ENGINE": "ray", "ADDRESS": cluster, "HOSTS": f"{NODES[0]}:1,{NODES[1]}:2"}
    for name, value in chosen.items():
        monkeypatch.setenv(f"NB_ACCELERATE_{name}", value)
    return Machines(NODES)

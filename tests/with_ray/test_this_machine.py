"""Ray without an address: a cluster of this machine alone, of which the notebook sees nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from remote.test_cells import SUM
from with_ray.test_cluster import actors

from nb_accelerate.base.config.engine import EngineOptions
from nb_accelerate.errors import PoolError
from nb_accelerate.notebook.launch import close, notebook_launcher
from nb_accelerate.notebook.launch.engines.ray import RayEngine
from nb_accelerate.notebook.pool.options import CellOptions, PoolOptions
from nb_accelerate.notebook.pool.pool import Pool
from nb_accelerate.notebook.pool.source import read_cell


def listening() -> set[tuple[Any, ...]]:
    """The addresses and ports on which anybody on this machine listens."""
    found = psutil.net_connections("tcp")
    return {tuple(place.laddr) for place in found if place.status == psutil.CONN_LISTEN}


def test_a_launch_is_quiet_and_listens_on_loopback_only_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NB_ACCELERATE_ENGINE", "ray")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    others = listening()
    folders = set(Path("/tmp").glob("nb-ray-*"))

    def train() -> tuple[int, int, set[tuple[Any, ...]]]:
        found = psutil.net_connections("tcp")
        places = {tuple(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}
        return int(os.environ["RANK"]), psutil.Process().nice(), places

    values = notebook_launcher(train, num_processes=3, progress="off")
    close()
    assert [rank for rank, *_ in values] == [0, 1, 2]  # more than there are cores: nobody else is to get them
    assert {nice for _, nice, _ in values} == {psutil.Process().nice()}
    during = set.union(*(places for *_, places in values)) - others
    assert during
    assert {address.removeprefix("::ffff:") for address, _ in during} == {"127.0.0.1"}
    assert capfd.readouterr() == ("", "")
    assert set(Path("/tmp").glob("nb-ray-*")) == folders
    assert [*tmp_path.iterdir()] == []


def test_cells_run_there_too_and_a_lost_actor_is_told(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NB_ACCELERATE_ENGINE", "ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = CellOptions(wants_values=True, progress="off")
    pool = Pool()
    pool.start(PoolOptions(num_processes=2))
    try:
        assert pool.run(read_cell(SUM), options, variables={}) == [3.0, 3.0]
        assert capfd.readouterr() == ("3.0\n", "")
        [actor] = actors()
        actor.kill()
        with pytest.raises(PoolError, match="is lost: the actor of Ray that keeps its host has ended"):
            pool.run(read_cell("import time\ntime.sleep(60)"), options, variables={})
    finally:
        pool.stop()


def test_no_file_stays_of_a_driver_that_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folders = set(Path("/tmp").glob("nb-ray-*"))
    engine = RayEngine(EngineOptions(engine="ray"))
    try:
        engine.machines(1)
        assert engine._driver is not None
        driver = psutil.Process(engine._driver._process.pid)
        started = driver.children(recursive=True)
        assert len(set(Path("/tmp").glob("nb-ray-*")) - folders) == 1
        os.kill(driver.pid, signal.SIGKILL)
    finally:
        engine.close()
    assert set(Path("/tmp").glob("nb-ray-*")) == folders
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []

"""Ray without an address: a cluster of this machine alone, of which the notebook sees nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from remote.test_cells import SUM
from with_ray.test_cluster import actors

from nb_accelerate.errors import PoolError
from nb_accelerate.notebook.launch import notebook_launcher
from nb_accelerate.notebook.pool.options import CellOptions, PoolOptions
from nb_accelerate.notebook.pool.pool import Pool
from nb_accelerate.notebook.pool.source import read_cell


def listening() -> set[tuple[Any, ...]]:
    """The addresses and ports on which anybody on this machine listens."""
    found = psutil.net_connections("tcp")
    return {tuple(place.laddr) for place in found if place.status == psutil.CONN_LISTEN}


@pytest.mark.limit(300)
def test_a_launch_and_cells_are_quiet_on_loopback_and_leave_nothing(
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
    assert [rank for rank, *_ in values] == [0, 1, 2]  # more than there are cores: nobody else is to get them
    assert {nice for _, nice, _ in values} == {psutil.Process().nice()}
    during = set.union(*(places for *_, places in values)) - others
    assert during
    assert {address.removeprefix("::ffff:") for address, _ in during} == {"127.0.0.1"}
    assert capfd.readouterr() == ("", "")
    assert [*tmp_path.iterdir()] == []
    cells_run_there_too_and_an_end_of_actor_or_driver_is_told(capfd)
    assert set(Path("/tmp").glob("nb-ray-*")) == folders


def cells_run_there_too_and_an_end_of_actor_or_driver_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    options = CellOptions(wants_values=True, progress="off")
    pool = Pool()
    pool.start(PoolOptions(num_processes=3))  # on the hosts of the launch
    try:
        assert pool.run(read_cell(SUM), options, variables={}) == [7.0] * 3
        assert capfd.readouterr() == ("7.0\n", "")
        [actor] = actors()
        actor.kill()
        with pytest.raises(PoolError, match="is lost: the actor of Ray that keeps its host has ended"):
            pool.run(read_cell("import time\ntime.sleep(60)"), options, variables={})
        assert pool.restart() == [0, 1, 2]
        capfd.readouterr()
        assert pool.run(read_cell(SUM), options, variables={}) == [7.0] * 3
        [actor] = actors()
        [driver] = [one for one in actor.parents() if one.ppid() == os.getpid()]
        started = driver.children(recursive=True)
        driver.kill()
    finally:
        pool.stop()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []

"""Print what `xmp.spawn` gives each of its processes on a machine with eight chips of a TPU v5e, and what a rank has.

The machine is played: its variables are those of a v5e-8, and the runtime starts on the CPU after the topology was set.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

V5E = {
    "PJRT_DEVICE": "TPU",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
OF_KAGGLE = {"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"}


all_begun: Any = None
"""Met by the processes of `xmp.spawn`: one that had written already would be given the work of another."""


def seen() -> dict[str, Any]:
    from torch_xla import runtime

    names = [name for name in sorted(os.environ) if name.startswith(("TPU_", "PJRT_", "CLOUD_TPU", "XLA_"))]
    return {name: os.environ[name] for name in names} | {"cached": [runtime._WORLD_SIZE, runtime._ORDINAL]}


def write(_: int, folder: str) -> None:
    if all_begun is not None:
        all_begun.wait(60.0)
    name = os.environ.get("PJRT_LOCAL_PROCESS_RANK", "alone")
    (Path(folder) / name).write_text(json.dumps(seen()))


def initialize(rank: int, world_size: int, folder: str) -> None:
    from nb_accelerate.base.topology import Topology
    from nb_accelerate.training.process.xla import _initialize

    _initialize(Topology.of_machine(rank, world_size))
    write(rank, folder)


def main() -> None:
    os.environ |= V5E
    import torch_xla  # noqa: F401 - before forks
    from torch_xla._internal import tpu

    tpu.num_available_chips = lambda: 8
    for name in ("configure_topology", "configure_one_chip_topology"):
        configure = getattr(tpu, name)

        def and_go_on_with_the_cpu(*args: Any, configure: Any = configure) -> None:
            configure(*args)
            os.environ["PJRT_DEVICE"] = "CPU"

        setattr(tpu, name, and_go_on_with_the_cpu)
    fork = multiprocessing.get_context("fork")
    found = []
    for start in (spawn, launch):
        with tempfile.TemporaryDirectory() as folder:
            start(fork, folder)
            found.append({file.name: json.loads(file.read_text()) for file in Path(folder).iterdir()})
    json.dump(found, sys.stdout)


def spawn(fork: Any, folder: str) -> None:
    process = fork.Process(target=spawn_here, args=(folder,))
    process.start()
    process.join()


def spawn_here(folder: str) -> None:
    from torch_xla.distributed import xla_multiprocessing as xmp

    global all_begun
    all_begun = multiprocessing.get_context("fork").Barrier(8)
    with contextlib.suppress(AssertionError):  # eight processes on the CPU are eight times rank 0 of one
        xmp.spawn(write, (folder,), start_method="fork")


def launch(fork: Any, folder: str) -> None:
    os.environ |= OF_KAGGLE
    ranks = [fork.Process(target=initialize, args=(rank, 8, folder)) for rank in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main()

"""Launches on two devices: those of `launch/test_gpus.py`, which device a rank has, and what it holds of it."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from fixtures.kernels import Kernel
from launch.test_gpus import (  # noqa: F401
    notebook,
    test_a_kernel_that_used_a_gpu_launches_without_a_restart,
    test_a_tensor_on_a_device_comes_back_on_the_cpu_and_the_gpu_stays_untouched,
    test_asking_for_a_fork_after_a_gpu_was_used_is_refused_with_what_to_write,
    test_every_gpu_gets_a_rank_forked_from_a_kernel_that_did_not_touch_it,
    test_more_ranks_than_gpus_are_refused_and_the_cpu_can_be_asked_for,
    user,
)

pytestmark = pytest.mark.usefixtures("simgpu")

PLACES = """
import functools, torch
import torch._dynamo  # which DDP imports: forked ranks have it
from nb_accelerate import Accelerator, notebook_launcher

def place():
    accelerator = Accelerator()
    unnumbered = torch.ones(1, device="simgpu")
    parameter = next(accelerator.prepare(torch.nn.Linear(1, 1)).parameters())
    used = {accelerator.device, unnumbered.device, parameter.device}
    number = torch.simgpu.current_device()
    return str(accelerator.device), {device.index or 0 for device in used} == {number}, torch.simgpu._uuid(number)[-1]

launch = functools.partial(notebook_launcher, place, progress="off")
"""


@pytest.fixture(scope="module")
def places(notebook: Kernel) -> Iterator[Kernel]:  # noqa: F811
    notebook.run(PLACES).ok()
    yield notebook
    assert notebook.run("torch.simgpu.is_initialized()").ok().value == "False"


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", [("simgpu:0", True, "0"), ("simgpu:1", True, "1")]),
        ("devices=[1, 0]", [("simgpu:0", True, "1"), ("simgpu:1", True, "0")]),
        ("devices=[1]", [("simgpu", True, "1")]),
        ("env={'SIMGPU_VISIBLE_DEVICES': '1'}", [("simgpu", True, "1")]),
        ("num_processes=1, devices='simgpu'", [("simgpu", True, "0")]),
    ],
)
def test_each_rank_computes_on_the_device_that_was_chosen(places: Kernel, method: str, options: str, expected: object):
    cell = places.run(f"print(launch(start_method={method!r}, {options}))").ok()
    assert literal_eval(cell.stdout.splitlines()[-1]) == expected


@pytest.mark.parametrize(
    "options", ["num_processes=3", "devices=[0, 2]", "env={'SIMGPU_VISIBLE_DEVICES': '0'}, num_processes=2"]
)
def test_devices_that_are_not_there_are_refused(places: Kernel, options: str):
    cell = places.run(f"launch({options})")
    assert cell.error == "ConfigError"
    expected = "num_processes=[23], but there (is|are) [12] GPU.*each rank needs its own|there is no GPU 2"
    assert re.search(expected, cell.message)


FILL = """
from torch.utils.data import DataLoader

def fill():
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(256, 4096), torch.nn.Linear(4096, 1))
    rows = DataLoader(torch.ones(64, 256), batch_size=16)
    model, optimizer, rows = accelerator.prepare(model, torch.optim.Adam(model.parameters()), rows)
    for batch in rows:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.process_index == 1:
            kept = [torch.empty(8 << 20, dtype=torch.uint8, device=accelerator.device) for _ in range(9)]
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_rank_without_memory_is_named_with_what_every_rank_held(places: Kernel, method: str):
    places.run(FILL).ok()
    limit = "env={'SIMGPU_MEMORY': str(64 << 20)}"
    cell = places.run(f"notebook_launcher(fill, (), 2, progress='off', start_method={method!r}, {limit})")
    assert (cell.error, "allocate 8 MiB. GPU 1" in cell.message) == ("OutOfMemoryError", True)
    said = re.sub(r"\x1b\[[0-9;]*m", "", cell.traceback)
    assert "rank 1 of 2" in said
    lines = said[said.index("What each rank had in memory:") :].splitlines()
    assert lines[1].split() == ["rank", "parameters", "gradients", "optimizer", "other", "peak", "limit"]
    # 1,056,769 numbers of 4 bytes, for Adam twice as many, in 64 MiB of a device; gradients were freed.
    assert re.match(r" *1 +4.2 MB +- +8.5 MB .* 67 MB +<- failed", lines[3])
    assert "each of 2 ranks holds 8.5 MB" in said


@pytest.mark.limit(120)
def test_the_quick_tour_trains_on_both_devices_and_learns_the_digits(places: Kernel):
    quick_tour = nbformat.read(Path(__file__).parents[2] / "notebooks" / "00_quickstart.ipynb", as_version=4)
    changes = {
        "def train(epochs=10)": "def train(epochs=2)",
        "return history": "return [{**one, 'device': str(next(model.parameters()).device)} for one in history]",
    }
    *cells, _plot = [cell for cell in quick_tour.cells if cell.cell_type == "code"]
    for cell in cells:
        for text, other in changes.items():
            cell.source = cell.source.replace(text, other)
        places.run(cell.source).ok()
    last = literal_eval(places.run("print([history[-1] for history in results])").ok().stdout)
    assert [one["device"] for one in last] == ["simgpu:0", "simgpu:1"]
    first, second = (one["accuracy"] for one in last)
    assert first == second > 0.8
    assert [one["evaluated"] for one in last] == [360, 360]
    assert last[0]["losses"] != last[1]["losses"]


SWEEP = """
import os, time
import nb_accelerate

def train(index, folder):
    open(os.path.join(folder, str(index)), "w").close()
    while index < 2 and len(os.listdir(folder)) < 2:
        time.sleep(0.005)
    return place(), torch.simgpu.device_count()

def all_of(folder):
    return nb_accelerate.sweep(train, [dict(index=index, folder=folder) for index in range(4)])
"""


@pytest.mark.limit(120)
def test_each_run_of_a_sweep_sees_one_of_the_devices(places: Kernel, tmp_path: Path) -> None:
    places.run(SWEEP).ok()
    cell = places.run(f"places = all_of({str(tmp_path)!r}); print([*places])").ok()
    found = literal_eval(cell.stdout.splitlines()[-1])
    assert {(device, alike, count) for (device, alike, _), count in found} == {("simgpu", True, 1)}
    assert [uuid for (_, _, uuid), _ in found[:2]] == ["0", "1"]
    assert {uuid for (_, _, uuid), _ in found} == {"0", "1"}

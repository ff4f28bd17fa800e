"""The device is one file with one row, and the package needs no more to know it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("simgpu")


def test_a_process_that_has_not_imported_torch_plans_launches_on_it():
    program = (
        "import sys\n"
        "from nb_accelerate.notebook.launch.machine import facts_here\n"
        "found = facts_here({}).accelerators[0]\n"
        "print(found.kind.name, found.names, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "simgpu ('0', '1') False\n"


def test_the_command_line_launches_on_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from nb_accelerate import Accelerator\nprint(Accelerator().device)\n")
    command = [sys.executable, "-m", "nb_accelerate", "launch", "--num_processes", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(word for word in done.stdout.split() if word.startswith("simgpu")) == ["simgpu:0", "simgpu:1"]


def test_each_function_of_its_row_is_there(run_ranks):
    def run() -> dict[str, object]:
        import torch

        from nb_accelerate.base.devices import find_kind

        kind = find_kind("simgpu")
        assert kind is not None
        before = kind.is_initialized()
        kept = torch.zeros(256, device="simgpu:1")
        kind.set_device(1)
        assert kind.get_rng_state is not None
        assert kind.get_rng_states is not None
        assert torch.equal(kind.get_rng_state(), kind.get_rng_states()[1])
        kind.set_rng_state(kind.get_rng_state(), 0)
        kind.empty_cache()
        found = {
            "initialized": (before, kind.is_initialized()),
            "count": (kind.count(), kind.current_device()),
            "memory": (kind.memory_allocated(), torch.simgpu.memory_reserved(), kind.memory_used(), kind.memory_peak()),
            "left": kind.memory_left(1),
            "describe": kind.describe(1),
            "uuid": str(kind.uuid(1))[-2:],
            "bf16": kind.supports_bf16(),
        }
        del kept
        return found

    [found] = run_ranks(run, world_size=1, env={"SIMGPU_MEMORY": str(2**20)})
    assert found == {
        "initialized": (False, True),
        "count": (2, 1),
        "memory": (1024, 1024, 1024, 1024),
        "left": 2**20 - 1024,
        "describe": "Simulated GPU, 0 GiB",
        "uuid": "-1",
        "bf16": True,
    }


@pytest.mark.parametrize(
    ("devices", "expected"), [(None, ["simgpu:0 -0", "simgpu:1 -1"]), ([1, 0], ["simgpu:0 -1", "simgpu:1 -0"])]
)
def test_each_rank_has_a_device_in_the_order_that_was_asked_for(devices, expected):
    from nb_accelerate import notebook_launcher

    def run() -> str:
        import torch

        from nb_accelerate import Accelerator

        device = Accelerator().device
        return f"{device} {torch.simgpu._uuid(device.index)[-2:]}"

    assert (
        notebook_launcher(run, num_processes=2, devices=devices, start_method="forkserver", progress="off") == expected
    )

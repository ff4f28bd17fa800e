"""`notebook_launcher` on XLA devices, from real kernels: on one, and on four of which the collectives are played."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fixtures.kernels import Kernel
from fixtures.leaks import name_of

# torch_xla makes a temporary file when it is imported, which a kernel that is shut down leaves.
pytestmark = pytest.mark.may_leave("files")

TRAIN = """
from nb_accelerate import notebook_launcher

def train(number=0, rows=7):
    import torch
    from nb_accelerate import Accelerator
    from nb_accelerate.utils import set_seed
    set_seed(3)
    accelerator = Accelerator()
    set_seed(3 + accelerator.process_index)  # ranks begin with other weights
    model = torch.nn.Linear(2, 1)
    inputs, targets = torch.arange(2.0 * rows).view(rows, 2) / rows, torch.arange(1.0 * rows)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=2))
    seen = []
    for inputs, targets in loader:
        loss = (model(inputs).squeeze(-1) - targets).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(targets).tolist()
    print(f"rank {accelerator.process_index} on {accelerator.device}")
    return accelerator.process_index, accelerator.num_processes, seen, model.weight.flatten().tolist(), number
"""

FOUR = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import gloo_double; gloo_double.install(4)
"""


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    kernel.run(TRAIN).ok()
    return kernel


@pytest.fixture
def kaggle(kernel: Kernel) -> Iterator[Kernel]:
    """A notebook on a machine with four chips, and the variables that Kaggle's image sets."""
    kernel.run("import os; os.environ |= {'TPU_PROCESS_ADDRESSES': 'local', 'CLOUD_TPU_TASK_ID': '0'}").ok()
    kernel.run(FOUR + TRAIN).ok()
    yield kernel
    kernel.run("gloo_double.remove()").ok()


def test_one_device_trains_and_launches_again(notebook: Kernel) -> None:
    cell = notebook.run("values = notebook_launcher(train, (5,), progress='text')").ok()
    assert "1 process on XLA, xla" in cell.stdout
    assert "rank 0 on xla:0" in cell.stdout
    said = notebook.run("print(values[0][:3], values[0][4])").ok().stdout
    assert said.strip() == "(0, 1, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) 5"
    again = notebook.run("print(notebook_launcher(train, (5,), progress='off') == values)").ok()
    assert again.stdout.strip().endswith("True")


def test_the_users_exception_arrives_with_its_line(notebook: Kernel) -> None:
    notebook.run(
        "def fail():\n"
        "    from nb_accelerate import Accelerator\n"
        "    Accelerator()\n"
        "    raise KeyError('here')  # the line\n"
    ).ok()
    cell = notebook.run("notebook_launcher(fail, progress='off')")
    assert cell.error == "KeyError"
    assert "raise KeyError('here')  # the line" in cell.traceback


def test_after_a_backward_pass_here_ranks_can_train(notebook: Kernel) -> None:
    notebook.run("import torch; torch.ones(1, requires_grad=True).backward()").ok()
    for method in ("xla", "forkserver"):
        cell = notebook.run(f"notebook_launcher(train, start_method={method!r}, progress='off'); None").ok()
        assert "rank 0 on xla:0" in cell.stdout


def test_a_runtime_that_was_started_here_is_told_before_anything_starts(notebook: Kernel) -> None:
    notebook.run("import torch, torch_xla; torch.ones(1, device='xla')").ok()
    cell = notebook.run("notebook_launcher(train, start_method='xla', progress='off')")
    assert cell.error == "ConfigError"
    assert "XLA runtime was started" in cell.message
    notebook.run("import os; os.environ['PJRT_DEVICE'] = 'TPU'").ok()
    cell = notebook.run("notebook_launcher(train, progress='off')")
    assert cell.error == "ConfigError"
    assert "Restart the kernel" in cell.message


def test_more_processes_than_devices_are_refused_with_what_there_is(notebook: Kernel) -> None:
    cell = notebook.run("notebook_launcher(train, num_processes=8, progress='off')")
    assert cell.error == "ConfigError"
    assert "there is 1 XLA device" in cell.message
    assert "Write num_processes=1" in cell.message


def test_one_device_hears_an_interrupt(notebook: Kernel) -> None:
    notebook.run(
        "def wait():\n"
        "    import threading\n"
        "    from nb_accelerate import Accelerator\n"
        "    Accelerator().print('waits')\n"
        "    threading.Event().wait()\n"
    ).ok()
    cell = notebook.start("notebook_launcher(wait, progress='off')")
    notebook.wait_for_output(cell, "waits")
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"
    notebook.run("notebook_launcher(train, progress='off'); None").ok()


def test_cells_run_on_a_persistent_rank_of_one_device(kernel: Kernel) -> None:
    kernel.run("%load_ext nb_accelerate").ok()
    cell = kernel.run(
        "%%distributed\nimport torch\nfrom nb_accelerate import Accelerator\naccelerator = Accelerator()\n"
        "print(accelerator.device, torch.ones(2, device=accelerator.device).sum().item())"
    ).ok()
    assert "xla:0 2.0" in cell.stdout
    assert "xla:0" in kernel.run("%%distributed\nprint(accelerator.device)").ok().stdout
    kernel.run("%unload_ext nb_accelerate").ok()


CELL = """%%distributed
import torch
from torch import nn
from nb_accelerate import Accelerator
accelerator = Accelerator()
torch.manual_seed(accelerator.process_index)
model = nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
print(f"rank {accelerator.process_index} of {accelerator.num_processes} on {accelerator.device}")
"""

STEP = """%%distributed --out weights
own = torch.full((2, 3), 1.0 + accelerator.process_index, device=accelerator.device)
accelerator.backward(model(own).mean())
optimizer.step()
optimizer.zero_grad()
accelerator.gather(model.weight.detach()).tolist()
"""


@pytest.mark.slow
@pytest.mark.limit(150)
def test_cells_run_on_ranks_of_four_chips_which_keep_their_state_after_an_error(kaggle: Kernel) -> None:
    kaggle.run("%load_ext nb_accelerate").ok()
    begun = kaggle.run(CELL).ok()
    assert all(f"rank {rank} of 4 on xla:0" in begun.stdout for rank in range(4)), begun.stdout
    kaggle.run(STEP).ok()
    kaggle.run("first = weights").ok()
    cell = kaggle.run("%%distributed\nif accelerator.process_index == 2: raise KeyError('of one core')")
    assert cell.error == "KeyError"
    assert "raise KeyError('of one core')" in cell.traceback
    kaggle.run(STEP).ok()
    # All began with the weights of rank 0, and the mean gradient of rows of 1, 2, 3 and 4 is 2.5.
    kaggle.run(
        "for rank in range(4):\n"
        "    assert first[rank] == first[0] and weights[rank] == weights[0], (first, weights)\n"
        "    for before, after in zip(first[rank], weights[rank], strict=True):\n"
        "        assert before == first[0][0] and all(abs(b - a - 0.25) < 1e-5 for b, a in zip(before, after)), weights"
    ).ok()
    kaggle.run("%unload_ext nb_accelerate").ok()


def test_four_chips_train_together_as_one_process_with_four_batches(kaggle: Kernel) -> None:
    cell = kaggle.run("values = notebook_launcher(train, (1, 13), num_processes=4, progress='text')").ok()
    assert "4 processes on XLA, xla" in cell.stdout
    kaggle.run(
        "import torch\n"
        "assert [value[:2] for value in values] == [(rank, 4) for rank in range(4)], values\n"
        "assert all(value[2] == [float(row) for row in range(13)] for value in values), values\n"
        "assert all(value[3] == values[0][3] for value in values), values\n"
        "torch.manual_seed(3)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
        "rows, targets = torch.arange(26.0).view(13, 2) / 13, torch.arange(13.0)\n"
        "for of_all in (range(8), [8, 9, 10, 11, 12, 0, 1, 2]):\n"
        "    of_all = list(of_all)\n"
        "    (model(rows[of_all]).squeeze(-1) - targets[of_all]).square().mean().backward()\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    optimizer.step(); optimizer.zero_grad()\n"
        "torch.testing.assert_close(torch.tensor(values[2][3]), model.weight.flatten().detach())"
    ).ok()


def test_one_of_four_chips_is_used_alone(kaggle: Kernel) -> None:
    said = kaggle.run("print(notebook_launcher(train, num_processes=1, progress='off')[0][:2])").ok().stdout
    assert said.strip().endswith("(0, 1)")


def test_objects_and_sizes_that_differ_are_exchanged(kaggle: Kernel) -> None:
    kaggle.run(
        "def exchange():\n"
        "    import torch\n"
        "    from nb_accelerate import Accelerator\n"
        "    from nb_accelerate.utils import broadcast_object_list, gather_object\n"
        "    a = Accelerator(); rank = a.process_index\n"
        "    assert gather_object([{'rank': rank, 'text': 'x' * 100 * rank}])[2] == {'rank': 2, 'text': 'x' * 200}\n"
        "    assert broadcast_object_list([rank, 'a' * rank], from_process=3) == [3, 'aaa']\n"
        "    mine = torch.full((rank + 1,), rank, device=a.device)\n"
        "    assert a.pad_across_processes(mine, pad_index=-1).tolist() == [rank] * (rank + 1) + [-1] * (3 - rank)\n"
        "    mine = {'a': torch.tensor(rank, device=a.device), 'b': torch.tensor([rank > 1], device=a.device)}\n"
        "    every = a.gather(mine)\n"
        "    assert every['a'].tolist() == [0, 1, 2, 3] and every['b'].tolist() == [False, False, True, True]\n"
        "    assert a.reduce(torch.tensor([1.0 + rank], device=a.device), 'mean').tolist() == [2.5]\n"
        "    assert a.reduce(torch.tensor(rank, device=a.device), 'max').item() == 3\n"
        "    a.set_trigger() if rank == 2 else None\n"
        "    assert a.check_trigger() and not a.check_trigger()\n"
        "    a.wait_for_everyone()\n"
        "    return rank\n"
    ).ok()
    assert "[0, 1, 2, 3]" in kaggle.run("print(notebook_launcher(exchange, progress='off'))").ok().stdout


def test_four_chips_save_once_and_go_on_from_there(kaggle: Kernel, tmp_path: Path) -> None:
    kaggle.run(
        "def save_or_load(folder, saves):\n"
        "    import torch\n"
        "    from nb_accelerate import Accelerator\n"
        "    a = Accelerator()\n"
        "    torch.manual_seed(a.process_index if saves else 99)\n"
        "    model = torch.nn.Linear(3, 3)\n"
        "    model, optimizer = a.prepare(model, torch.optim.AdamW(model.parameters()))\n"
        "    if saves:\n"
        "        a.backward(model(torch.ones(2, 3, device=a.device)).square().mean()); optimizer.step()\n"
        "        a.save_state(folder)\n"
        "    else:\n"
        "        a.load_state(folder)\n"
        "    moments = [value['exp_avg'].tolist() for value in optimizer.state.values()]\n"
        "    return model.weight.tolist(), moments, torch.rand(1, device=a.device).item()\n"
    ).ok()
    kaggle.run(f"saved = notebook_launcher(save_or_load, ({str(tmp_path / 'state')!r}, True), progress='off')").ok()
    kaggle.run(f"loaded = notebook_launcher(save_or_load, ({str(tmp_path / 'state')!r}, False), progress='off')").ok()
    kaggle.run("assert saved == loaded and all(one[:2] == saved[0][:2] for one in saved), (saved, loaded)").ok()


def test_a_rank_that_is_killed_ends_the_others_and_is_named(kaggle: Kernel) -> None:
    kaggle.run(
        "def die():\n"
        "    import os, signal\n"
        "    from nb_accelerate import Accelerator\n"
        "    a = Accelerator()\n"
        "    if a.process_index == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    a.wait_for_everyone()\n"
    ).ok()
    cell = kaggle.run("notebook_launcher(die, progress='off')")
    assert cell.error == "RankDiedError"
    assert "rank 2" in cell.message.lower()
    assert "SIGKILL" in cell.message
    assert [child for child in kaggle.processes() if "nb-rank" in (name_of(child) or "")] == []
    kaggle.run("notebook_launcher(train, progress='off'); None").ok()


def test_an_exception_on_one_of_four_is_raised_and_the_others_end(kaggle: Kernel) -> None:
    kaggle.run(
        "def fail():\n"
        "    from nb_accelerate import Accelerator\n"
        "    a = Accelerator()\n"
        "    if a.process_index == 1: raise ZeroDivisionError('of rank 1')\n"
        "    a.wait_for_everyone()\n"
    ).ok()
    cell = kaggle.run("notebook_launcher(fail, progress='off')")
    assert cell.error == "ZeroDivisionError"
    assert "rank 1" in cell.traceback.lower()


ENDINGS = {
    "raise ValueError('before the runtime')": "ValueError",
    "a = Accelerator(); raise KeyError('on all')": "KeyError",
    "a = Accelerator(); last(a) and os.kill(os.getpid(), signal.SIGKILL); a.wait_for_everyone()": "RankDiedError",
    "a = Accelerator(); last(a) and os._exit(3); a.wait_for_everyone()": "RankDiedError",
    "a = Accelerator(); last(a) and os.kill(os.getpid(), signal.SIGSEGV); a.wait_for_everyone()": "RankDiedError",
}
"""Bodies of a function, and what its launch raises."""


@pytest.mark.limit(150)
@pytest.mark.parametrize("machine", ["notebook", "kaggle"])
def test_after_every_way_to_end_nothing_is_left_and_the_next_launch_works(
    request: pytest.FixtureRequest, machine: str
) -> None:
    kernel: Kernel = request.getfixturevalue(machine)

    def ranks() -> list[psutil.Process]:
        return [child for child in kernel.processes() if "nb-rank" in (name_of(child) or "")]

    kernel.run(
        "import os, signal\nfrom nb_accelerate import Accelerator\n"
        "def last(a): return a.process_index == a.num_processes - 1"
    ).ok()
    for body, error in ENDINGS.items():
        cell = kernel.run(f"def end():\n    {body}\nnotebook_launcher(end, progress='off')")
        assert cell.error == error, (body, cell.message)
        assert ranks() == []
    kernel.run(
        "def wait():\n    import threading\n    a = Accelerator()\n    a.print('waits')\n"
        "    threading.Event().wait() if last(a) else a.wait_for_everyone()"
    ).ok()
    cell = kernel.start("notebook_launcher(wait, progress='off')")
    kernel.wait_for_output(cell, "waits")
    kernel.interrupt()
    assert kernel.finish(cell).error == "KeyboardInterrupt"
    assert ranks() == []
    kernel.run("notebook_launcher(train, progress='off'); None").ok()


def test_processes_that_the_runtime_does_not_connect_are_refused(kernel: Kernel) -> None:
    told = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    kernel.run(f"import os; os.environ |= {told}").ok()
    cell = kernel.run("from nb_accelerate import Accelerator; Accelerator()")
    assert cell.error == "ConfigError"
    assert "4 (WORLD_SIZE), but the XLA" in cell.message


def test_a_script_is_launched_on_the_tpu(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from nb_accelerate import Accelerator\nprint(Accelerator().device)\n")
    command = [sys.executable, "-m", "nb_accelerate", "launch", "--tpu", "--quiet", str(script)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "xla:0"

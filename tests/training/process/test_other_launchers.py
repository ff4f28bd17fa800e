"""What scripts of other launchers ask for: a function prepared for their processes, cores near a device, TPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch
import torch.multiprocessing

from nb_accelerate import Accelerator, PartialState, utils
from nb_accelerate.base.devices.cuda import pci_address
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process import devices
from nb_accelerate.training.process.rng import RNGType, synchronize

NAMES = ("RANK", "LOCAL_RANK", "FORK_LAUNCHED")


def test_a_function_of_another_launcher_finds_out_which_rank_it_is(monkeypatch):
    monkeypatch.setenv("NPROC", "4")
    monkeypatch.setenv("NODE_RANK", "2")
    before = dict(os.environ)
    run = utils.PrepareForLaunch(lambda extra: [extra, *map(os.environ.get, NAMES)], "MULTI_CPU")
    assert run(1, "extra") == ["extra", "9", "1", "1"]
    alone = utils.PrepareForLaunch(lambda: [os.environ.get(name) for name in NAMES])
    assert alone(0) == [None, None, "1"]
    assert dict(os.environ) == before
    with pytest.raises(ConfigError, match="distributed_type='MULTI' is none"):
        utils.PrepareForLaunch(print, "MULTI")
    with pytest.raises(ConfigError, match="ACCELERATE_DEBUG_RDV_FILE"):
        utils.PrepareForLaunch(print, debug=True)(0)


def test_a_configuration_is_written_once_and_is_that_of_accelerate(tmp_path, capsys):
    from accelerate.utils import write_basic_config

    from nb_accelerate.base.config.file import read_config

    theirs = read_config(write_basic_config("bf16", str(tmp_path / "theirs.json")))
    ours = read_config(utils.write_basic_config("BF16", tmp_path / "ours.json"))
    assert ours is not None
    assert theirs is not None
    assert {key: ours.get(key, False) for key in theirs.to_dict()} == theirs.to_dict()
    assert utils.write_basic_config(save_location=tmp_path / "ours.json") is False
    assert "ours.json is there" in capsys.readouterr().out
    assert read_config(tmp_path / "ours.json") is ours
    with pytest.raises(ConfigError, match="mixed_precision"):
        utils.write_basic_config("half", tmp_path / "other.json")


def _meet(folder: str) -> None:
    state = PartialState(cpu=True)
    (mine,) = utils.gather_object([state.process_index])[state.process_index :][:1]
    with open(os.path.join(folder, f"{mine}-of-{state.num_processes}"), "w"):
        state.destroy_process_group()


@pytest.mark.slow
@pytest.mark.may_leave("processes", "descriptors")  # multiprocessing's tracker
def test_processes_for_debugging_meet_at_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEBUG_RDV_FILE", str(tmp_path / "meet"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "found").mkdir()
    run = utils.PrepareForLaunch(_meet, debug=True)
    torch.multiprocessing.start_processes(run, (str(tmp_path / "found"),), nprocs=2, start_method="spawn")
    assert sorted(file.name for file in (tmp_path / "found").iterdir()) == ["0-of-2", "1-of-2"]


def test_lists_of_cores_are_read():
    assert devices.parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert devices.parse_cores("\n") == set()


@pytest.fixture
def one_gpu(monkeypatch, tmp_path):
    """A device on a machine with a memory node that has core 0 and cores we may not use."""
    place = tmp_path / "0000:3b:00.0"
    place.mkdir()
    (place / "local_cpulist").write_text("0,900-999\n")
    properties = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties if index == 0 else object())
    near = devices.near_cores
    monkeypatch.setattr(devices, "near_cores", lambda address: near(address, tmp_path))
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("one_gpu")
def test_a_process_runs_on_the_cores_near_its_device(caplog):
    before = os.sched_getaffinity(0)
    utils.set_numa_affinity(1)  # torch does not say where that is
    assert os.sched_getaffinity(0) == before
    with caplog.at_level("INFO"):
        utils.set_numa_affinity(0, verbose=True)
    assert os.sched_getaffinity(0) == {0}
    assert "on 1 cores: [0]" in caplog.text


def test_cores_are_left_alone_where_there_is_no_device_or_no_word_of_it(tmp_path):
    before = os.sched_getaffinity(0)
    utils.set_numa_affinity(0)
    assert devices.near_cores("0000:99:00.0", tmp_path) == set()
    assert os.sched_getaffinity(0) == before


@pytest.mark.usefixtures("one_gpu")
def test_a_process_on_the_processor_is_not_bound_to_the_cores_near_a_gpu(monkeypatch):
    before = os.sched_getaffinity(0)
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    PartialState._reset_state()
    PartialState(cpu=True)
    assert os.sched_getaffinity(0) == before
    PartialState._reset_state()
    PartialState()
    assert os.sched_getaffinity(0) == {0}


def test_torch_xla_is_installed_on_colab_only(monkeypatch):
    monkeypatch.setitem(sys.modules, "google", None)  # no package of that name is installed
    with pytest.raises(RuntimeError, match=r"Colab.*pip install torch_xla\[tpu\]~=\d+\.\d+\.0"):
        utils.install_xla()
    for name in ("google", "google.colab"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin="a file")
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: ran.append((command[:4], command[4:6], check)))
    utils.install_xla(upgrade=True)
    major, minor = torch.__version__.split(".")[:2]
    pip = [sys.executable, "-m", "pip", "install"]
    assert ran == [
        (pip, ["--upgrade", "torch"], True),
        (pip, [f"torch_xla[tpu]~={major}.{minor}.0", "--find-links"], True),
    ]


def test_random_numbers_of_a_tpu_are_in_step(monkeypatch):
    states = [7]
    xla = types.SimpleNamespace(get_rng_state=lambda: states[-1], set_rng_state=states.append)
    synchronize((RNGType.XLA,), lambda state: state + 1)  # nothing where torch_xla is not in use
    runtime = types.SimpleNamespace(_xla_runtime_is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch_xla", types.SimpleNamespace(_XLAC=runtime))
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", xla)
    synchronize((RNGType.XLA,), lambda state: state + 1)
    utils.set_seed(11)
    assert states == [7, 8, 11]
    assert Accelerator(cpu=True, rng_types=["xla"]).rng_types == [RNGType.XLA]


def test_an_address_on_the_bus_is_written_as_the_system_writes_it():
    properties = types.SimpleNamespace(pci_domain_id=1, pci_bus_id=10, pci_device_id=31)
    assert pci_address(properties) == "0001:0a:1f.0"

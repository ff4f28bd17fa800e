"""``simgpu``: two devices that behave like GPUs, in the memory of the host. See tests/second_device/device/simgpu.

They are in the processes that a test starts, as ranks or kernels, and not in pytest's own, which forks, and whose other
tests are to find no GPU. The library is built after the collection, as that may take longer than a test has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fixtures.devices import Gpus
from second_device.building import build, obstacle

pytest.register_assert_rewrite("launch.test_gpus", "pool.test_failures", "pool.test_gpus", "pool.test_random_numbers")

_DEVICE = Path(__file__).with_name("device")

_library = pytest.StashKey["Path | str | RuntimeError"]()
"""The folder of the library, or why there can be none, or how the compiler failed."""


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the library if a test needs it; in a run of several workers each asks, and one builds."""
    is_run = not session.config.option.collectonly
    if is_run and any("simgpu_environment" in getattr(item, "fixturenames", ()) for item in session.items):
        try:
            session.config.stash[_library] = obstacle() or build()
        except RuntimeError as error:
            session.config.stash[_library] = error


@pytest.fixture(scope="session")
def simgpu_environment(pytestconfig: pytest.Config) -> Mapping[str, str]:
    """The variables that give a new process two devices. Skips where there is no compiler."""
    library = pytestconfig.stash[_library]
    if isinstance(library, str):
        pytest.skip(library)
    if isinstance(library, RuntimeError):
        raise library
    path = os.pathsep.join(filter(None, [str(_DEVICE), os.environ.get("PYTHONPATH")]))
    return {"SIMGPU_DEVICES": "2", "SIMGPU_LIBRARY": str(library), "PYTHONPATH": path}


@pytest.fixture(scope="module")
def simgpu(simgpu_environment: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Let what the tests of this folder start have the devices: launches, kernels, commands.

    The module has a warm server of its own, since servers import torch, and the device with it. Modules of other
    folders may run between two of this one, and are to find no GPU.
    """
    from nb_accelerate.notebook.launch.servers import close_warm_server

    close_warm_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(_DEVICE))
        patch.delenv("ACCELERATE_USE_CPU", raising=False)  # a machine with GPUs has it, for other tests
        for variable, value in simgpu_environment.items():
            patch.setenv(variable, value)
        from simgpu import row

        row.add()
        yield simgpu_environment
        row.remove()
    close_warm_server()


@pytest.fixture(scope="module")
def gpus(simgpu: Mapping[str, str]) -> Gpus:
    return Gpus(type="simgpu", backend="simccl", count=2, in_use="simgpu was used in this notebook")

"""Tests on the CPU device of torch_xla's runtime. `make test-xla` installs it; without it they are left out."""

import importlib.util
import os

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]


@pytest.fixture(autouse=True)
def on_xla(gpu_or_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs choose the XLA device that there is; other tests use the CPU."""
    assert os.environ.get("PJRT_DEVICE") == "CPU", "run these tests with: make test-xla"
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)


@pytest.fixture(scope="session")
def started_runtime() -> None:
    """Start the runtime of XLA in this process, which keeps its threads and files until it ends."""
    import torch
    from torch_xla._internal import pjrt

    pjrt.initialize_singleprocess()
    torch.ones(1, device="xla").cpu()

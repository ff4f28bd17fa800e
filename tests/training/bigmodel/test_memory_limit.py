"""A model of 2 GB generates where 1 GB of memory is allowed, files included; one that is read into memory is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT = 1 << 30

WRITE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=1024, intermediate_size=4096, num_hidden_layers=28, num_attention_heads=16, vocab_size=32_000
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1], max_shard_size="500MB")
"""

GENERATE = """
import os, sys
from pathlib import Path

limit, folder, device = sys.argv[1:]
(Path(limit) / "cgroup.procs").write_text(str(os.getpid()))

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from nb_accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model

config = LlamaConfig.from_pretrained(folder)
with init_empty_weights():
    model = LlamaForCausalLM(config)
if device == "disk":
    model = load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"})
else:
    model = model.to_empty(device="cpu")
    load_checkpoint_in_model(model, folder)
print(model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=1, do_sample=False).tolist())
"""


@pytest.fixture
def memory_limit() -> Iterator[Path]:
    """A control group of processes that may use 1 GB of memory, pages of files that they read first included."""
    root, file = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not root.is_dir():
        root, file = Path("/sys/fs/cgroup"), "memory.max"
    group = root / f"nb_accelerate-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / file).write_text(str(LIMIT))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"this user may not make a control group: {error}")
    if (group / "memory.swap.max").exists():
        (group / "memory.swap.max").write_text("0")
    yield group
    group.rmdir()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 2 GB, none of which is in the page cache."""
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, "-c", WRITE, folder], check=True)
    return folder


def _drop(folder: Path) -> None:
    """Drop the files from the page cache: pages are charged to the group that reads them first."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _generate(limit: Path, folder: Path, device: str) -> subprocess.CompletedProcess[str]:
    _drop(folder)
    return subprocess.run(
        [sys.executable, "-c", GENERATE, limit, folder, device], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.limit(180)  # seconds: how long a system looks for pages to drop varies by a factor of three
@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_mapped_model_generates_where_one_in_memory_is_killed(memory_limit: Path, folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 2e9
    in_memory = _generate(memory_limit, folder, "cpu")
    assert in_memory.returncode == -signal.SIGKILL, in_memory.stderr
    mapped = _generate(memory_limit, folder, "disk")
    assert mapped.returncode == 0, mapped.stderr
    assert mapped.stdout.startswith("[[1, 1, 1, 1, ")

"""Which device belongs to which rank of a process group, and what is said when that cannot work."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from nb_accelerate.base.config.env import Environment
from nb_accelerate.errors import ConfigError
from nb_accelerate.training.process import context, devices, group
from nb_accelerate.training.process.setup import setup_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fixtures.ranks import RunRanks


@pytest.fixture
def gloo_group(tmp_path: Path) -> Iterator[None]:
    """A group that somebody has made."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    context.reset()


@pytest.mark.usefixtures("gloo_group")
@pytest.mark.parametrize(("gpus", "cpu", "is_said"), [(2, None, True), (2, True, False), (0, None, False)])
def test_a_gloo_group_that_keeps_gpus_idle_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpus: int, cpu: bool | None, is_said: bool
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with caplog.at_level(logging.WARNING):
        assert setup_process(cpu=cpu, environment=Environment({})).device == torch.device("cpu")
    assert ("although there are cuda" in caplog.text) is is_said
    assert ("init_process_group('nccl')" in caplog.text) is is_said


def test_the_second_rank_on_a_device_is_refused_and_both_are_named():
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    kind, device = devices.device_kind("cuda"), torch.device("cuda", 0)
    group.claim(store, 0, kind, device, "GPU-1")
    group.claim(store, 3, kind, device, "GPU-2")
    with pytest.raises(ConfigError, match=r"same GPU \(cuda:0, GPU-1\)"):
        group.claim(store, 2, kind, device, "GPU-1")


def test_ranks_that_are_shown_the_same_device_are_refused_before_nccl_is_asked(run_ranks: RunRanks):
    def train() -> None:
        kind = next(kind for kind in devices.DEVICE_KINDS if kind.name == "cuda")
        fake = {
            "uuid": lambda _: "GPU-1",
            "is_available": lambda: True,
            "count": lambda: 1,
            "set_device": lambda _: None,
        }
        for name, value in fake.items():
            object.__setattr__(kind, name, value)
        dist.init_process_group = lambda **_: threading.Event().wait()  # nccl, which is not in every build of torch
        setup_process(cpu=False)

    with pytest.raises(ConfigError, match=r"Rank [01] and.*\(cuda:0, GPU-1\)"):
        run_ranks(train)

"""Register simccl, the backend of torch.distributed for simgpu."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from simgpu.library import library

if TYPE_CHECKING:
    from datetime import timedelta


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    on_host = dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, timeout)
    return library.Backend(on_host)


def register() -> None:
    dist.Backend.register_backend("simccl", _make, devices=["simgpu"])

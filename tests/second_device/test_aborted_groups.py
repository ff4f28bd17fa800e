"""Groups whose collectives run on a device: they are aborted, and where that cannot work it is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fixtures.ranks import RunRanks

pytestmark = pytest.mark.usefixtures("simgpu")


def test_groups_with_a_backend_for_each_type_of_device_are_aborted(run_ranks: RunRanks) -> None:
    def abort() -> tuple[str, str]:
        import os

        import torch
        import torch.distributed as dist

        from nb_accelerate.training.process import group

        device = torch.device("simgpu", int(os.environ["LOCAL_RANK"]))
        torch.simgpu.set_device(device)  # type: ignore[attr-defined]
        dist.init_process_group("cpu:gloo,simgpu:simccl", device_id=device)
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor)
        assert tensor.item() == 2.0
        group.abort()
        try:
            dist.all_reduce(tensor)
        except dist.DistBackendError as error:
            return str(dist.get_backend()), str(error).partition("\n")[0]
        return "", "not aborted"

    for backend, error in run_ranks(abort):
        assert "simccl" in backend
        assert "abort" in error


def test_a_name_of_torch_that_is_gone_is_an_error_and_no_group_that_others_wait_for(run_ranks: RunRanks) -> None:
    def abort() -> str:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        from nb_accelerate.training.in_ranks import training_half

        training_half.join_group(timedelta(seconds=20))
        whole: Any = dist.group.WORLD
        kind = type(whole._get_backend(torch.device("simgpu")))
        removed = kind._group_start
        del kind._group_start
        try:
            training_half.abort_groups()
        except AttributeError as error:
            return str(error)
        finally:
            kind._group_start = removed
        return ""

    assert all("_group_start" in error for error in run_ranks(abort, world_size=1))

"""Random numbers of devices, which ranks of one machine number differently than they use them."""

from __future__ import annotations

from dataclasses import replace

import torch

from nb_accelerate.training.process import rng
from nb_accelerate.training.process.devices import device_kind


def test_ranks_that_use_different_devices_share_the_state_of_the_one_that_each_uses() -> None:
    used, states = 0, [torch.tensor([10]), torch.tensor([11])]

    def set_state(state: torch.Tensor, device: int | None = None) -> None:
        states[used if device is None else device] = state

    kind = replace(
        device_kind("cuda"),
        get_rng_state=lambda: states[used],
        get_rng_states=lambda: list(states),
        set_rng_state=set_state,
        count=lambda: 2,
        current_device=lambda: used,
    )
    python, numpy_, host = "random_state", "numpy_random_seed", "torch_manual_seed"
    of_first = rng.capture(kind, all_devices=False)
    assert set(of_first) == {python, numpy_, host, "torch_cuda_manual_seed", "torch_cuda_used"}
    used = 1  # the second rank
    rng.restore({name: state for name, state in of_first.items() if "cuda" in name}, kind)
    assert [one.item() for one in states] == [10, 10]
    assert [one.item() for one in rng.capture(kind)["torch_cuda_manual_seed"]] == [10, 10]

"""The notebook about shards: one model with DDP, FSDP and DeepSpeed, its losses and its memory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from fixtures.notebook_runs import values_of

NOTEBOOK = Path(__file__).parents[3] / "notebooks" / "03_sharded_training.ipynb"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_kernels")
@pytest.mark.limit(300)
@pytest.mark.may_leave("files")  # PyTorch makes an empty torchinductor_USER when the first optimizer is built
def test_shards_learn_what_whole_models_learn_in_half_of_the_memory():
    values = values_of(
        NOTEBOOK,
        apart="apart",
        losses="losses['DDP']",
        weights="sum(weight.nbytes for weight in GPT().parameters())",
        held="{name: [(one.held.parameters, one.held.gradients, one.held.optimizer) for one in ranks] "
        "for name, ranks in memory.items()}",
        sharding="[ranks[0].held.sharding for ranks in memory.values()]",
    )
    assert values["apart"] < 1e-4
    assert values["losses"][-1] < values["losses"][0] - 1
    expected = {"DDP": (1, 1, 2), "FSDP": (0.5, 0.5, 1)}
    shardings = ["", "FSDP, dp_shard 2"]
    if find_spec("deepspeed"):
        expected["ZeRO stage 3"] = (0.5, 0.5, 1.5)
        shardings.append("ZeRO stage 3, 2 ranks")
    assert values["sharding"] == shardings
    assert values["held"].keys() == expected.keys()
    for name, parts in expected.items():
        for rank in values["held"][name]:
            assert [number / values["weights"] for number in rank] == pytest.approx(list(parts), rel=0.1)

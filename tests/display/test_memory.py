"""What is said about the memory of ranks: how a model is spread, who held what when it did not suffice, what to do."""

from __future__ import annotations

import dataclasses
import re

from nb_accelerate.base.progress_page import ProgressPage, RankMemory, Sample
from nb_accelerate.base.progress_page.layout import SIZE
from nb_accelerate.base.progress_page.sample import read
from nb_accelerate.errors.out_of_memory import bytes_wanted, says_out_of_memory
from nb_accelerate.notebook.display.memory import advice, rows_that_fit, sharded_line, shortage
from nb_accelerate.notebook.magics.commands import status_table
from nb_accelerate.notebook.ranks.status import RankStatus

GB = 10**9
FULL = RankMemory(
    parameters=2 * GB, gradients=2 * GB, optimizer=4 * GB, base=0, used=14 * GB, limit=15 * GB, peak=15 * GB
)  # fmt: skip
SHARDED = RankMemory(parameters=GB, gradients=GB, optimizer=2 * GB, peak=9 * GB, sharding="FSDP, dp_shard 2")


def test_what_is_held_stays_on_the_page_from_one_call_to_the_next():
    memory = bytearray(SIZE)
    page = ProgressPage(memory)
    page.begin_request()
    page.rank_memory(SHARDED)
    assert read(memory).held == SHARDED
    page.begin_request()
    assert read(memory).held == SHARDED
    odd = dataclasses.replace(SHARDED, parameters=-3, sharding="x" * 200)
    page.rank_memory(odd)
    assert (read(memory).held.parameters, read(memory).held.sharding) == (0, "x" * 95)


def test_a_line_says_how_a_model_is_spread_and_a_plain_one_is_not():
    assert sharded_line({0: FULL, 1: FULL}) == ""
    text = "FSDP, dp_shard 2: each rank holds parameters 1.0 GB, gradients 1.0 GB, optimizer 2.0 GB; peak 9.0 GB"
    assert sharded_line({0: SHARDED, 1: SHARDED}) == text
    more = dataclasses.replace(SHARDED, optimizer=3 * GB)
    assert re.search(r"4\.0 .*5\.0 .*rank 1 ", sharded_line({0: SHARDED, 1: more}))


def test_the_rows_that_fit_are_those_for_whose_activations_there_is_room():
    assert FULL.activations == 6 * GB
    # 15 GB, less 8 GB that do not depend on the batch, for 6 GB that were there and 8 GB more that were wanted.
    assert rows_that_fit(FULL, rows=64, wanted=8 * GB) == 32
    assert rows_that_fit(FULL, rows=64, wanted=22 * GB) == 16
    assert rows_that_fit(FULL, rows=64, wanted=0) == 32  # it had not come to its peak
    assert rows_that_fit(FULL, rows=0, wanted=8 * GB) is None
    assert rows_that_fit(RankMemory(), rows=64, wanted=8 * GB) is None
    waiting = dataclasses.replace(FULL, optimizer=0, pending=4 * GB, used=10 * GB)
    assert rows_that_fit(waiting, rows=64, wanted=22 * GB) == 16  # Adam's state comes with the first step


def test_what_held_most_is_what_is_advised_against_first():
    small_batch = advice(FULL, rows=64, ranks=4, wanted=GB)
    assert "batch_size=32 and gradient_accumulation_steps=2" in small_batch[0]
    assert re.search(r"4 ranks .*2\.0 .*8\.0 ", small_batch[1])
    activations = advice(dataclasses.replace(FULL, gradients=0, optimizer=0), rows=64, ranks=4, wanted=GB)
    assert "activations" in activations[1]
    too_large = advice(dataclasses.replace(FULL, limit=7 * GB), rows=64, ranks=2, wanted=GB)
    assert too_large[0].startswith("Shard the model"), "no batch is small enough"
    stage_2 = advice(dataclasses.replace(FULL, sharding="ZeRO stage 2, 4 ranks"), rows=1, ranks=4, wanted=GB)
    assert [one.rpartition(": ")[2] for one in stage_2[:2]] == [
        "DeepSpeedPlugin(zero_stage=3).",
        'DeepSpeedPlugin(offload_optimizer_device="cpu").',
    ]


def test_who_held_what_is_a_table_with_the_rank_that_failed():
    samples = {rank: Sample(held=FULL if rank == 1 else SHARDED, rows=192) for rank in range(3)}
    lines = shortage(samples, failed=1, wanted=GB).splitlines()
    assert lines[0].endswith("in memory:")
    assert lines[3].split()[1:-2] == ["2.0", "GB", "2.0", "GB", "4.0", "GB", "6.0", "GB", "15.0", "GB", "15.0", "GB"]
    assert lines[3].endswith("  <- failed")
    assert "instead of 64" in lines[5]
    assert len(lines) == 7
    assert shortage({0: Sample()}, failed=0, wanted=GB) == ""


def test_what_is_larger_than_the_memory_is_not_blamed_on_the_batch():
    (tip,) = advice(FULL, rows=64, ranks=2, wanted=4000 * 10**12)
    assert re.match(r"4,000\.0 TB .*15\.0 GB", tip)
    small = dataclasses.replace(FULL, parameters=10**6, gradients=10**6, optimizer=10**6)
    assert not [tip for tip in advice(small, rows=64, ranks=2, wanted=GB) if "Shard" in tip]


def test_errors_about_memory_are_known_by_type_or_text():
    cuda = "CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has a total capacity of 139.80 GiB of which"
    cpu = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    assert says_out_of_memory("OutOfMemoryError", cuda)
    assert says_out_of_memory("RuntimeError", cpu)
    assert says_out_of_memory("torch.AcceleratorError", "CUDA error: out of memory")
    assert says_out_of_memory("torch.distributed.DistBackendError", "NCCL error: Cuda failure 2 'out of memory'")
    assert not says_out_of_memory("torch.AcceleratorError", "CUDA error: device-side assert triggered")
    assert not says_out_of_memory("ValueError", cpu)
    assert not says_out_of_memory("RuntimeError", "shape mismatch")
    assert bytes_wanted(cuda) == int(20.5 * 2**20)
    assert bytes_wanted(cpu + "allocate 65536000 bytes. Error code 12") == 65536000
    assert bytes_wanted("killed") == 0


def test_the_status_of_ranks_shows_what_they_hold_where_there_are_models():
    def one(**more):
        return RankStatus(rank=0, pid=7, state="idle", device="cpu", memory=3 * GB, **more)

    assert status_table([one()], {}).splitlines()[0].split() == ["rank", "pid", "device", "memory", "state", "now"]
    lines = status_table([one(held=SHARDED)], {}).splitlines()
    assert lines[0].split()[4:8] == ["peak", "parameters", "gradients", "optimizer"]
    assert " 9.0 GB " in lines[1]
    assert lines[2] == "models: FSDP, dp_shard 2"

"""Values that were made for a full batch, and values gathered after the loop, beside accelerate."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from nb_accelerate.training.accelerator import Accelerator

ROWS, BATCH = 21, 8
SCRIPT = f"""
import sys, torch
from torch.utils.data import DataLoader
exec(sys.argv[1])
print(evaluate(__import__("accelerate").Accelerator(cpu=True), {ROWS}, {BATCH}))
"""
EVALUATE = """
def evaluate(accelerator, rows, size):
    import torch
    from torch.utils.data import DataLoader

    found = []
    for batch in accelerator.prepare(DataLoader(range(rows), batch_size=size)):
        losses = accelerator.gather_for_metrics(batch.float().mean().repeat(size))
        pair = accelerator.gather_for_metrics({"rows": batch, "twice": (torch.cat([batch, batch])[:size],)})
        objects = accelerator.gather_for_metrics([str(row) for row in batch.tolist()])
        lists = accelerator.gather_for_metrics([torch.ones(1)] * len(batch), use_gather_object=True)
        found.append([len(losses), len(pair["rows"]), len(pair["twice"][0]), objects, len(lists)])
        found.append(float(accelerator.gather_for_metrics(torch.tensor(1.0)).sum()))
    outside = accelerator.gather_for_metrics(torch.arange(5))
    return found, outside.tolist(), accelerator.gather_for_metrics(["a", "b"])
"""


def ours(script):
    names: dict = {}
    exec(script, names)
    return names["evaluate"](Accelerator(cpu=True), ROWS, BATCH)


@pytest.mark.slow
def test_the_last_batch_of_one_process_is_cut_as_accelerate_cuts_it():
    theirs = subprocess.run(
        [sys.executable, "-c", SCRIPT, EVALUATE], capture_output=True, text=True, check=True, timeout=50
    ).stdout
    found = ours(EVALUATE)
    assert str(found) == theirs.strip().splitlines()[-1]
    assert [entry[0] for entry in found[0][::2]] == [8, 8, 5]


def test_mean_losses_of_an_evaluation_do_not_depend_on_the_number_of_processes(run_ranks):
    def evaluate(size):
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(torch.arange(float(ROWS)), batch_size=size))
        return sum(len(accelerator.gather_for_metrics(batch.mean().repeat(size))) for batch in loader)

    assert [evaluate(BATCH), *run_ranks(evaluate, BATCH // 2)] == [ROWS] * 3


def test_what_is_no_row_of_a_full_batch_stays_whole_in_one_process():
    accelerator = Accelerator(cpu=True)
    for batch in accelerator.prepare(DataLoader(range(ROWS), batch_size=BATCH)):
        boxes = torch.zeros(57, 4)
        assert len(accelerator.gather_for_metrics(boxes)) == 57
        assert len(accelerator.gather_for_metrics(list(range(3)))) == 3
        assert torch.equal(accelerator.gather_for_metrics(batch), batch)
    stream = accelerator.prepare(DataLoader(range(ROWS), batch_size=None))
    assert sum(1 for row in stream if accelerator.gather_for_metrics(torch.ones(8)).sum() == 8) == ROWS


def test_values_gathered_after_the_loop_are_those_of_all_processes(run_ranks):
    def gather():
        accelerator = Accelerator(cpu=True)
        kept = [accelerator.gather_for_metrics(batch) for batch in accelerator.prepare(DataLoader(range(6)))]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mine = torch.cat(kept)[accelerator.process_index * 3 :][:3]
            found = accelerator.gather_for_metrics(mine).tolist(), accelerator.gather_for_metrics(["row"])
        return *found, [str(warning.message)[:43] for warning in caught]

    told = ["gather_for_metrics was called outside a loop"[:43]] * 2
    assert run_ranks(gather) == [(list(range(6)), ["row"] * 2, told), (list(range(6)), ["row"] * 2, [])]


@pytest.mark.parametrize("world_size", [1, 2])
def test_lists_in_a_tuple_are_gathered_each_by_itself(run_ranks, world_size):
    """The usual line of translation scripts: texts and their references."""

    def evaluate():
        accelerator = Accelerator(cpu=True)
        found = ([], [], [])
        for batch in accelerator.prepare(DataLoader(range(7), batch_size=2)):
            texts, references = ([f"{kind}{row}" for row in batch.tolist()] for kind in "tr")
            columns = accelerator.gather_for_metrics((texts, references, batch))
            assert type(columns) is tuple
            for rows, column in zip(found, columns, strict=True):
                rows.extend(column.tolist() if isinstance(column, torch.Tensor) else column)
        return found

    expected = tuple([kind(row) for row in range(7)] for kind in ("t{}".format, "r{}".format, int))
    assert run_ranks(evaluate, world_size=world_size) == [expected] * world_size

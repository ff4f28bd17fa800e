"""The quick tours' evaluation, what only some processes run, and launching from a notebook."""

from __future__ import annotations

import pytest
from training.tours.stage import ROWS, START, play, stage

EVALUATION = """
model = accelerator.prepare(model)
validation_dataloader = accelerator.prepare(validation_dataloader)

for inputs, targets in validation_dataloader:
    predictions = model(inputs)
    # Gather all predictions and targets
    all_predictions, all_targets = accelerator.gather_for_metrics((predictions, targets))
    # Example of use with a *Datasets.Metric*
    metric.add_batch(all_predictions, all_targets)
"""

EVALUATION_WITH_GATHER = """
model = accelerator.prepare(model)
validation_dataloader = accelerator.prepare(validation_dataloader)

for inputs, targets in validation_dataloader:
    predictions = model(inputs)
    # Gather all predictions and targets
    all_predictions = accelerator.gather(predictions)
    all_targets = accelerator.gather(targets)
    # Example of use with a `Datasets.Metric`
    metric.add_batch(all_predictions, all_targets)
"""


@pytest.mark.contract("training: gathered evaluation")
def test_evaluation_sees_every_row_once_and_gather_sees_the_copies_too(run_ranks):
    expected = stage()["dataloader"].dataset.tensors[1].tolist()
    for found in run_ranks(play, START, EVALUATION):
        assert found["references"] == expected
        assert len(found["predictions"]) == ROWS
    for found in run_ranks(play, START, EVALUATION_WITH_GATHER):
        assert found["references"][:ROWS] == expected
        assert len(found["predictions"]) == 24


NOTEBOOK = """
from nb_accelerate import notebook_launcher

notebook_launcher(training_function)
"""


def test_a_training_function_is_launched_from_a_notebook(tmp_path, monkeypatch, capfd):
    def training_function() -> None:
        from nb_accelerate import Accelerator

        accelerator = Accelerator()
        (tmp_path / f"rank{accelerator.process_index}").write_text(str(accelerator.num_processes))

    exec(NOTEBOOK, {"training_function": training_function})
    ranks = len(list(tmp_path.iterdir()))
    assert ranks >= 1
    assert (tmp_path / "rank0").read_text() == str(ranks)


ONE_PROCESS = """
from nb_accelerate import DistributedType

if accelerator.distributed_type == DistributedType.TPU:
    # do something of static shape
    done.append("static")
else:
    # go crazy and be dynamic
    done.append("dynamic")

if accelerator.is_local_main_process:
    # Is executed once per server
    done.append("first here")

from tqdm.auto import tqdm

progress_bar = tqdm(range(args.max_train_steps), disable=not accelerator.is_local_main_process)
done.append("hidden" if progress_bar.disable else "shown")
progress_bar.close()

if accelerator.is_local_main_process:
    print("Accelerate is the best")

if accelerator.is_main_process:
    repo.push_to_hub()

@accelerator.on_local_main_process
def do_my_thing():
    "Something done once per server"
    do_thing_once_per_server()

do_my_thing()

@accelerator.on_main_process
def do_my_thing():
    "Something done once per server"
    do_thing_once()

do_my_thing()

@accelerator.on_process(process_index=0)
def do_my_thing():
    "Something done on process index 0"
    do_thing_on_index_zero()

do_my_thing()

@accelerator.on_local_process(local_process_idx=0)
def do_my_thing():
    "Something done on process index 0 on each server"
    do_thing_on_index_zero_on_each_server()

do_my_thing()

accelerator.wait_for_everyone()
"""


@pytest.mark.may_leave("threads")  # tqdm's monitor, which lives as long as the process
def test_some_statements_run_on_one_process_only(run_ranks):
    first, second = run_ranks(play, START, ONE_PROCESS)
    assert first["done"] == [
        "dynamic",
        "first here",
        "shown",
        "pushed",
        "once per server",
        "once",
        "on zero",
        "on zero of each server",
    ]
    assert second["done"] == ["dynamic", "hidden"]

"""Suites of tests/training, run once more in a process in which `Accelerator` picks simgpu, as it picks CUDA elsewhere.

They are the same tests: those of their module, but the slow ones and those that `LEFT_OUT` or `ELSEWHERE` has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree as ET

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SUITES = Path(__file__).with_name("suites")

MODULES = {
    "quick tour: training": "tours/test_training.py",
    "quick tour: evaluation": "tours/test_evaluation_and_processes.py",
    "quick tour: saving": "tours/test_saving.py",
    "loaders": "data/test_prepared_loaders.py",
    "batches of all kinds": "data/test_kinds_of_batches.py",
    "batches of all kinds, dispatched": "data/test_dispatched_kinds.py",
    "batches that move themselves": "accelerator/test_objects_of_any_kind.py",
    "gather and reduce": "process/test_collectives.py",
    "free functions": "accelerator/test_free_functions.py",
    "numbers of plain PyTorch": "accelerator/test_training_equals_plain_pytorch.py",
    "accumulation, clipping, schedulers": "accelerator/test_training_step.py",
    "fp16": "accelerator/test_loss_scaling.py",
    "preparing, DDP, local SGD": "accelerator/test_preparing.py",
    "DDP, FSDP2, tensor parallel": "strategies/test_strategies_alike.py",
    "tensor parallel": "strategies/test_tensor_parallel.py",
    "wrappers made by users": "strategies/test_wrappers_by_hand.py",
    "checkpoints": "checkpoint/test_checkpoints.py",
    "checkpoints of shards": "checkpoint/test_sharded_checkpoints.py",
    "saves in the background": "checkpoint/test_background_saves.py",
    "saved models": "checkpoint/test_saved_models.py",
    "numbers of resumed runs": "data/test_resumed_numbers.py",
}

LEFT_OUT = {
    "test_objects_are_prepared_and_loaders_get_shorter": "says that the device is the CPU",
    "test_accelerate_loads_what_we_saved_and_we_what_it_saved": "accelerate knows no such device",
    "test_checkpoints_of_fsdp_in_accelerate_are_loaded": "computes with torch on the CPU",
    "test_ranks_know_their_place_in_the_layout": "simccl does not split groups, as NCCL does",
    "test_a_second_signal_ends_a_process_that_had_no_handler": "forks a process that has used the device",
    "test_a_structure_of_small_tensors_travels_in_one_collective": "counts the checks of collectives on CPUs",
    "test_checks_are_chosen_by_the_environment": "as above",
    "test_ranks_that_do_not_agree_are_told_who_and_where_instead_of_waiting": "as above",
    "test_tensors_of_varying_size_are_refused_in_the_last_round_as_in_all_others": "as above",
}
"""Tests, and why they are not about a device."""

ELSEWHERE = {
    "test_rows_stay_together_and_arrive_once": "batches that are ready are dispatched; loaders move all kinds",
    "whatever_batches_look_like[split]": "[plain] moves the same batches",
    "whatever_batches_look_like[stateful]": "as above",
    "whatever_batches_look_like[stream]": "as above",
    "whatever_batches_look_like[own": "as above",
    "whatever_batches_look_like[workers]": "as above, and resumed runs have workers",
    "test_batches_of_varying_size_are_gathered_exactly": "the last batch of awkward sizes is gathered",
    "test_a_dispatched_last_group_is_filled_up_with_the_same_rows": "chooses rows before they go to the device",
    "test_split_between_processes_gives_parts_of_the_type": "cuts what lies on the CPU",
    "test_a_function_that_changes_nothing_changes_nothing": "as above",
    "test_schedules_of_epochs_advance_once_an_epoch": "schedulers compute no tensors; others advance there",
    "same_global_batches[clipping": "accumulation and clipping are tried together",
    "test_split_batches_train_as_one_process": "chooses other rows of the same batches",
    "test_a_plan_may_come_with_the_model": "a model with tensor parallel layers trains and is saved",
    "as_if_it_had_not_been_interrupted[skip": "the state of what lies on a device is that between epochs",
    "as_if_it_had_not_been_interrupted[stateful": "as above",
    "test_a_run_that_was_resumed_is_saved_and_resumed_again": "as above",
    "test_a_checkpoint_takes_the_place_of_one_of_the_other_kind": "is about files; shards are saved and loaded",
    "test_shards_that_were_damaged_are_named": "as above",
    "test_ranks_of_a_save_exchange_objects": "objects are exchanged on the CPU",
}
"""Expensive tests, and what the other ones that run show of a device in their place."""


class Outcome(NamedTuple):
    name: str
    failure: str
    uses: int


@pytest.fixture(scope="module")
def outcomes(
    simgpu_environment: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Outcome]]:
    """What became of each test of each module."""
    folder = tmp_path_factory.mktemp("suites")
    uses, report = folder / "uses", folder / "report.xml"
    uses.touch()
    environment = {**os.environ, **simgpu_environment, "SIMGPU_DEVICES": "4", "SIMGPU_USES": str(uses)}
    environment["PYTHONPATH"] = os.pathsep.join([str(SUITES), simgpu_environment["PYTHONPATH"]])
    environment.pop("TMPDIR", None)  # workers of loaders make sockets there, whose names have at most 107 bytes
    command = [sys.executable, "-m", "pytest", "-q", "-p", "suites_on_device", "-m", "not slow", "--tb=short"]
    command += ["--disable-warnings", f"--junitxml={report}", "-o", "junit_logging=no", "-n", "0"]
    command += ["-k", " and ".join(f"not {name}" for name in (*LEFT_OUT, *ELSEWHERE))]
    command += [str(ROOT / "tests" / "training" / module) for module in MODULES.values()]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert report.exists(), ran.stdout + ran.stderr  # it ended at the limit of a test that could not be interrupted
    found: dict[str, list[Outcome]] = {}
    for case in ET.parse(report).iter("testcase"):
        failures = [element.text or "" for kind in ("failure", "error") for element in case.iter(kind)]
        properties = [element.attrib for element in case.iter("property")]
        uses_of_it = [int(each["value"]) for each in properties if each["name"] == "uses"]
        outcome = Outcome(case.attrib["name"], "\n".join(failures), sum(uses_of_it))
        found.setdefault(case.attrib["classname"], []).append(outcome)
    assert found, ran.stdout + ran.stderr  # such as a module that is not there
    return found


@pytest.mark.limit(600)  # the first of them runs all suites
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_a_suite_passes_on_the_device(outcomes: dict[str, list[Outcome]], module: str) -> None:
    of_module = outcomes["tests.training." + module.removesuffix(".py").replace("/", ".")]
    assert not [f"{name}\n{failure}" for name, failure, _ in of_module if failure]
    assert any(uses for *_, uses in of_module)


@pytest.mark.limit(600)
def test_the_device_was_used_by_most_tests(outcomes: dict[str, list[Outcome]], record_property) -> None:
    used = sum(outcome.uses > 0 for of_module in outcomes.values() for outcome in of_module)
    record_property("tests that used simgpu", used)
    print(f"{used} tests of {sum(map(len, outcomes.values()))} used simgpu")
    assert used >= 185

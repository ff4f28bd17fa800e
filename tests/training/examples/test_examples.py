"""Scripts in the shape of accelerate's examples: the import changed, nothing else, and every number is the same.

Each script here is run as it stands, with accelerate, and with ``accelerate`` replaced by ``nb_accelerate`` in its
import lines. What its ``main`` returns, losses and learning rates of each step and metrics, must be equal.
"""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
SCRIPTS = sorted(
    file.stem for file in HERE.glob("*.py") if not file.stem.startswith(("test_", "data", "transformers_"))
)
# So accelerate's end_training leaves the process group to the launcher, as that of this package does.
KEEPS_THE_GROUP = {"FORK_LAUNCHED": "1"}
IMPORT = re.compile(r"^(from|import) accelerate\b", re.MULTILINE)


def play(names: list[str], package: str, folder: str) -> dict[str, Any]:
    """What the scripts report in this process, by name."""
    found: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of several processes would wait for each other's turn
    gc.freeze()  # scripts collect garbage again and again, and what was imported before them is none
    for name in names:
        file, place = HERE / f"{name}.py", Path(folder) / package / name
        place.mkdir(parents=True, exist_ok=True)
        source = IMPORT.sub(rf"\1 {package}", file.read_text(encoding="utf-8"))
        names_of_script: dict[str, Any] = {"__name__": name}
        try:
            exec(compile(source, str(file), "exec"), names_of_script)
            found[name] = names_of_script["main"](str(place))
        except Exception as error:
            error.add_note(f"in {name}, with {package}")
            raise
        finally:
            _forget_states()
    gc.unfreeze()
    torch.set_num_threads(threads)
    return found


def _forget_states() -> None:
    """Begin the next script as if it were the first. The process group stays, and both packages take it."""
    import accelerate

    import nb_accelerate.training.state

    for package in (accelerate, nb_accelerate):
        package.state.AcceleratorState._reset_state(reset_partial_state=True)
        package.state.GradientState._reset_state()


def _on_rank(names: list[str], folder: str) -> list[dict[str, Any]]:
    from nb_accelerate.training.state import PartialState

    PartialState(cpu=True)  # makes the process group
    return [play(names, package, folder) for package in ("accelerate", "nb_accelerate")]


RESUMED = {"checkpointing": 1, "transformers_classification": 1}
"""Reports of runs that go on. Loaders of these scripts have a generator, whose state accelerate does not save: another
order of rows follows. Here they go on as the run that was not interrupted, which is the first report."""


def _compare(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert list(theirs) == list(ours) != []
    for name, report in theirs.items():
        if name not in RESUMED:
            assert ours[name] == report, name
            continue
        for number, (expected, found) in enumerate(zip(report, ours[name], strict=True)):
            if number != RESUMED[name]:
                assert found == expected, name
            elif name == "checkpointing":
                assert found == ours[name][0][-len(found) :]
            else:  # the weights in the end
                assert found[-1] == ours[name][0][-1]


@pytest.mark.slow
def test_examples_report_on_one_process_what_they_report_with_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    _compare(*(play(SCRIPTS, package, str(tmp_path)) for package in ("accelerate", "nb_accelerate")))


@pytest.mark.slow
@pytest.mark.limit(120)
def test_examples_report_on_two_processes_what_they_report_with_accelerate(run_ranks, tmp_path):
    pytest.importorskip("accelerate")
    for theirs, ours in run_ranks(_on_rank, SCRIPTS, str(tmp_path), deadline=100.0, env=KEEPS_THE_GROUP):
        _compare(theirs, ours)


@pytest.mark.slow
@pytest.mark.limit(180)
@pytest.mark.may_leave("threads")  # of tqdm
@pytest.mark.parametrize("ranks", [1, 2])
def test_scripts_with_models_of_transformers_report_what_they_report_with_accelerate(ranks, run_ranks, tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    scripts = ["transformers_classification", "transformers_language_modelling", "transformers_vision"]
    if ranks == 1:
        found = [[play(scripts, package, str(tmp_path)) for package in ("accelerate", "nb_accelerate")]]
    else:
        found = run_ranks(_on_rank, scripts, str(tmp_path), deadline=150.0, env=KEEPS_THE_GROUP)
    for theirs, ours in found:
        _compare(theirs, ours)

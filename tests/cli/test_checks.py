"""`nb-accelerate test`."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.ranks import RunRanks

from nb_accelerate.cli import main


@pytest.mark.contract("commands: test")
def test_every_check_passes_on_two_ranks(capsys: pytest.CaptureFixture[str]):
    assert main(["test"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 ranks on CPU")
    assert [line.split()[1] for line in lines[1:-1]] == ["ranks", "collectives", "loaders", "training", "checkpoint"]
    assert lines[-1].startswith("all 5 checks passed")


def test_the_configured_setup_is_the_one_that_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 1\nmixed_precision: bf16\n")
    assert main(["test", "--config_file", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("1 rank on CPU")
    assert f"(from {file})" in shown


def test_a_check_that_fails_is_named_and_ends_the_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: MULTI_CPU\nmixed_precision: fp8\n")
    assert main(["test", "--config_file", str(file), "--num_processes", "1"]) == 1
    shown = capsys.readouterr()
    assert "fp8" in shown.err
    assert shown.err.rstrip().splitlines()[-1].startswith("the test failed: ")
    assert "passed" not in shown.out


BROKEN = {
    "collectives": "gather",
    "loaders": "gather_for_metrics",
    "training": "backward",
    "checkpoint": "load_state",
}


def test_each_check_notices_what_it_is_about(run_ranks: RunRanks):
    def check_with_broken_parts() -> dict[str, str]:
        from nb_accelerate import Accelerator
        from nb_accelerate.cli import checks

        said = {}
        accelerator = Accelerator()
        for name, method in BROKEN.items():
            original = getattr(accelerator, method)
            broken = {
                "gather": lambda tensor: tensor,
                "gather_for_metrics": lambda tensor: tensor,
                "backward": lambda loss: None,
                "load_state": lambda folder: None,
            }[method]
            setattr(accelerator, method, broken)
            try:
                checks.CHECKS[name](accelerator)
            except checks.CheckFailed as error:
                said[name] = str(error)
            setattr(accelerator, method, original)
        return said

    for said in run_ranks(check_with_broken_parts):
        assert list(said) == list(BROKEN)
        assert "gather" in said["collectives"]
        assert "weights differ" in said["training"]

"""Random numbers of the device that a rank uses, whatever other devices its process sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from fixtures.ranks import RunRanks

pytestmark = pytest.mark.usefixtures("simgpu")


def _save(folder: str, as_accelerate: bool = False) -> list[float]:
    """Save with random numbers that differ between ranks; return those that come next."""
    from pathlib import Path

    import torch

    from nb_accelerate import Accelerator

    accelerator = Accelerator()
    torch.simgpu.manual_seed(100 + accelerator.process_index)  # type: ignore[attr-defined]
    accelerator.save_state(folder)
    file = Path(folder, f"random_states_{accelerator.process_index}.pkl")
    states = torch.load(file, weights_only=False)
    assert len(states["torch_simgpu_manual_seed"]) == torch.simgpu.device_count()  # type: ignore[attr-defined]
    if as_accelerate:
        torch.save({name: states[name] for name in states if name not in {"torch_simgpu_used", "saved_by"}}, file)
        Path(folder, "checkpoint.json").unlink(missing_ok=True)
    return list(torch.rand(3, device=accelerator.device).tolist())


def _load(folder: str, sees_one: bool) -> tuple[str, list[float]]:
    import os

    import torch

    if sees_one:  # as srun --gpus-per-task=1 has it
        os.environ["SIMGPU_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    from nb_accelerate import Accelerator

    accelerator = Accelerator()
    accelerator.load_state(folder)
    return str(accelerator.device), torch.rand(3, device=accelerator.device).tolist()


def _save_seeing_one(folder: str) -> list[float]:
    import os

    os.environ["SIMGPU_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
    return _save(folder)


@pytest.mark.parametrize("sees_one", [False, True])
@pytest.mark.parametrize("as_accelerate", [False, True])
def test_a_rank_goes_on_with_the_numbers_of_the_device_that_it_used(
    run_ranks: RunRanks, tmp_path: Path, sees_one: bool, as_accelerate: bool
) -> None:
    folder = str(tmp_path / "saved")
    would_come = run_ranks(_save, folder, as_accelerate)
    loaded = run_ranks(_load, folder, sees_one)
    assert [device for device, _ in loaded] == (["simgpu:0"] * 2 if sees_one else ["simgpu:0", "simgpu:1"])
    assert [numbers for _, numbers in loaded] == would_come
    assert would_come[0] != would_come[1]


def test_a_rank_that_saw_its_own_device_only_goes_on_where_it_sees_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    would_come = run_ranks(_save_seeing_one, folder)
    assert [numbers for _, numbers in run_ranks(_load, folder, False)] == would_come


def test_the_seed_of_the_notebook_is_that_of_the_device_of_each_rank(run_ranks: RunRanks) -> None:
    import torch

    def draw() -> tuple[list[float], list[float]]:
        drawn = torch.rand(3, device="simgpu").tolist()
        torch.simgpu.manual_seed(1234)  # type: ignore[attr-defined]
        return drawn, torch.rand(3, device="simgpu").tolist()

    torch.manual_seed(1234)
    for drawn, expected in run_ranks(draw):
        assert drawn == expected


def test_random_numbers_of_any_type_of_device_are_kept_in_step(run_ranks: RunRanks) -> None:
    def draw() -> list[float]:
        import torch

        from nb_accelerate import Accelerator
        from nb_accelerate.utils import synchronize_rng_states

        accelerator = Accelerator(rng_types=["simgpu"])
        torch.simgpu.manual_seed(accelerator.process_index)  # type: ignore[attr-defined]
        synchronize_rng_states(["simgpu"])
        return list(torch.rand(3, device=accelerator.device).tolist())

    first, second = run_ranks(draw)
    assert first == second

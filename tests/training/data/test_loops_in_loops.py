"""Loops over loaders inside of one another, and beside one another: what is known of a pass belongs to that pass."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from nb_accelerate import Accelerator
from nb_accelerate.utils import DataLoaderConfiguration, set_seed

ROWS = 22


class Stream(IterableDataset):
    """Yields the numbers of rows, in order."""

    def __iter__(self):
        yield from range(ROWS)


def rows_of(kind: str) -> DataLoader:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=2)
    workers = {"num_workers": 1, "persistent_workers": True} if kind == "persistent workers" else {}
    return DataLoader(range(ROWS), batch_size=2, shuffle=kind == "shuffled", **workers)


KINDS = ["plain", "shuffled", "persistent workers", "stream", "stateful"]


def nested(kind: str) -> dict:
    """Iterate a loader inside its own loop, twice; return what the outer loop saw."""
    config = DataLoaderConfiguration(use_stateful_dataloader=kind == "stateful")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, dataloader_config=config)
    loader = accelerator.prepare(rows_of(kind))
    steps, gathered, inner, positions = [], [], [], []
    for number, batch in enumerate(loader):
        if number in (1, 3):
            inner.append([row for other in loader for row in accelerator.gather_for_metrics(other).tolist()])
        if number == 2:
            for _ in loader:
                break
        with accelerator.accumulate():
            steps.append(accelerator.sync_gradients)
        gathered += accelerator.gather_for_metrics(batch).tolist()
        state = loader.state_dict()
        positions.append(state.get("position", state.get("_num_yielded")))
    return {"steps": steps, "rows": sorted(gathered), "inner": [sorted(rows) for rows in inner], "at": positions}


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_inside_its_own_loop_changes_nothing_for_the_outer_one(run_ranks, kind):
    for seen, batches in [(nested(kind), 11), *((of_rank, 6) for of_rank in run_ranks(nested, kind))]:
        assert seen["steps"] == [number % 3 == 0 or number == batches for number in range(1, batches + 1)]
        assert seen["rows"] == list(range(ROWS))
        assert seen["inner"] == [list(range(ROWS))] * 2
        if seen["at"][0] is not None:  # torchdata's own state of loaders with workers has other names
            assert seen["at"][:-1] == list(range(1, batches))


def weights(accelerator: Accelerator, *, looks: bool) -> list[float]:
    """Train, looking at the whole of the training data every other batch or not; return the weights."""
    set_seed(3)
    data = [(torch.randn(3), torch.randn(1)) for _ in range(ROWS)]
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            if looks and number % 2:
                with torch.no_grad():
                    [model(other) for other, _ in loader]
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return [value.tolist() for value in model.parameters()]


def test_looking_at_the_training_data_in_the_middle_changes_no_weight():
    trained = [weights(Accelerator(cpu=True, gradient_accumulation_steps=3), looks=looks) for looks in (False, True)]
    assert trained[0] == trained[1]


def test_a_position_saved_after_an_inner_loop_is_that_of_the_outer_one():
    saved: dict = {}

    def run(*, stop: int | None) -> list[list[int]]:
        loader = Accelerator(cpu=True).prepare(DataLoader(range(ROWS), batch_size=4))
        if saved:
            loader.load_state_dict(saved)
        seen = []
        for number, batch in enumerate(loader):
            seen.append(batch.tolist())
            list(loader)
            if number == stop:
                saved.update(loader.state_dict())
                break
        return seen

    whole = run(stop=None)
    assert run(stop=2) + run(stop=None) == whole


def zipped(first_rows: int, second_rows: int, first_size: int, second_size: int) -> tuple:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    first, second = accelerator.prepare(
        DataLoader(range(first_rows), batch_size=first_size),
        DataLoader(range(100, 100 + second_rows), batch_size=second_size),
    )
    found: tuple[list[int], list[int], list[bool]] = [], [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one, other in zip(first, second, strict=False):
            with accelerator.accumulate():
                found[2].append(accelerator.sync_gradients)
            found[0].extend(accelerator.gather_for_metrics(one).tolist())
            found[1].extend(accelerator.gather_for_metrics(other).tolist())
    assert accelerator.core.loops.active is None
    return *found, [str(one.message)[:60] for one in caught]


def test_each_of_two_zipped_loaders_has_its_own_end(run_ranks):
    # 13 rows by 2 on each of two ranks: 4 steps. The second would have 6 steps, or ends at the same time.
    for first, second, steps, said in run_ranks(zipped, 13, 34, 2, 3):
        assert first == list(range(13))
        assert second == list(range(100, 124))
        assert steps == [False, False, False, True]
        assert said == []
    for first, second, steps, said in run_ranks(zipped, 13, 13, 2, 2):
        assert first == list(range(13))
        assert second == list(range(100, 113))
        assert steps == [False, False, False, True]
        assert said == []
    for first, second, *_ in run_ranks(zipped, 30, 17, 2, 3):
        assert first == list(range(12))  # zip has taken one batch more of it
        assert second == list(range(100, 117))


def test_zipped_loaders_with_equal_batches_and_different_ends_are_warned_of(run_ranks):
    for rank, (first, _, _, said) in enumerate(run_ranks(zipped, 13, 34, 2, 2)):
        assert first == list(range(13))
        assert len(said) >= 1 or rank
        assert all("a loop over several" in one for one in said)


def test_an_iterator_that_was_left_open_is_not_the_loop(run_ranks):
    def evaluate():
        accelerator = Accelerator(cpu=True)
        first, second = accelerator.prepare(DataLoader(range(13), batch_size=2), DataLoader(range(40), batch_size=2))
        rows, kept = [], []
        for number, batch in enumerate(first):
            if number == 1:
                kept.append(iter(second))
                next(kept[0])
            rows += accelerator.gather_for_metrics(batch).tolist()
        return rows

    assert run_ranks(evaluate) == [list(range(13))] * 2

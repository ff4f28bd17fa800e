"""What cannot be is said at once: what was given, why it cannot be, and what to write instead.

Rows of that list that belong to one part are tested with it: options, preparing, collectives, metrics.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nb_accelerate import Accelerator, CollectiveMismatchError, DataLoaderConfiguration, NotPreparedError
from nb_accelerate.errors import ShippingError


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_loaders_of_different_lengths_are_noticed_before_ranks_wait_for_each_other(run_ranks):
    def train():
        accelerator = Accelerator(cpu=True)
        rows = torch.ones(8 + 4 * accelerator.process_index, 1)
        same = DataLoader(torch.ones(6, 1), batch_size=2)
        accelerator.prepare(*parts(), same, DataLoader(rows, batch_size=2))

    with pytest.raises(CollectiveMismatchError, match=r"number 2 .*join_uneven"):
        run_ranks(train)


def test_loaders_may_differ_where_ranks_do_not_wait_for_each_other(run_ranks):
    def train():
        rows = []
        for options in ({"even_batches": False}, {"dispatch_batches": True}):
            accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
            data = torch.ones(8 + 4 * accelerator.process_index, 1)
            model, optimizer, loader = accelerator.prepare(*parts(), DataLoader(data, batch_size=2))
            rows.append(0)
            with accelerator.join_uneven_inputs([model]):
                for batch in loader:
                    optimizer.zero_grad()
                    accelerator.backward(model(batch).sum())
                    optimizer.step()
                    rows[-1] += len(batch)
        accelerator = Accelerator(cpu=True)
        if accelerator.is_main_process:  # one rank may prepare a loader for itself
            rows.append(len(accelerator.prepare(DataLoader(torch.ones(4), batch_size=1))))
        return rows

    assert run_ranks(train) == [[4, 4, 2], [6, 4]]


def test_an_accelerator_made_outside_of_the_launched_function_is_not_sent(run_ranks):
    accelerator = Accelerator(cpu=True)

    def train():
        accelerator.backward(torch.ones(1, requires_grad=True).sum())

    with pytest.raises(ShippingError, match=r"the enclosing.*prepares, inside"):
        run_ranks(train)
    with pytest.raises(TypeError, match=r"copied\. It knows only"):
        copy.deepcopy(accelerator)


@pytest.mark.slow
def test_an_accelerator_that_a_fork_brought_along_does_not_train_alone(run_ranks):
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*parts())

    def train():
        loss = model(torch.ones(1)).sum()
        accelerator.backward(loss)
        optimizer.step()

    with pytest.raises(NotPreparedError, match=r"was started.*inside of"):
        run_ranks(train, start_method="fork")

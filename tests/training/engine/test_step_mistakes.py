"""Steps that a script takes with other gradients than it thinks are refused, or noted, for the right reason
(training/engine/program.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwise as mw
from meshwise.training.engine.weighing import as_weight
from meshwise.training.process.session import default_engine, end_sessions
from tests.pool import CaseFailed


def train(*mistakes: str) -> list[str]:
    """Two steps of a script; returns what was noted."""
    end_sessions()
    torch.manual_seed(0)
    model: Any = nn.Linear(2, 1)
    model = nn.parallel.DistributedDataParallel(model) if "DDP" in mistakes else model
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, data = mw.distribute(model, optimizer, data, view="rank")
    optimizer.step()  # before the loop: some programs prepare state so
    for (x,) in data:
        mw.backward(model(x).mean(), -1 if "weight" in mistakes else None)
        if "closure" in mistakes:
            optimizer.step(lambda x=x: mw.backward(model(x).mean()))
        else:
            optimizer.step()
        if "twice" in mistakes:
            optimizer.step()
        optimizer.zero_grad()
    found = default_engine().notes
    end_sessions()
    return found


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("twice", "mw.backward did not make since the last step: they were used already"),
        ("weight", "weight must be the number of items that the loss is a mean over, 0 or more, but it is -1"),
        ("DDP", "mw.distribute was given a DistributedDataParallel. Remove that wrapper"),
    ],
)
def test_a_mistake_is_refused_for_the_right_reason(mistake: str, says: str, pool: Any) -> None:
    with pytest.raises(CaseFailed, match=says):
        pool(2).run(train, mistake)


@pytest.mark.parametrize(
    ("weight", "said"),
    [("all", "it is 'all'"), (torch.ones(2), r"it is a tensor of shape \(2,\)"), ([8], r"it is \[8\]")],
)
def test_a_weight_that_is_no_number_is_refused_with_what_it_is(weight: Any, said: str) -> None:
    with pytest.raises(mw.UsageError, match=said):
        as_weight(weight, torch.ones(()))

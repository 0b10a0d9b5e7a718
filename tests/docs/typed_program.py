"""What an editor knows of a program that uses meshwise: mypy reads this file (`make types`); nothing runs it."""

from typing import assert_type

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw


def program() -> None:
    """Each thing keeps its type."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    assert_type(mw.distribute(model, view="rank"), nn.Linear)
    assert_type(
        mw.distribute(model, optimizer, loader, view="rank"),
        tuple[nn.Linear, torch.optim.SGD, DataLoader[tuple[torch.Tensor, ...]]],
    )
    assert_type(mw.backward(model(torch.zeros(1, 2)).sum()), torch.Tensor)

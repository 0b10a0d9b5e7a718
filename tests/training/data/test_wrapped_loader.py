"""A loader around a DataLoader that reads ahead, as timm's PrefetchLoader does: each batch has its own share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.errors import UsageError
from meshwise.training.data.wrapped_loader import loader_inside
from meshwise.training.process.session import end_sessions


class ReadsAhead:
    """Written after timm.data.PrefetchLoader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        first, given = True, None
        for x, y in self.loader:
            if not first:
                yield given
            first, given = False, (x - 1, y)
        if not first:
            yield given

    def __len__(self) -> int:
        return len(self.loader)


class DropsOne(ReadsAhead):
    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            if number != 1:
                yield batch


def wrapped(kind: type[ReadsAhead], samples: int, **options: Any) -> Any:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(samples), dtype=torch.float64)
    return kind(DataLoader(TensorDataset(x, x.sum(1)), batch_size=8, **options))


def train() -> list[float]:
    """Losses, evaluations and parameters; the last batches are shorter."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(3, 1).double()
    loader, val = wrapped(ReadsAhead, 21, shuffle=True), wrapped(ReadsAhead, 11)
    model, optimizer, same, val = mw.distribute(
        model, torch.optim.SGD(model.parameters(), 0.1), loader, val, view="rank"
    )
    assert same is loader and type(same).__name__ == "ReadsAhead" and isinstance(same, ReadsAhead)
    told = []
    for _ in range(2):
        for x, y in loader:
            told.append(mw.backward((model(x)[:, 0] - y).square().mean()).item())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            told += [float(mw.mean((model(x)[:, 0] - y).square().mean()) * mw.sum(len(y))) for x, y in val]
    return told + torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_batches_that_are_read_ahead_are_one_device(pool: Any) -> None:
    want = train()
    for got in pool(2).run(train):
        assert got == pytest.approx(want, rel=1e-12)


def test_on_one_device_a_wrapped_loader_gives_what_it_gave() -> None:
    torch.manual_seed(1)
    want = [x.tolist() for x, _ in wrapped(ReadsAhead, 21, shuffle=True)]
    torch.manual_seed(1)
    end_sessions()
    loader = mw.distribute(wrapped(ReadsAhead, 21, shuffle=True), view="rank")
    assert [x.tolist() for x, _ in loader] == want
    assert len(loader) == 3 and loader.loader.batch_size == 8


def test_a_loader_that_drops_batches_is_refused() -> None:
    with pytest.raises(UsageError, match="DropsOne yields more or fewer batches than it reads"):
        list(mw.distribute(wrapped(DropsOne, 21), view="rank"))


def test_only_what_holds_one_data_loader_is_a_loader() -> None:
    assert loader_inside(wrapped(ReadsAhead, 21)) == "loader"
    assert loader_inside(object()) is None
    end_sessions()
    with pytest.raises(UsageError, match="loaders that wrap one DataLoader, but was passed a list"):
        mw.distribute([1], view="rank")


def test_a_scheduler_that_is_not_torchs_passes_through() -> None:
    class Own:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, epoch: int) -> None: ...

    end_sessions()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = Own(optimizer)
    assert mw.distribute(model, optimizer, scheduler, view="rank")[2] is scheduler

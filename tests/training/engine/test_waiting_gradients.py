"""Gradients that wait in `mw.accumulate()` are those of one device for whoever reads or sets them.

Of torch_compat/program_calls.py too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.plan import Plan
from meshwise.torch_compat import program_calls
from meshwise.training.process.session import end_sessions
from meshwise.transfer import collectives
from tests.pool import CaseFailed, Pool

LOUD = 0.05  # a norm that every gradient here is above


@pytest.fixture(autouse=True)
def own_session() -> Iterator[None]:
    end_sessions()
    yield
    torch.set_default_dtype(torch.float32)
    end_sessions()


class Window:
    """What a program does where a window of accumulated batches ends."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.parameters = list(model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def clips_the_norm(self) -> float:
        return float(nn.utils.clip_grad_norm_(self.parameters, LOUD))

    def clips_values(self) -> float:
        nn.utils.clip_grad_value_(self.parameters, LOUD / 4)
        return 0.0

    def clips_by_hand(self) -> float:
        norm = float(sum((p.grad**2).sum() for p in self.parameters if p.grad is not None)) ** 0.5
        for p in self.parameters:
            p.grad = p.grad * (LOUD / max(norm, LOUD))
        return norm

    def unscales_and_clips(self) -> float:
        self.scaler.unscale_(self.optimizer)
        return self.clips_the_norm()

    def updates_by_hand(self) -> float:
        with torch.no_grad():
            for p in self.parameters:
                p -= 0.1 * p.grad.sign()
        return 0.0

    def forgets_the_window(self) -> float:
        self.optimizer.zero_grad()
        return 0.0


HOW = [name for name in vars(Window) if not name.startswith("_")]


def trained(how: str, plan: Plan, inside: bool = False) -> tuple[list[float], list[Tensor]]:
    """A window is two batches, all of them in `mw.accumulate()`; of unequal weights, and the last one alone."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    data = TensorDataset(torch.randn(26, 3), torch.randn(26, 2))
    model, optimizer, loader = mw.distribute(model, optimizer, DataLoader(data, batch_size=6), plan=plan, view="rank")
    window, read = Window(model, optimizer), []
    for number, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y) / 2
        loss = window.scaler.scale(loss) if "unscales" in how else loss
        with mw.accumulate():
            mw.backward(loss, weight=float(len(x)) if number % 3 else None)
            if inside and number % 2:
                read.append(getattr(window, how)())
        if number % 2:
            if not inside:
                read.append(getattr(window, how)())
            if "unscales" in how:
                window.scaler.step(optimizer)
                window.scaler.update()
            elif "by_hand" not in how or "clips" in how:
                optimizer.step()
            optimizer.zero_grad()
    optimizer.zero_grad()
    return read, [torch.as_tensor(p.detach().tolist()) for p in model.parameters()]


PLANS = [Plan(data=2), Plan(shard=2), Plan(data=2, zero1=True)]
QUICK = [("clips_the_norm", PLANS[0]), ("forgets_the_window", PLANS[1])]
SLOW = [pytest.param(how, plan, marks=pytest.mark.slow) for how in HOW for plan in PLANS if (how, plan) not in QUICK]


@pytest.mark.parametrize(("how", "plan"), [*QUICK, *SLOW], ids=str)
def test_who_reads_finds_what_one_device_has(how: str, plan: Plan, pool: Any) -> None:
    want = trained(how, Plan())
    end_sessions()
    for inside in (False, True):
        for read, weights in pool(2).run(trained, how, plan, inside):
            assert read == pytest.approx(want[0], rel=1e-9)
            torch.testing.assert_close(weights, want[1], rtol=1e-9, atol=1e-11)


def one_alone(plan: Plan) -> None:
    model = nn.Linear(2, 1)
    model, loader = mw.distribute(
        model, DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4), plan=plan, view="rank"
    )
    for (x,) in loader:
        with mw.accumulate():
            mw.backward(model(x).mean())
        if mw.is_main():
            print(model.weight.grad)


def test_a_rank_that_reads_alone_is_told_so(processes: None) -> None:
    """In a pool of its own: the proof counts the collectives of a process, of which an earlier case may have left more
    on one rank."""
    own = Pool(2)
    try:
        with pytest.raises(CaseFailed, match=r"rank 0 reads a gradient that mw.accumulate\(\) has not") as raised:
            own.run(one_alone, Plan(data=2))
    finally:
        own.close()
    assert "test_waiting_gradients.py:" in raised.value.text


def collectives_of(read: Callable[[nn.Module], object], last: bool) -> int:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    model, loader = mw.distribute(model, DataLoader(TensorDataset(torch.ones(40, 2)), batch_size=4), view="rank")
    other(torch.ones(2)).sum().backward()
    before = 0
    for number, (x,) in enumerate(loader):
        if number == 6:
            before = sum(collectives.entered.values())
        if number % 3 == 2 and last:
            mw.backward(model(x).mean())
        else:
            with mw.accumulate():
                mw.backward(model(x).mean())
            read(other)
    return sum(collectives.entered.values()) - before


def test_a_window_whose_last_batch_reduces_pays_nothing(pool: Any) -> None:
    """Nor who reads the gradient of another model; after the last backward nothing stands before torch's `grad`."""

    def case() -> tuple[int, int, bool]:
        read = collectives_of(lambda other: other.weight.grad, last=True)
        end_sessions()
        return read, collectives_of(lambda other: None, last=True), bool(program_calls.WATCHING)

    for with_a_reader, without, watching in pool(2).run(case):
        assert with_a_reader == without
        assert watching is True  # the loop ends in a window
    end_sessions()
    assert "grad" not in vars(nn.Parameter)

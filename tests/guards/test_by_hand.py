"""An update by hand, without an optimizer: right after mw.backward, noticed where each rank uses its own gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import meshwise as mw
from meshwise.spec.errors import UsageError

F = nn.functional
FORMS = ["p.data -= lr * p.grad", "p -= lr * p.grad", "p -= lr * torch.autograd.grad", "mw.backward", "inputs alone"]


def train(form: str, batches: int = 3, epochs: int = 1) -> Any:
    torch.manual_seed(0)
    x = torch.randn(4 * batches, 3, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.argmax(1)), batch_size=4)
    model: nn.Module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model, loader = mw.distribute(model, loader, view="rank")
    done = 0
    try:
        for x, y in (batch for _ in range(epochs) for batch in loader):
            x.requires_grad_(form == "inputs alone")
            loss = F.cross_entropy(model(x), y)
            gradients: Any = None
            if form == "mw.backward":
                mw.backward(loss)
            elif "autograd" in form:
                gradients = torch.autograd.grad(loss, list(model.parameters()))
            else:
                loss.backward()
            with torch.no_grad():
                for number, p in enumerate(model.parameters()):
                    if form != "inputs alone":
                        change = 0.1 * (gradients[number] if gradients is not None else p.grad)
                        (p.data if "data" in form else p).sub_(change)
                    p.grad = None if form != "inputs alone" else p.grad
            done += 1
    except UsageError as error:
        return done, str(error)
    return done, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("form", FORMS[:3])
def test_an_update_by_hand_of_a_ranks_own_gradients_is_refused_at_the_next_batch_with_its_line(
    form: str, pool: Any
) -> None:
    for done, said in pool(2).run(train, form):
        assert done == 1 and "test_by_hand.py:" in said and "Write mw.backward(loss) instead of loss.backward()" in said
    for done, said in pool(2).run(train, form, 1, 3):  # full batches: an epoch each
        assert done == 1 and "have diverged" in said


def test_an_update_by_hand_after_mw_backward_is_that_of_one_device(pool: Any) -> None:
    want = train("mw.backward")[1]
    for done, got in pool(2).run(train, "mw.backward"):
        assert done == 3
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_gradients_that_change_no_parameter_are_no_matter(pool: Any) -> None:
    for done, _ in pool(2).run(train, "inputs alone", 8):
        assert done == 8

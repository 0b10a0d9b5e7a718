"""A check cuts the loops of a script short, and never inside a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import meshwise as mw
from meshwise.checker.proof import Proof
from meshwise.checker.short_loops import ShortLoops
from meshwise.spec.errors import WorkerFailed
from tests.checker.kinds import short
from tests.checker.script_sides import as_it_was, proof  # noqa: F401

WINDOW = 4
ACCUMULATES = f"""
import torch
from torch import nn
import meshwise as mw

torch.manual_seed(0)
x = torch.randn(96, 4)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(3):
    for number, (x, y) in enumerate(loader, 1):
        loss = nn.functional.mse_loss(model(x), y) / {WINDOW}
        if number % {WINDOW}:
            with mw.accumulate():
                mw.backward(loss)
            continue
        loss = mw.backward(loss)  # the last one of a step, and of an epoch
        optimizer.step()
        optimizer.zero_grad()
    mw.print(f"epoch {{epoch}} loss {{loss.item():.6f}}")
"""


def batches_of_a_loop(loops: ShortLoops, window: int, most: int = 20) -> int:
    """Trains on each batch that a loop gives, and steps after each `window`."""
    loops.loop_begins()
    for number in range(1, most + 1):
        if loops.limit(8) == 0:
            return number - 1
        loops.batch_given()
        loops.backward()
        if number % window == 0:
            loops.step_made()
    return most


def test_two_steps_of_the_second_epoch_are_compared_and_one_of_a_later_one_is_made() -> None:
    for window in (1, 2, 4):
        loops, compared = ShortLoops(3, 5), []
        for _ in range(3):
            batches_of_a_loop(loops, window)
            compared.append((loops.made, loops.compares))
        assert compared == [(3, True), (5, True), (6, False)]


def test_a_loop_that_makes_no_step_any_more_ends_all_the_same() -> None:
    loops = ShortLoops(1, 5)
    batches_of_a_loop(loops, 2)
    assert batches_of_a_loop(loops, 100) == 4


def test_a_loss_that_is_global_where_a_step_ends_is_judged(pool: Any) -> None:
    found = proof(ACCUMULATES, pool)
    assert found.equal and found.batches == (32, 32, 29, 32, 32)
    assert found.not_judged == ()


def test_a_program_that_fails_on_a_cut_batch_is_judged_without_it(processes: None) -> None:
    def checked(*changes: tuple[str, str]) -> Any:
        Path("train.py").write_text(short(*changes))
        return mw.check("train.py", rounding=False)

    pairs = "yb)\n", "yb) + (xb[0::2] - xb[1::2]).mean() * model[0].bias.sum()\n"
    right, wrong = checked(pairs), checked(pairs, ("lr=0.01", "lr=0.01 + 0.01 * mw.rank()"))
    assert isinstance(right, Proof) and right.equal and right.batches[:3] == (8, 8, 8) and not wrong.equal
    assert "a batch of 5 samples" in " ".join(right.notes) and "size of tensor a (3)" in " ".join(right.notes)
    with pytest.raises(WorkerFailed, match="modulo by zero"):
        checked(("yb)\n", "yb) / 0 if number else 1 // 0\n"))

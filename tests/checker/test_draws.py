"""Numbers that all ranks of a run draw alike for other samples, which a check's own draws would hide."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker.script_sides import as_it_was, proof  # noqa: F401
from tests.pool import CaseFailed

RANK = """
import torch, meshwise as mw
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3)
    def forward(self, x):
        # forward
        return self.b(self.drop(self.a(x).relu()))
model = Net()
optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, 8)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for epoch in range(2):
    # epoch
    for number, (x, y) in enumerate(loader):
        # loop
        loss = nn.functional.cross_entropy(model(x), y)
        mw.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
WHOLE = RANK.replace("rank", "whole")
GIVEN = "model, optimizer, loader = mw.distribute(model, optimizer, loader,"
SPLIT = RANK.replace(GIVEN, "mw.distribute(model, optimizer,")
SPLIT = SPLIT.replace("# loop", "# batch\n        x, y = mw.split(x, y)\n        # loop")
STATE = RANK.replace("# epoch", "now = torch.get_rng_state()")
SEED, NOISE = "torch.manual_seed(number); ", "x = x + 0.1 * torch.randn_like(x)"
CASES = {
    "seeded in the loop": (RANK, "# loop", SEED + NOISE),
    "dropout of an earlier state": (STATE, "# loop", "torch.set_rng_state(now)"),
    "seeded in a module": (WHOLE, "# forward", "torch.manual_seed(3)"),
    "drawn after a split": (SPLIT, "# loop", NOISE),
    "right: seeded before an epoch": (RANK.replace("# epoch", "torch.manual_seed(epoch)"), "# loop", NOISE),
    "right: one number of all samples": (RANK.replace("0.5", "0"), "# loop", SEED + "x = x * torch.rand(())"),
    "right: the whole batch": (WHOLE, "# loop", SEED + NOISE),
    "right: drawn before a split": (SPLIT, "# batch", SEED + NOISE),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_numbers_that_all_ranks_draw_for_other_samples_are_told(name: str, pool: Any) -> None:
    text, mark, line = CASES[name]
    found = proof(text.replace(mark, line), pool)
    first = found.comparison.first
    assert found.equal if "right" in name else first is not None and first.kind == "random draws", first


def test_generators_that_are_seeded_by_the_rank_are_refused_where_a_run_refuses_them(pool: Any) -> None:
    with pytest.raises(CaseFailed, match="the generators of torch stand elsewhere on rank 1"):
        proof(WHOLE.replace("# loop", "torch.manual_seed(mw.rank()); x = x * torch.rand(())"), pool)


def test_what_is_wrong_in_the_second_epoch_alone_is_found(pool: Any) -> None:
    found = proof(RANK.replace("mw.backward(loss", "mw.backward(loss * (1 + mw.rank() * epoch * number)"), pool)
    assert found.comparison.first is not None and found.comparison.first.step == 5

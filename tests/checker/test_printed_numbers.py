"""Numbers that a script makes itself of this rank's counts: a check says which of its lines show them."""

from __future__ import annotations

from typing import Any

from meshwise.checker.printed_numbers import printed_otherwise
from tests.checker.script_sides import as_it_was, proof  # noqa: F401  # the fixture

SCRIPT = """
import torch, meshwise as mw
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(12, 3)
model = torch.nn.Linear(3, 2)
model, optimizer, loader = mw.distribute(
    model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(x, x[:, :2]), batch_size=4), view="rank"
)
for epoch in range(2):
    right = count = 0
    for a, b in loader:
        loss = mw.backward((model(a) - b).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        right += mw.sum(len(a))
        count += COUNT
    mw.print(f"epoch {epoch} loss {loss:.6f} {right / count:.2%}")
    mw.log(part=right / count)
"""


def test_a_number_that_counts_this_ranks_samples_is_said_with_its_line(pool: Any) -> None:
    found = proof(SCRIPT.replace("COUNT", "len(a)"), pool)
    assert found.equal, "what meshwise adds up is right"
    printed, logged = found.not_judged
    assert "train.py:18 shows 'epoch 0" in printed and " 183.33%'" in printed and " 100.00%'" in printed
    assert "train.py:19 shows 'part 1.8333" in logged and "mw.sum(total) / mw.sum(count)" in logged


def test_right_numbers_are_not_mentioned(pool: Any) -> None:
    found = proof(SCRIPT.replace("COUNT", "mw.sum(len(a))"), pool)
    assert found.equal and not found.not_judged and not [note for note in found.notes if "one device" in note]


def test_the_last_digit_that_is_shown_may_differ_and_words_too() -> None:
    same = [("a.py:1", "loss 0.1234, 1e-3, -2"), ("a.py:2", "model v2: ok"), ("a.py:3", "3 of 4")]
    other = [("a.py:1", "loss 0.1235, 0.001, -2.000001"), ("a.py:2", "model v2: good"), ("a.py:3", "3")]
    assert printed_otherwise(same, other, "2xcpu") == ([], [])
    assert (
        len(printed_otherwise([("a.py:1", "loss 0.12"), ("a.py:1", "7")], [("a.py:1", "loss 0.14")], "2xcpu")[0]) == 1
    )

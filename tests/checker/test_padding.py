"""A model that reads padding, where ranks pad to other lengths than one device: said beside what else it may be.

Of checker/evidence.py.
"""

from __future__ import annotations

from typing import Any

from tests.checker.script_sides import as_it_was, proof  # noqa: F401
from tests.checker.strangers import changed

READS = """import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import meshwise as mw

torch.manual_seed(0)
lengths = torch.randint(2, 8, (48,)).tolist()
rows = [(torch.randint(1, 20, (n,)), torch.randn(3, 8), torch.randint(3, ())) for n in lengths]


def padded(batch):
    ids = nn.utils.rnn.pad_sequence([ids for ids, _, _ in batch], batch_first=True)
    return ids, torch.stack([q for _, q, _ in batch]), torch.stack([y for _, _, y in batch])


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids, queries):
        memory = self.words(ids)
        read, _ = self.cross(queries, memory, memory, key_padding_mask=ids == 0)
        return self.head(read.mean(1))


model = Reader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=padded)
model, optimizer, loader = mw.distribute(model, optimizer, loader, view="rank")
for ids, queries, y in loader:
    mw.backward(F.cross_entropy(model(ids, queries), y))
    optimizer.step()
    optimizer.zero_grad()
"""
PADDED = "Or the model reads padding: ranks pad to "


def test_a_memory_without_its_mask_is_said_to_be_read(pool: Any) -> None:
    found = proof(changed(READS, (", key_padding_mask=ids == 0", "")), pool)
    assert not found.equal and found.cause is not None
    assert PADDED in found.cause.evidence and "also for its memory" in found.cause.evidence, found.cause


def test_a_memory_with_its_mask_is_equal(pool: Any) -> None:
    found = proof(READS, pool)
    assert found.equal, (found.comparison.first, found.cause)


def test_dropout_over_a_shorter_padding_draws_the_numbers_of_one_device(pool: Any) -> None:
    dropped = ("memory = self.words(ids)", "memory = F.dropout(self.words(ids), 0.5)")
    found = proof(changed(READS, ("8, 2, batch", "8, 2, dropout=0.5, batch"), dropped), pool)
    assert found.equal, (found.comparison.first, found.cause)


def test_dropout_behind_padding_is_said_to_draw_other_numbers(pool: Any) -> None:
    dropped = ("memory = self.words(ids)", "memory = nn.functional.dropout(self.words(ids), 0.5)")
    found = proof(
        changed(
            READS, ("batch_first=True)\n    return", 'batch_first=True, padding_side="left")\n    return'), dropped
        ),
        pool,
    )
    assert not found.equal and found.cause is not None
    assert PADDED in found.cause.evidence and "where padding stands in front" in found.cause.evidence, found.cause


def test_another_fault_where_all_pad_alike_says_nothing_of_padding(pool: Any) -> None:
    alike = ("torch.randint(2, 8, (48,)).tolist()", "[5] * 48")
    found = proof(changed(READS, alike, ("read.mean(1))", "read.mean(1) - read.mean((0, 1)))")), pool)
    assert not found.equal and found.cause is not None
    assert PADDED not in found.cause.evidence, found.cause

"""Programs that exchange by hand: what is right is equal, and what is wrong is told with its place and its line.

Of checker/exchanges.py, checker/outputs.py and checker/rank_weights.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker.script_sides import as_it_was, proof  # noqa: F401
from tests.checker.strangers import SEQUENCE, TENSOR, changed

OF_ALL_RANKS = """        g = g.clone()
        if size() > 1:
            dist.all_reduce(g)
        return g
"""
POSITIONS_OF_ALL = """        g = g.clone()
        dist.all_reduce(g)
        return g.chunk"""
WRONG = {
    "sum of a forward": (
        changed(TENSOR, ("y = Sum.apply(torch.tanh(whole @ up.T) @ down.T)", "y = torch.tanh(whole @ up.T) @ down.T")),
        ("module outputs", "mlp", "missing reduction"),
        ("each rank works with its own part of mlp.down, mlp.up", "an all_reduce of its result is missing"),
    ),
    "sum of a backward": (
        changed(TENSOR, (OF_ALL_RANKS, "        return g\n")),
        ("gradients", "mlp", "missing reduction"),
        ("no weights of the ranks' own gradients", "(allreduce in Sum)", "no gradient comes back"),
    ),
    "positions": (
        changed(SEQUENCE, ("torch.arange(start, start + tokens.shape[1])", "torch.arange(tokens.shape[1])")),
        ("module outputs", "place", "module"),
        ("place (Embedding) is the first whose outputs differ",),
    ),
    "mask of own positions": (
        changed(SEQUENCE, ("rows = torch.arange(start, start + x.shape[1])", "rows = torch.arange(x.shape[1])")),
        ("module outputs", "block", "module"),
        ("exchanges by hand in train.py:", "allgather"),
    ),
    "gradients of other ranks' queries": (
        changed(SEQUENCE, (POSITIONS_OF_ALL, "        return g.chunk")),
        ("gradients", "block.v", "missing reduction"),
        ("no weights of the ranks' own gradients", "(allgather in GatherPositions)"),
    ),
}
"""What is wrong, where that is, and what is said."""


@pytest.mark.parametrize("name", ["tensor", "sequence"])
def test_a_program_that_exchanges_rightly_is_equal_and_its_divided_outputs_are_compared(name: str, pool: Any) -> None:
    found = proof({"tensor": TENSOR, "sequence": SEQUENCE}[name], pool)
    assert found.equal, (found.comparison.first, found.cause)
    assert not found.comparison.unseen


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_with_its_place_and_its_line(name: str, pool: Any) -> None:
    text, (kind, module, cause), says = WRONG[name]
    found = proof(text, pool)
    first = found.comparison.first
    assert first is not None and found.cause is not None
    assert (first.kind, found.module, found.cause.name) == (kind, module, cause), (first, found.cause)
    assert all(words in found.cause.evidence for words in says), found.cause.evidence


def test_outputs_that_cannot_be_compared_are_not_called_equal(pool: Any) -> None:
    """A module is given some numbers that are no samples', others on each rank; what comes after it is wrong."""
    text = changed(
        SEQUENCE,
        ("        self.embed, self.place =", "        self.looks = nn.Identity()\n        self.embed, self.place ="),
        ("        positions =", "        self.looks(tokens.flatten().double()[: 5 + size()])\n        positions ="),
        ("torch.arange(start, start + tokens.shape[1])", "torch.arange(tokens.shape[1])"),
    )
    found = proof(text, pool)
    assert found.cause is not None and found.module == "place"
    assert {each.module for each in found.comparison.unseen if each.step == 1} == {"looks"}
    assert "everything before it that can be compared (those of looks cannot) is equal" in found.cause.evidence

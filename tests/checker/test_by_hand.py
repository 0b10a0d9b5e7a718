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
        ("module outputs", "mlp", "module"),
        ("exchanges by hand in train.py:", "(allgather in Gather)"),
    ),
    "sum of a backward": (
        changed(TENSOR, (OF_ALL_RANKS, "        return g\n")),
        ("gradients", "mlp", "missing reduction"),
        ("no weights of the ranks' own gradients", "(allreduce in Sum)", "no gradient comes back"),
    ),
    "positions": (
        changed(SEQUENCE, ("torch.arange(start, start + tokens.shape[1])", "torch.arange(tokens.shape[1])")),
        ("loss", "", "loss"),
        ("the loss is",),
    ),
    "gradients of other ranks' queries": (
        changed(SEQUENCE, (POSITIONS_OF_ALL, "        return g.chunk")),
        ("gradients", "block.v", "missing reduction"),
        ("no weights of the ranks' own gradients", "(allgather in GatherPositions)"),
    ),
}
"""What is wrong, where that is, and what is said."""


@pytest.mark.parametrize("name", ["tensor", "sequence"])
def test_a_program_that_exchanges_rightly_is_equal(name: str, pool: Any) -> None:
    found = proof({"tensor": TENSOR, "sequence": SEQUENCE}[name], pool)
    assert found.equal, (found.comparison.first, found.cause)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_with_its_place_and_its_line(name: str, pool: Any) -> None:
    text, (kind, module, cause), says = WRONG[name]
    found = proof(text, pool)
    first = found.comparison.first
    assert first is not None and found.cause is not None
    assert (first.kind, found.module, found.cause.name) == (kind, module, cause), (first, found.cause)
    assert all(words in found.cause.evidence for words in says), found.cause.evidence

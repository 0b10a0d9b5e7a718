"""Tensor and sequence parallel by hand under plans whose ranks have the same samples: what is right is equal, and what
is wrong is told with its cause and its line.

Of checker/diagnose_by_hand.py and checker/outputs.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from meshwise.spec.plan import Plan
from tests.checker.script_sides import as_it_was, proof  # noqa: F401
from tests.checker.strangers import changed
from tests.checker.tensor_by_hand import HEAD, LOOPED, MODEL, ONE_AXIS, SEQUENCE, TWO_AXES

TENSOR, GRID = Plan(tensor=2), Plan(data=2, tensor=2)
SUM = """        x = x.clone()
        if size() > 1:
            dist.all_reduce(x, group=group())
        return x
"""
BACK = """        g = g.contiguous().clone()
        if size() > 1:
            dist.all_reduce(g, group=group())
        return g
"""
IDENTITY = """    def backward(ctx, g):
        return g
"""
GATHERED = """        return gathered(x)

    @staticmethod
    def backward(ctx, g):
        return scattered(g)
"""
SLICED = GATHERED.replace("scattered(g)", "g.chunk(size(), 1)[rank()].contiguous()")
SCATTERED = """    def forward(ctx, x):
        return scattered(x)
"""

WRONG = {
    "a row is not summed": (
        changed(MODEL, ("ReduceFromRegion.apply(F.linear(x, w))", "F.linear(x, w)")),
        ("loss", "", "loss"),
    ),
    "a table is not summed": (
        changed(MODEL, ("return ReduceFromRegion.apply(found)", "return found")),
        ("module outputs", "first.fall", "module"),
    ),
    "a mean for a sum": (
        changed(MODEL, (SUM, SUM.replace("        return x\n", "        return x / size()\n"))),
        ("module outputs", "words", "module"),
    ),
    "a bias of each rank": (
        changed(
            MODEL,
            (
                "ReduceFromRegion.apply(F.linear(x, w)) + self.bias",
                "ReduceFromRegion.apply(F.linear(x, w) + self.bias)",
            ),
        ),
        ("module outputs", "first.fall", "module"),
    ),
    "a column's input": (
        changed(MODEL, ("F.linear(CopyToRegion.apply(x), w, b)", "F.linear(x, w, b)")),
        ("gradients", "second.norm", "missing reduction"),
    ),
    "a column's weight": (
        changed(MODEL, ("w = CopyToRegion.apply(self.weight).chunk(size(), 0)", "w = self.weight.chunk(size(), 0)")),
        ("gradients", "second.rise", "missing reduction"),
    ),
    "a sum too many": (
        changed(MODEL, (IDENTITY, IDENTITY.replace("        return g\n", BACK))),
        ("gradients", "second.fall", "doubled reduction"),
    ),
    "norms of positions": (
        changed(SEQUENCE, ("CopyToRegion.apply(self.scale), CopyToRegion.apply(self.shift)", "self.scale, self.shift")),
        ("gradients", "second.norm", "missing reduction"),
    ),
    "a gather whose backward adds nothing up": (
        changed(SEQUENCE, (GATHERED, SLICED)),
        ("gradients", "second.norm", "missing reduction"),
    ),
    "positions that are not summed": (
        changed(SEQUENCE, (SCATTERED, SCATTERED.replace("scattered(x)", "x.chunk(size(), 1)[rank()].contiguous()"))),
        ("module outputs", "last", "module"),
    ),
}
"""What is wrong, where that is, and the cause that is named."""
GROUPS = {
    "the other axis": ("axis('dp').get_group()", "loss"),
    "the whole world": ("None", "wrong group"),
}
"""Sums of a forward over other ranks than those that have the same samples, on a mesh of two axes."""


@pytest.mark.parametrize("name", ["tensor", "sequence", "added up in the loop"])
def test_what_is_right_is_equal(name: str, pool: Any) -> None:
    model = {"tensor": MODEL, "sequence": SEQUENCE, "added up in the loop": LOOPED}[name]
    found = proof(HEAD + ONE_AXIS + model, pool, TENSOR, rounding=name == "added up in the loop")
    assert found.equal and not found.not_judged, (found.comparison.first, found.cause, found.not_judged)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_with_its_cause(name: str, pool: Any) -> None:
    model, told = WRONG[name]
    found = proof(HEAD + ONE_AXIS + model, pool, TENSOR)
    first = found.comparison.first
    assert first is not None and found.cause is not None
    assert (first.kind, found.module, found.cause.name) == told, (first, found.cause)


@pytest.mark.parametrize("name", GROUPS)
def test_a_sum_over_another_group_is_told(name: str, pool: Any) -> None:
    group, cause = GROUPS[name]
    found = proof(HEAD + TWO_AXES + changed(MODEL, (SUM, SUM.replace("group()", group))), pool, GRID, size=4)
    assert found.cause is not None and found.cause.name == cause
    assert "words" in found.cause.evidence


@pytest.mark.parametrize("model", [MODEL, LOOPED], ids=["tensor", "added up in the loop"])
def test_a_mesh_of_two_axes_by_hand_is_equal(model: str, pool: Any) -> None:
    assert proof(HEAD + TWO_AXES + model, pool, GRID, size=4).equal

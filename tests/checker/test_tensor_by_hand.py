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
        ("module outputs", "first.fall", "missing reduction"),
        (
            "first.fall (RowParallelLinear, train.py:",
            "without first.fall.bias, which every rank adds",
            "outputs add up",
        ),
    ),
    "a table is not summed": (
        changed(MODEL, ("return ReduceFromRegion.apply(found)", "return found")),
        ("module outputs", "words", "missing reduction"),
        (
            "outputs of words (Words, train.py:",
            "add up to that of one device",
            "An all_reduce of the output is missing",
        ),
    ),
    "a mean for a sum": (
        changed(MODEL, (SUM, SUM.replace("        return x\n", "        return x / size()\n"))),
        ("module outputs", "words", "doubled reduction"),
        ("are 1/2 of those of one device: the sum in train.py:", "(allreduce in ReduceFromRegion)"),
    ),
    "a bias of each rank": (
        changed(
            MODEL,
            (
                "ReduceFromRegion.apply(F.linear(x, w)) + self.bias",
                "ReduceFromRegion.apply(F.linear(x, w) + self.bias)",
            ),
        ),
        ("module outputs", "first.fall", "doubled reduction"),
        ("those of one device and 1 times first.fall.bias", "every rank adds it before the sum"),
    ),
    "a column's input": (
        changed(MODEL, ("F.linear(CopyToRegion.apply(x), w, b)", "F.linear(x, w, b)")),
        ("gradients", "second.norm", "missing reduction"),
        (
            "outputs of second.norm (LayerNorm) is only a part on each rank",
            "second.rise (ColumnParallelLinear, train.py:",
        ),
    ),
    "a column's weight": (
        changed(MODEL, ("w = CopyToRegion.apply(self.weight).chunk(size(), 0)", "w = self.weight.chunk(size(), 0)")),
        ("gradients", "second.rise", "missing reduction"),
        (
            "comes back to second.rise (ColumnParallelLinear, train.py:",
            "second.rise.weight, first.rise.weight are only a part",
        ),
    ),
    "a sum too many": (
        changed(MODEL, (IDENTITY, IDENTITY.replace("        return g\n", BACK))),
        ("gradients", "second.fall", "doubled reduction"),
        ("second.fall.weight is 2 times that of one device", "(allreduce in ReduceFromRegion)", "too many"),
    ),
    "norms of positions": (
        changed(SEQUENCE, ("CopyToRegion.apply(self.scale), CopyToRegion.apply(self.shift)", "self.scale, self.shift")),
        ("gradients", "second.norm", "missing reduction"),
        ("second.norm.scale, second.norm.shift, first.norm.scale and 1 more are only a part on each rank",),
    ),
    "a gather whose backward adds nothing up": (
        changed(SEQUENCE, (GATHERED, SLICED)),
        ("gradients", "second.norm", "missing reduction"),
        ("second.rise (ColumnParallelLinear", "(allgather in GatherPositions), but its backward has no collective"),
    ),
    "positions that are not summed": (
        changed(SEQUENCE, (SCATTERED, SCATTERED.replace("scattered(x)", "x.chunk(size(), 1)[rank()].contiguous()"))),
        ("module outputs", "first.fall", "missing reduction"),
        ("features to first.fall (RowParallelLinear, train.py:", "a reduce_scatter or an all_reduce is missing"),
    ),
}
"""What is wrong, where that is, and what is said."""
OTHER = "axis('dp').get_group()"
GROUPS = {
    "the other axis in the forward": (
        changed(MODEL, (SUM, SUM.replace("group()", OTHER))),
        ("module outputs", "words"),
        ("(allreduce in ReduceFromRegion) adds up over rank 0, 2", "are on rank 0, 1"),
    ),
    "the whole world in the forward": (
        changed(MODEL, (SUM, SUM.replace("group()", "None"))),
        ("module outputs", "words"),
        ("(allreduce in ReduceFromRegion) adds up over rank 0, 1, 2, 3", "are on rank 0, 1"),
    ),
    "the other axis in the backward": (
        changed(MODEL, (BACK, BACK.replace("group()", OTHER))),
        ("gradients", "second.fall"),
        ("(allreduce in CopyToRegion) adds up over rank 0, 2", "are on rank 0, 1"),
    ),
    "the whole world in the loop": (
        changed(LOOPED, ("to_local(), group=group()", "to_local(), group=None")),
        ("gradients", "second.norm"),
        ("(allreduce) adds up over rank 0, 1, 2, 3", "are on rank 0, 1"),
    ),
}
"""Sums over other ranks than those that have the same samples, on a mesh of two axes."""


@pytest.mark.parametrize("name", ["tensor", "sequence", "added up in the loop"])
def test_what_is_right_is_equal_and_its_parts_are_compared(name: str, pool: Any) -> None:
    model = {"tensor": MODEL, "sequence": SEQUENCE, "added up in the loop": LOOPED}[name]
    found = proof(HEAD + ONE_AXIS + model, pool, TENSOR, rounding=name == "added up in the loop")
    assert found.equal and not found.not_judged, (found.comparison.first, found.cause, found.not_judged)
    assert not found.comparison.unseen


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_with_its_cause_and_its_line(name: str, pool: Any) -> None:
    model, (kind, module, cause), says = WRONG[name]
    found = proof(HEAD + ONE_AXIS + model, pool, TENSOR)
    first = found.comparison.first
    assert first is not None and found.cause is not None
    assert (first.kind, found.module, found.cause.name) == (kind, module, cause), (first, found.cause)
    assert all(words in found.cause.evidence for words in says), found.cause.evidence


@pytest.mark.parametrize("name", GROUPS)
def test_a_sum_over_another_group_is_told_with_the_ranks_of_both(name: str, pool: Any) -> None:
    model, (kind, module), says = GROUPS[name]
    found = proof(HEAD + TWO_AXES + model, pool, GRID, size=4)
    first = found.comparison.first
    assert first is not None and found.cause is not None
    assert (first.kind, found.module, found.cause.name) == (kind, module, "wrong group"), (first, found.cause)
    assert all(words in found.cause.evidence for words in says), found.cause.evidence


@pytest.mark.parametrize("model", [MODEL, LOOPED], ids=["tensor", "added up in the loop"])
def test_a_mesh_of_two_axes_by_hand_is_equal(model: str, pool: Any) -> None:
    assert proof(HEAD + TWO_AXES + model, pool, GRID, size=4).equal

"""Outputs of modules, compared whatever the ranks had: other samples, more of them, fewer, none, of other lengths."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.equivalence.outputs import outputs_apart
from meshwise.equivalence.prints import prints_of
from meshwise.equivalence.seen import Output
from meshwise.equivalence.watch import merged

sizes = st.integers(0, 5)
shapes = st.lists(sizes, max_size=4).map(tuple)


def seen(shape: tuple[int, ...], rows: int, counts: bool = True, wide: bool = False) -> Output:
    value = torch.randn((*shape, *([4100] if wide else [])), dtype=torch.float64)
    prints = {layout: (p,) if counts else () for layout, p in prints_of(value, rows).items()}
    return Output(0, "m", "M", 0, (tuple(value.shape),) if counts else (), (rows,) if counts else (), prints)


@settings(max_examples=100)
@given(shapes, sizes, st.lists(st.tuples(shapes, sizes, st.booleans()), min_size=1, max_size=4), st.booleans())
def test_no_shape_makes_it_fail(shape: tuple[int, ...], rows: int, ranks: list, wide: bool) -> None:
    (plan,) = merged([[seen(s, r, counts, wide)] for s, r, counts in ranks])
    sizes = outputs_apart(seen(shape, rows, wide=wide), plan)
    assert sizes is None or all(math.isinf(size) or size >= 0 for size in sizes)


@settings(max_examples=100)
@given(sizes, st.lists(sizes, min_size=1, max_size=4), shapes, st.booleans())
def test_ranks_with_other_shares_than_one_device(rows: int, ranks: list[int], rest: tuple[int, ...], mid: bool) -> None:
    """As many samples as one device, more, or fewer; sequences of one length, or each rank's own."""
    (plan,) = merged([[seen((own, *((r + 1,) if mid else ()), *rest), own)] for r, own in enumerate(ranks)])
    sizes = outputs_apart(seen((rows, *((len(ranks),) if mid else ()), *rest), rows), plan)
    assert sizes is None or all(math.isinf(size) or size >= 0 for size in sizes)

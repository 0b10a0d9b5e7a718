"""Outputs of modules, compared whatever the ranks had: other samples, more of them, fewer, none, of other lengths."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshwise.checker.difference import LIMIT
from meshwise.checker.outputs import output_difference
from meshwise.checker.sketches import sketches
from meshwise.checker.trace import Output

ROUNDING = 7 * 5**4 * 2.0**-52
"""Of a sum of so many float64 values: in which order they are added is the kernel's, by the shape it is given."""
sizes = st.integers(0, 5)
shapes = st.lists(sizes, max_size=4).map(tuple)


def output(value: Tensor, rows: int) -> Output:
    return Output(0, "m", "M", 0, tuple(value.shape), rows, sketches(value, rows))


def random(shape: tuple[int, ...], wide: bool = False) -> Tensor:
    return torch.randn((*shape, *([4100] if wide else [])), dtype=torch.float64)


@given(shapes, sizes, st.lists(st.tuples(shapes, sizes), min_size=1, max_size=4), st.booleans())
def test_random_values_of_any_shape_are_never_equal(shape: tuple[int, ...], rows: int, ranks: list, wide: bool) -> None:
    """Whatever the shapes are: a difference, or not to be compared, unless there is nothing in them."""
    value = random(shape, wide)
    found = output_difference(output(value, rows), [output(random(s, wide), r) for s, r in ranks])
    assert found is None or found > LIMIT or not value.numel()


@given(st.lists(sizes, min_size=1, max_size=4), shapes, st.integers(0, 1), st.booleans())
def test_the_slices_of_the_ranks_are_equal_to_the_whole(
    counts: list[int], rest: tuple[int, ...], dim: int, changed: bool
) -> None:
    """Each rank has its samples, in dim 0 or 1; one changed value is found."""
    total = sum(counts)
    shape = (total, *rest) if dim == 0 else (7, total, *rest)
    whole = torch.randn(shape, dtype=torch.float64)
    parts = [whole.narrow(dim, start, stop - start).clone() for start, stop in pairwise(accumulate(counts, initial=0))]
    full = max(parts, key=Tensor.numel)
    if changed and full.numel():
        full.view(-1)[-1] += 1e-3
    ranks = [output(part, count) for part, count in zip(parts, counts, strict=True) if count]
    found = output_difference(output(whole, total), ranks)
    if total == 0:
        assert found is None
    elif changed and full.numel():
        assert found is not None and found > LIMIT
    else:
        assert found is not None and found < ROUNDING


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4), st.booleans())
def test_ranks_that_pad_to_their_own_length_are_compared_as_far_as_they_go(
    ranks: list[tuple[int, int]], changed: bool
) -> None:
    """Samples and positions of each rank; one device pads to the longest. What differs is unknown, not a difference."""
    longest = 1 + max(length for _, length in ranks)
    whole = torch.randn(sum(count for count, _ in ranks), longest, 3, dtype=torch.float64)
    starts = accumulate((count for count, _ in ranks), initial=0)
    parts = [whole[start : start + n, :length].clone() for start, (n, length) in zip(starts, ranks, strict=False)]
    if changed:
        parts[-1][-1, -1] += 1e-3
    ranks_of = [output(part, len(part)) for part in parts]
    found = output_difference(output(whole, len(whole)), ranks_of)
    assert found is None if changed else found is not None and found < ROUNDING


def test_what_is_alike_on_every_rank_is_compared_whole() -> None:
    """A table that does not belong to the samples."""
    table = torch.randn(7, 3, dtype=torch.float64)
    assert output_difference(output(table, 5), [output(table, 2), output(table, 3)]) == 0.0
    assert output_difference(output(table, 5), [output(table, 2), output(table + 1e-3, 3)]) is None


def test_rows_that_an_expert_sorted_are_not_those_of_samples() -> None:
    """Twelve tokens of four samples by expert, and by expert on each of two ranks: no other values, another order."""
    tokens, order = torch.randn(12, 5, dtype=torch.float64), torch.randperm(12)
    ranks = [output(part[torch.randperm(6)], 2) for part in tokens.split(6)]
    assert output_difference(output(tokens[order], 4), ranks) is None
    tokens[3] += 1e-3
    found = output_difference(output(tokens[order], 4), ranks)
    assert found is not None and found > LIMIT

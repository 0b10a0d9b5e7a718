"""Tensors whose rows are divided: an operator gives what it gives of the whole, and so do its first two derivatives.

Ranks are threads, so that no process starts. Rows are divided as a batch is, or raggedly, with ranks that hold none.

Tests splits/picking.py, splits/rows.py, splits/extremes.py, splits/draws.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwise.splits import rules
from meshwise.splits.axis import SplitPart
from meshwise.splits.crossing import gather
from meshwise.splits.tensor import SplitTensor, split
from tests.parallel.test_split_context import ThreadAxis, on_ranks, same

Case = tuple[Callable[..., Any], str]
D = torch.float64


def tensors(made: Any) -> list[Tensor]:
    if isinstance(made, tuple | list):
        return [one for each in made for one in tensors(each)]
    return [made] if isinstance(made, Tensor) else [torch.as_tensor(made)]


def derivatives(
    leaves: Sequence[Tensor], outs: Sequence[Tensor], whole: Callable[[int, Tensor], Tensor], twice: bool
) -> list[Any]:
    """Return the gradients of a random number made of `outs`, and the gradients of a random number made of those.

    whole: makes the whole of the gradient of leaf i. twice: whether torch knows the second derivative.
    """
    random = torch.Generator().manual_seed(7)

    def number(each: Sequence[Tensor]) -> Tensor:
        return sum(
            ((o * torch.randn(o.shape, dtype=D, generator=random)).sum() for o in each), torch.zeros((), dtype=D)
        )

    trained = [n for n, leaf in enumerate(leaves) if leaf.requires_grad]
    outs = [o for o in outs if o.requires_grad]
    if not trained or not outs:
        return []
    mine, seeds = [leaves[n] for n in trained], number(outs)
    first = torch.autograd.grad(seeds, mine, create_graph=twice, materialize_grads=True)
    full = [whole(n, g) for n, g in zip(trained, first, strict=True)]
    again = number(full)
    second = (
        torch.autograd.grad(again, mine, materialize_grads=True) if again.requires_grad else map(torch.zeros_like, mine)
    )
    return [*full, *(whole(n, g) for n, g in zip(trained, second, strict=True))] if twice else full


def held(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    ends: Sequence[Sequence[int]] | None,
    size: int = 2,
    dims: Sequence[int | None] | None = None,
    twice: bool = True,
) -> list[Any]:
    """Compare `function` of inputs whose rows are divided with that of whole ones. Returns what each result of rank 0
    is split along, what rank 0 sent, and which operators were gathered.

    ends: where the rows of each rank end; None: as `torch.chunk` divides them.
    dims: the dim of the rows in each input; by default 0 if the input has as many rows as the first, else whole.
    """
    rows = len(inputs[0])
    dims = dims or [0 if each.dim() and len(each) == rows else None for each in inputs]

    def leaf(x: Tensor) -> Tensor:
        return x.clone().requires_grad_(x.is_floating_point())

    def twin(x: Tensor) -> Tensor:
        return x * 1 if x.is_floating_point() else x.clone()

    leaves = [leaf(x) for x in inputs]
    wanted = tensors(function(*map(twin, leaves)))
    wanted_d = derivatives(leaves, wanted, lambda n, g: g, twice)

    def work(axis: ThreadAxis) -> Any:
        def part_of(x: Tensor, dim: int | None) -> SplitPart | None:
            if dim is None:
                return None
            part = SplitPart(axis, dim, x.shape[dim])
            return part if ends is None else part.divided([[(b, e)] for b, e in ends], x.shape[dim])

        parts = [part_of(x, dim) for x, dim in zip(inputs, dims, strict=True)]
        mine = [leaf(x if p is None else p.slice_of(x)) for x, p in zip(inputs, parts, strict=True)]

        def whole(n: int, g: Tensor) -> Tensor:
            p = parts[n]
            return g if p is None else gather(split(g * 1, p)) / axis.size

        made = tensors(
            function(*(twin(x) if p is None else split(twin(x), p) for x, p in zip(mine, parts, strict=True)))
        )
        kinds = [each.part.dim if isinstance(each, SplitTensor) else None for each in made]
        shapes, sent = [each.shape for each in made], dict(axis.sent)
        full = [gather(each) for each in made]
        return kinds, shapes, full, derivatives(mine, full, whole, twice), sent

    rules.gathered.clear()
    found = on_ranks(size, work, name="data", gradient_scale=size)
    for rank, (_, shapes, full, found_d, _) in enumerate(found):
        assert shapes == [each.shape for each in wanted]
        for got, expected in zip(full, wanted, strict=True):
            assert got.dtype == expected.dtype and same(got, expected), f"rank {rank}: {got}, not {expected}"
        assert len(found_d) == len(wanted_d)
        for place, (got, expected) in enumerate(zip(found_d, wanted_d, strict=True)):
            assert same(got, expected), f"derivative {place}, rank {rank}: {got}, not {expected}"
    return [found[0][0], found[0][-1], dict(rules.gathered)]

"""A function of tensors is run on each part, with the entries of its neighbours if asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import meshwise as mw

XP = mw.array_namespace("3xcpu")


@pytest.mark.parametrize("layout", [XP.shard(0), XP.shard(1), XP.shard(0, sizes=[0, 5, 2]), XP.replicated()])
def test_parts_become_parts(layout: Any) -> None:
    values = np.arange(28.0).reshape(7, 4)
    x = XP.asarray(values, sharding=layout)
    doubled, small = mw.map_shards(lambda part, row, by: (part * by + row, part.int()), x, XP.arange(4.0), 2)
    np.testing.assert_array_equal(doubled.numpy(), values * 2 + np.arange(4.0))
    np.testing.assert_array_equal(small.numpy(), values)
    assert (doubled.sharding, small.dtype) == (x.sharding, torch.int32)


@pytest.mark.parametrize("sizes", [[3, 3, 2], [0, 1, 7], [8, 0, 0], [1, 1, 6]])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("wrap", [False, True])
def test_neighbours_of_a_stencil(sizes: list[int], own: bool, wrap: bool) -> None:
    values = np.arange(8.0) ** 2
    x = XP.asarray(values, sharding=XP.shard(0, sizes=sizes))

    def blurred(part: torch.Tensor) -> torch.Tensor:
        grown = torch.nn.functional.pad(part[None], (1, 1), mode="replicate")[0]
        mean = (grown[:-2] + grown[1:-1] + grown[2:]) / 3
        return mean[1:-1] if own else mean

    if own and not wrap:
        return
    found = mw.map_shards(blurred, x, halo=1, wrap=wrap)
    ends = np.pad(values, 1, mode="wrap" if wrap else "edge")
    np.testing.assert_allclose(found.numpy(), (ends[:-2] + ends[1:-1] + ends[2:]) / 3)


def test_what_does_not_fit_is_refused() -> None:
    x = XP.arange(7.0)
    for function, words in [
        (lambda part: part[:1], "must keep the length of dim 0, which is divided"),
        (lambda part: 3, "returned int"),
        (lambda part: part.int() if len(part) == 3 else part, "differ only in the divided dim"),
    ]:
        with pytest.raises(mw.UsageError, match=words):
            mw.map_shards(function, x)
    with pytest.raises(mw.UsageError, match="the second argument must be an array"):
        mw.map_shards(torch.neg, torch.ones(3))  # type: ignore[arg-type]

"""Products, sorts, sets, transforms and linear algebra over ranks: what they compute on virtual devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import meshwise as mw
from meshwise.arrays import fft, products, selection, stacks
from tests.pool import Pool


def calls(xp: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each function, of arrays that lie in parts along either dim, on one place and on each."""
    rng = np.random.default_rng(3)
    matrix, line = rng.normal(size=(6, 6)) + 6 * np.eye(6), rng.integers(0, 9, 23)
    positive, tall = matrix @ matrix.T, rng.normal(size=(30, 3))
    for how in (xp.shard(0), xp.shard(-1), xp.single(1), xp.replicated()):
        a, b, v, t = (xp.asarray(each, sharding=how) for each in (matrix, positive, line, tall))
        yield "matmul", lambda a=a: (a @ a, a @ a[0], xp.ones((2, 6)) @ a)
        yield "tensordot", lambda a=a: xp.tensordot(a, a, axes=((0,), (0,)))
        yield "cumulative", lambda a=a, v=v: (xp.cumulative_sum(a, axis=0), xp.cumulative_prod(v))
        yield "sort", lambda a=a, v=v: (xp.sort(v), xp.argsort(v), xp.sort(a, axis=0), xp.argsort(a, axis=1))
        yield "unique", lambda v=v, a=a: (*xp.unique_all(v), xp.unique_values(v), *xp.unique_counts(a))
        yield (
            "lookup",
            lambda v=v: (xp.searchsorted(xp.arange(4), v), xp.searchsorted(xp.sort(v), 3), xp.isin(v, v[:3])),
        )
        yield "quantile", lambda a=a, v=v: (xp.quantile(v, [0.2, 0.7]), xp.median(a, axis=0), *xp.topk(v, 3))
        yield "fft", lambda a=a, v=v: (xp.fft.fft(v), xp.fft.fft(a, axis=0), xp.fft.rfftn(a), xp.fft.fftshift(v))
        yield "fftfreq", lambda: xp.fft.fftfreq(5)
        la = xp.linalg
        yield (
            "solve",
            lambda a=a, la=la: (la.solve(a, xp.ones(6)), la.solve(a, a), la.inv(a), *la.slogdet(a), la.det(a)),
        )
        yield "cholesky", lambda b=b, la=la: (la.cholesky(b), la.eigvalsh(b), la.matrix_power(b, 3))
        yield "svd", lambda t=t, la=la: (la.svdvals(t), la.pinv(t), la.matrix_rank(t), la.qr(t)[1] ** 2)
        yield "norms", lambda a=a, la=la: (la.vector_norm(a), la.matrix_norm(a, ord=2), la.trace(a), la.diagonal(a))
        yield "cross", lambda t=t, la=la: la.cross(t, t[:1] + 1)


SMALL_BLOCKS = ((products, "BLOCKS_FROM", 0), (fft, "LONG", 4), (selection, "SAMPLES", 8), (stacks, "LARGE", 0))
"""What small arrays take the ways of large ones by."""


def program(devices: str | None, blocks: bool) -> list[tuple[str, list[Any]]]:
    """What each function gives, read, or the sentence of its refusal."""
    xp = mw.array_namespace(devices)
    read = []
    with pytest.MonkeyPatch.context() as patch, mw.guard("allow"):  # undone: other tests run in the same ranks
        for module, name, value in SMALL_BLOCKS if blocks else ():
            patch.setattr(module, name, value)
        for name, call in calls(xp):
            found = call()
            read.append((name, [each.numpy() for each in (found if isinstance(found, tuple) else (found,))]))
    return read


@pytest.mark.parametrize("blocks", [False, True])
def test_strict_virtual_devices_mix_nothing(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = program("3xcpu", False)
    for module, name, value in SMALL_BLOCKS if blocks else ():
        monkeypatch.setattr(module, name, value)
    with mw.virtual_devices(3):
        ours = program("3xcpu", False)
    for (name, found), (_, values) in zip(ours, expected, strict=True):
        for one, other in zip(found, values, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("ranks, blocks", [(2, True), (3, False)])
def test_ranks_compute_what_virtual_devices_do(pool: Callable[[int], Pool], ranks: int, blocks: bool) -> None:
    expected = program(f"{ranks}xcpu", False)
    for ours in pool(ranks).run(program, None, blocks):
        for (name, found), (_, values) in zip(ours, expected, strict=True):
            for one, other in zip(found, values, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9, err_msg=name)

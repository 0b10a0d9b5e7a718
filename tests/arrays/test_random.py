"""Random arrays are the same on any number of devices. Also for arrays/philox.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import meshwise as mw
from meshwise.arrays.philox import bits, bits_at, words

XP = mw.array_namespace("3xcpu")
LAYOUTS = [XP.shard(0), XP.shard(1), XP.shard(0, sizes=[0, 6, 1]), XP.shard(1, sizes=[1, 0, 3]), XP.replicated()]


def test_it_is_philox() -> None:
    """The known answers of the authors' own library (Random123, kat_vectors, philox 4x32 10)."""
    for counter, key, expected in [
        ((0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF, 0xFFFFFFFF, 2**64 - 1), 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x0370734413198A2E),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]:
        low, high = torch.tensor([counter[0]]), torch.tensor([counter[1]])
        assert [int(word) for word in words(low, high, counter[2], key)] == list(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, **at: rng.random((7, 4), **at),
        lambda rng, **at: rng.random((7, 4), "float32", **at),
        lambda rng, **at: rng.uniform(-2, 3, (7, 4), **at),
        lambda rng, **at: rng.normal(1, 2, (7, 4), **at),
        lambda rng, **at: rng.exponential(2, (7, 4), **at),
        lambda rng, **at: rng.integers(-5, 9, (7, 4), **at),
        lambda rng, **at: rng.integers(0, 2**62, (7, 4), **at),
    ],
)
def test_on_any_devices_the_same(draw: Any, layout: Any) -> None:
    one = mw.array_namespace("1xcpu")
    first, second = XP.random.default_rng(7), one.random.default_rng(7)
    for _ in range(2):
        np.testing.assert_array_equal(draw(first, sharding=layout).numpy(), draw(second).numpy())


def test_what_is_drawn_is_distributed_so() -> None:
    rng = XP.random.default_rng(3)
    uniform, normal = rng.random(100_000), rng.normal(1, 2, 100_000)
    whole, waits = rng.integers(0, 6, 60_000), rng.exponential(3, 100_000)
    assert abs(float(uniform.mean()) - 0.5) < 0.005
    assert 0 <= float(uniform.min()) < float(uniform.max()) < 1
    assert abs(float(normal.mean()) - 1) < 0.03
    assert abs(float(normal.std()) - 2) < 0.03
    assert abs(float(waits.mean()) - 3) < 0.05
    assert np.bincount(whole.numpy(), minlength=6) == pytest.approx([10_000] * 6, rel=0.05)
    assert sorted(rng.permutation(10).numpy()) == list(range(10))
    assert len({float(rng.random()) for _ in range(5)}) == 5


def test_a_seed_begins_anew() -> None:
    XP.random.seed(5)
    first = XP.random.rand(4).numpy()
    XP.random.seed(5)
    assert (XP.random.rand(4).numpy() == first).all()
    assert (XP.random.rand(4).numpy() != first).all()
    with pytest.raises(mw.UsageError, match="seed must be a whole number from 0"):
        XP.random.seed(-1)
    with pytest.raises(mw.UsageError, match="low < high"):
        XP.random.integers(3, 3)


def test_blocks_and_odd_beginnings_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bits(0, 100, 1, 2, torch.device("cpu"))
    for first, count in [(0, 100), (3, 20), (4, 1), (99, 1)]:
        part = bits(first, count, 1, 2, torch.device("cpu"))
        assert all(torch.equal(a, b[first : first + count]) for a, b in zip(part, whole, strict=True))
    index = torch.tensor([99, 0, 7, 8])
    assert all(torch.equal(a, b[index]) for a, b in zip(bits_at(index, 1, 2), whole, strict=True))
    expected = [XP.random.default_rng(1).random((7, 5), sharding=layout).numpy() for layout in LAYOUTS[:2]]
    monkeypatch.setattr("meshwise.arrays.random.BLOCKS", {"cpu": 4})
    for layout, values in zip(LAYOUTS[:2], expected, strict=True):
        assert (XP.random.default_rng(1).random((7, 5), sharding=layout).numpy() == values).all()

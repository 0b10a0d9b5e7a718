"""Transforms: NumPy's values however the array lies; one transpose where the split axis is transformed."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import meshwise as mw
from meshwise.arrays import fft
from tests.arrays.layouts import RNG, XP, drawn, layouts, moved, same

ONE = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
SEVERAL = ["fftn", "ifftn", "rfftn", "irfftn"]
TOLERANCE = {"float32": 1e-4}


def of_this(name: str, dtype: str) -> bool:
    return dtype != "complex128" or name not in ("rfft", "ihfft", "rfftn")


@pytest.mark.parametrize("long, dtype", [(fft.LONG, "float64"), (4, "complex128"), (4, "float32"), (fft.LONG, "int32")])
@pytest.mark.parametrize("shape", [(7,), (36,), (5, 4), (2, 3, 4)])
def test_transforms(shape: Any, dtype: str, long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fft, "LONG", long)
    values = drawn(shape, dtype)
    near = TOLERANCE.get(dtype, 1e-9)
    with mw.guard("allow"), warnings.catch_warnings():
        for how in layouts(shape):
            x = XP.asarray(values, sharding=how)
            for name in filter(lambda name: of_this(name, dtype), ONE):
                for axis in range(len(shape)):
                    for n in (None, 3, 9)[: 3 if len(shape) < 3 else 2]:
                        if n is None and shape[axis] < 2:
                            continue
                        words: Any = {"n": n, "axis": axis, "norm": "ortho" if n == 3 else "backward"}
                        same(getattr(XP.fft, name)(x, **words), getattr(np.fft, name)(values, **words), near)
            for name in filter(lambda name: of_this(name, dtype), SEVERAL):
                if shape[-1] > 1:
                    same(getattr(XP.fft, name)(x), getattr(np.fft, name)(values), near)
                if len(shape) > 1:
                    words = {"s": (6, 4), "axes": (-1, 0), "norm": "forward"}
                    same(getattr(XP.fft, name)(x, **words), getattr(np.fft, name)(values, **words), near)


def test_frequencies() -> None:
    for n in (1, 7, 8):
        same(XP.fft.fftfreq(n, d=0.5), np.fft.fftfreq(n, d=0.5))
        same(XP.fft.rfftfreq(n, d=0.5), np.fft.rfftfreq(n, d=0.5))
    assert XP.fft.fftfreq(8, dtype=XP.float32, device="cpu:1").device == "cpu:1"


def test_shifts() -> None:
    for shape in ((7,), (5, 4)):
        values = drawn(shape)
        for how in layouts(shape):
            x = XP.asarray(values, sharding=how)
            for axes in (None, 0, (-1,)):
                same(XP.fft.fftshift(x, axes=axes), np.fft.fftshift(values, axes=axes))
                same(XP.fft.ifftshift(x, axes=axes), np.fft.ifftshift(values, axes=axes))


def test_bytes_are_those_of_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    x = XP.asarray(RNG.normal(size=(60, 60)) * 1j)
    there = XP.fft.fftn(x)
    assert moved(lambda: XP.fft.fft(x, axis=1)) == 0
    assert moved(lambda: XP.fft.fftn(x)) == moved(lambda: XP.fft.ifftn(there)) == x.nbytes * 2 // 3
    assert XP.fft.ifftn(there).sharding == x.sharding
    many = XP.asarray(RNG.normal(size=(6, 8, 4)) * 1j, sharding=XP.shard(1))
    assert moved(lambda: XP.fft.fftn(many, axes=(1, 2))) == many.nbytes * 2 // 3
    vector = XP.asarray(RNG.normal(size=3600) * 1j)
    assert moved(lambda: XP.fft.fft(vector)) == 2 * vector.nbytes * 2 // 3
    monkeypatch.setattr(fft, "LONG", 3600)
    assert moved(lambda: XP.fft.fft(vector)) == 3 * vector.nbytes * 2 // 3


def test_a_long_vector_of_prime_length_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fft, "LONG", 4)
    with mw.guard("error"), pytest.raises(mw.UsageError, match="fft cannot run on the shards"):
        XP.fft.fft(XP.ones(7))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="one of backward, ortho, forward"):
        XP.fft.fft(XP.ones(4), norm="none")
    with pytest.raises(TypeError, match=r"or use xp\.fft\.fft"):
        XP.fft.rfft(XP.ones(4) * 1j)
    with pytest.raises(ValueError, match="name at least one axis, each once"):
        XP.fft.fftn(XP.ones((4, 4)), axes=(0, 0))
    with pytest.raises(ValueError, match="along axis 0"):
        XP.fft.fft(XP.ones((0,)))

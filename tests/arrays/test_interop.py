"""Arrays beside NumPy, torch and DLPack. Also for arrays/casting.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import meshwise as mw
from meshwise.arrays.gathering import GatherWarning

XP = mw.array_namespace("2xcpu")


def test_what_lies_on_one_place_is_shared() -> None:
    x = XP.arange(4.0, device="cpu:1")
    for shared in (np.asarray(x), torch.from_dlpack(x).numpy(), np.from_dlpack(x)):
        assert shared.ctypes.data == x.shards[0].data_ptr()
    back = XP.from_dlpack(np.asarray(x))
    assert back.shards[0].data_ptr() == x.shards[0].data_ptr()
    assert back.device == "cpu:0"


def test_of_what_lies_on_several_all_is_gathered_never_a_part() -> None:
    x = XP.arange(5)
    assert np.asarray(x).tolist() == [0, 1, 2, 3, 4]
    with pytest.warns(GatherWarning, match="__dlpack__ cannot run on the shards"):
        copy = torch.from_dlpack(x)
    assert copy.tolist() == [0, 1, 2, 3, 4]
    copy[0] = 7
    assert (int(x[0]), x.device) == (0, "all")
    assert not hasattr(x, "__cuda_array_interface__")
    with pytest.raises(ValueError, match="must be copied"):
        np.asarray(x, copy=False)
    with mw.guard("error"), pytest.raises(mw.UsageError, match=r"gathers 16 B, which mw.guard"):
        torch.from_dlpack(x)


def test_what_must_not_be_copied_moves_to_one_place_itself() -> None:
    x = XP.arange(5)
    with mw.guard("allow"):
        shared = np.from_dlpack(x, copy=False)
    assert x.device == "cpu:0"
    assert shared.ctypes.data == x.shards[0].data_ptr()
    y = XP.arange(5)
    assert XP.from_dlpack(y, copy=False, device=y.device) is y


def test_numpys_operators_and_functions_become_ours() -> None:
    x, a = XP.arange(5.0), np.arange(5.0)
    for found in (a + x, np.float64(2) * x, np.sqrt(x), np.add(a, x), np.sum(x), np.mean(x)):
        assert type(found) is mw.Array
    np.testing.assert_array_equal((a - x).numpy(), a - a)
    np.testing.assert_array_equal(np.sqrt(x).numpy(), torch.from_numpy(a).sqrt())  # whose last bit the kernel decides
    x32 = XP.arange(5, dtype="float32")
    assert (np.float64(2) * x32).dtype is torch.float64
    assert (np.float32(2) * x32).dtype is torch.float32
    with pytest.raises(TypeError, match="not supported"):
        np.i0(x)


@pytest.mark.parametrize("dtype", ["int8", "int64", "float32", "complex128", "bool"])
def test_another_dtype(dtype: Any) -> None:
    values = np.array([0.0, 1.7, -2.0])
    np.testing.assert_array_equal(XP.asarray(values).astype(dtype).numpy(), values.astype(dtype))
    with pytest.raises(TypeError, match=r"Cast xp.real\(x\)"):
        XP.asarray([1j]).astype("float64")


def test_the_namespace_says_what_it_has() -> None:
    info = XP.ones(3).__array_namespace__().__array_namespace_info__()
    assert info.devices() == ("cpu:0", "cpu:1", "all")
    assert info.default_dtypes()["real floating"] is torch.float64
    assert set(info.dtypes(kind=("bool", "complex floating"))) == {"bool", "complex64", "complex128"}
    assert XP.finfo(XP.complex64).eps == np.finfo(np.float32).eps
    assert XP.iinfo(XP.int8).max == 127
    assert XP.isdtype(XP.int8, ("integral", XP.float32))
    assert XP.result_type(XP.float32, XP.ones(1, dtype=XP.int8), 1.0) is XP.float32
    assert XP.can_cast(XP.float32, XP.float64)
    assert mw.array_namespace("2xcpu") is XP
    assert mw.array_namespace("2xcpu", default_float="float32").ones(1).dtype is torch.float32

"""Arrays are written and read part by part, in files that NumPy and safetensors read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import meshwise as mw

XP = mw.array_namespace("3xcpu")
LAYOUTS = [XP.shard(0), XP.shard(1), XP.shard(0, sizes=[0, 5, 0]), XP.replicated(), XP.single(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float64", "int8", "complex64", "bool"])
def test_npy(tmp_path: Path, layout: Any, dtype: str) -> None:
    values = np.arange(15).reshape(5, 3).astype(dtype)
    XP.save(tmp_path / "x.npy", XP.asarray(values, sharding=layout))
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), values)
    found = XP.load(tmp_path / "x.npy", sharding=layout)
    np.testing.assert_array_equal(found.numpy(), values)
    assert found.sharding == layout.of((5, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_safetensors(tmp_path: Path, layout: Any) -> None:
    values = torch.arange(15.0).reshape(5, 3)
    named = {"a": XP.asarray(values, sharding=layout), "b": XP.asarray(3, dtype="int16")}
    named["half"] = XP.asarray(values.to(torch.bfloat16), sharding=layout)
    XP.save(tmp_path / "x.safetensors", named)
    read = load_file(tmp_path / "x.safetensors")
    assert torch.equal(read["a"], values) and torch.equal(read["half"], values.bfloat16()) and read["b"].item() == 3
    save_file({"w": values, "none": torch.empty(0, 2)}, tmp_path / "y.safetensors")
    found = XP.load(tmp_path / "y.safetensors")
    assert torch.equal(found["w"].torch(), values)
    assert found["none"].shape == (0, 2)


def test_a_file_in_fortran_order_and_swapped_bytes(tmp_path: Path) -> None:
    values = np.asfortranarray(np.arange(15).reshape(5, 3)).astype(">i4")
    np.save(tmp_path / "x.npy", values)
    np.testing.assert_array_equal(XP.load(tmp_path / "x.npy").numpy(), values)


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.npy").write_bytes(b"none")
    (tmp_path / "bad.safetensors").write_bytes(b"none")
    x = XP.ones(3)
    for wrong, error, words in [
        (lambda: XP.load(tmp_path / "none.npy"), mw.DataError, "does not exist, or is not a file"),
        (lambda: XP.load(tmp_path / "bad.npy"), mw.DataError, "damaged"),
        (lambda: XP.load(tmp_path / "bad.safetensors"), mw.DataError, "damaged"),
        (lambda: XP.load(tmp_path / "x.csv"), mw.UsageError, r"must end in \.npy or \.safetensors"),
        (lambda: XP.save(tmp_path / "x.npy", {"a": x}), mw.UsageError, "pass one array for a .npy file"),
        (lambda: XP.save(tmp_path / "x.safetensors", {"a": 1}), mw.UsageError, "not an array"),
        (lambda: XP.save(tmp_path / "x.safetensors", {"a": x * 1j}), mw.UsageError, "cannot store torch.complex"),
    ]:
        with pytest.raises(error, match=words):
            wrong()

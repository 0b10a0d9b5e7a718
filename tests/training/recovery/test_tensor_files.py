"""Any box of a tensor is read from whatever pieces lie in the files, and other programs read the files too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from meshwise.records.checkpoints import StoredPiece, StoredTensor, hash_of, write_file
from meshwise.spec.errors import CheckpointError
from meshwise.training.recovery.tensor_files import Held, WriteItem, as_bytes, deal, held, laid_out, read, whole_box

Tensors = dict[str, torch.Tensor]


def written(
    folder: Path, ranks: list[dict[str, Any]], parts: list[list[WriteItem]], shapes: dict[str, Held]
) -> dict[str, StoredTensor]:
    """What the ranks of a deal write, whose values are those of `ranks`."""
    pieces: dict[str, list[StoredPiece]] = {name: [] for name in shapes}
    for rank, own in enumerate(parts):
        beginning, places, size = laid_out(own, shapes)
        buffer = torch.zeros(size - len(beginning), dtype=torch.uint8)
        for part, at in places.items():
            value = ranks[rank][part.name][tuple(slice(*bounds) for bounds in part.box)]
            begin = at - len(beginning)
            buffer[begin : begin + value.nbytes].view(value.dtype).view(value.shape).copy_(value)
            pieces[part.name].append(StoredPiece(f"rank{rank}.safetensors", at, part.box))
        file = write_file(folder / f"rank{rank}.safetensors", beginning, as_bytes(buffer))
        assert file.size == size == (folder / file.name).stat().st_size and file.hash == hash_of(folder / file.name)
    return {n: StoredTensor(h.dtype, h.shape, tuple(pieces[n])) for n, h in shapes.items()}


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint16,
]


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    values: Tensors = {}
    for shape in [(), (1,), (3, 5), (0, 4), (2, 1, 3)]:
        for dtype in DTYPES:
            values[f"{dtype}{shape}"] = torch.randn(shape, dtype=torch.float64).to(dtype)
    shapes = {name: held(value) for name, value in values.items()}
    stored = written(tmp_path, [values], deal([shapes]), shapes)
    for name, value in values.items():
        found = read(tmp_path, stored[name], whole_box(value.shape))
        assert found.dtype == value.dtype and found.shape == value.shape
        assert bytes(as_bytes(found)) == bytes(as_bytes(value))
    plain = load_file(tmp_path / "rank0.safetensors")
    assert plain["torch.bfloat16(3, 5)"].equal(values["torch.bfloat16(3, 5)"])


@given(st.data())
def test_any_box_is_read_from_any_pieces(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    value = torch.arange(float(torch.Size(shape).numel())).view(shape)
    dim, cut = data.draw(st.tuples(st.integers(0, len(shape) - 1), st.integers(0, 7)))
    cut = min(cut, shape[dim])
    full = tuple((0, length) for length in shape)
    boxes = [(*full[:dim], bounds, *full[dim + 1 :]) for bounds in ((0, cut), (cut, shape[dim]))]
    ranks = [{"t": Held("float32", tuple(shape), (box,))} for box in boxes]
    wanted = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    folder = tmp_path_factory.mktemp("files")
    stored = written(folder, [{"t": value}] * 2, deal(ranks), ranks[0])
    box = tuple((begin, end) for begin, end in wanted)
    assert read(folder, stored["t"], box).equal(value[tuple(slice(*bounds) for bounds in box)])


def test_a_file_that_was_cut_off_meanwhile_is_told(tmp_path: Path) -> None:
    value = {"t": torch.ones(100)}
    shapes = {"t": held(value["t"])}
    stored = written(tmp_path, [value], deal([shapes]), shapes)["t"]
    path = tmp_path / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors is too short"):
        read(tmp_path, stored, whole_box([100]))
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path, stored, whole_box([100]))

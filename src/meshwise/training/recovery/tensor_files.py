"""Divide a state among ranks for writing; write and read safetensors files.

Every element is written once, and the ranks' parts are about equal in bytes. A rank writes what no other rank holds. If
several ranks hold a tensor, the first of them writes it if it is small, as most buffers are. Otherwise, the rank with
the fewest bytes to write so far writes it.

A file is written from one buffer, and hashed. A box (a range of each dim) is read directly into the wanted tensor.
Files are not mapped into memory, because the pages of a mapped file count as memory of the process, and the process
dies if a mapped file is truncated.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwise.records.checkpoints import Box, StoredPiece, StoredTensor, cover, disjoint, volume
from meshwise.spec.dtypes import SAFETENSORS
from meshwise.spec.errors import CheckpointError
from meshwise.torch_compat.sharding import division, local_of
from meshwise.transfer.sharded import full_tensor, local_boxes

SMALL = 64 << 10  # a part of fewer bytes is written by the first rank that holds it, not by the least loaded one
ALIGNED = 64  # the header is padded to a multiple of this many bytes


@dataclass(frozen=True)
class Held:
    """The part of one tensor that a rank holds."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def size(self) -> int:
        """The size of the whole tensor, in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class WriteItem:
    """A part of the tensor `name` that a rank writes to a file. box: (begin, end) of its indices in each dim."""

    name: str
    box: Box


def itemsize(dtype: str) -> int:
    """Return the size of one element in bytes. dtype: the name of a torch dtype, such as `float32`."""
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def plainly_held(tensor: Tensor) -> Tensor:
    """Return `tensor`, or the whole tensor if local values cannot be saved, such as partial sums."""
    if isinstance(tensor, DTensor) and any(division(p) is None and not p.is_replicate() for p in tensor.placements):
        return full_tensor(tensor)
    return tensor


def held(tensor: Tensor) -> Held:
    """Return the part of `tensor` that this rank holds."""
    return Held(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(local_boxes(tensor)[0]))


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of all elements of a tensor."""
    return tuple((0, length) for length in shape)


def _lengths(box: Sequence[tuple[int, int]]) -> list[int]:
    return [end - begin for begin, end in box]


def views(tensor: Tensor) -> dict[Box, Tensor]:
    """Return the values of `tensor` that this rank holds, as a dict of views by box."""
    boxes, dim = local_boxes(tensor)
    local, at, found = local_of(tensor).detach(), 0, {}
    for box in boxes:
        length = box[dim][1] - box[dim][0] if box else 0
        found[box] = local.narrow(dim, at, length) if box else local
        at += length
    return found


def deal(ranks: Sequence[Mapping[str, Held]]) -> list[list[WriteItem]]:
    """Decide what each rank writes, given what each rank holds."""
    shapes: dict[str, Held] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank, every in enumerate(ranks):
        for name, each in every.items():
            known = shapes.setdefault(name, each)
            if (known.dtype, known.shape) != (each.dtype, each.shape):
                raise CheckpointError(
                    f"{name} cannot be saved: it has dtype {known.dtype} and shape {known.shape} on one rank, but "
                    f"{each.dtype} and {each.shape} on another. Build the same model and optimizer on every rank."
                )
            for box in each.boxes:
                if volume(box):
                    holders.setdefault(name, {}).setdefault(box, []).append(rank)
    loads, parts = [0] * len(ranks), list[list[WriteItem]]([] for _ in ranks)
    items: list[tuple[int, WriteItem, list[int]]] = []
    for name, each in shapes.items():
        chosen = disjoint(holders.get(name, {}))
        if not cover(chosen, each.shape):
            found = f"{sum(map(volume, chosen))} of its {math.prod(each.shape)} elements"
            raise CheckpointError(f"{name} cannot be saved: the ranks have {found}.")
        for box in chosen:
            size, able = volume(box) * itemsize(each.dtype), holders[name][box]
            items.append((size, WriteItem(name, box), able if size >= SMALL else able[:1]))
    for size, item, able in sorted(items, key=lambda each: (len(each[2]) > 1, -each[0])):
        rank = min(able, key=lambda rank: loads[rank])
        parts[rank].append(item)
        loads[rank] += size
    return parts


def laid_out(parts: Iterable[WriteItem], shapes: Mapping[str, Held]) -> tuple[bytes, dict[WriteItem, int], int]:
    """Return the header bytes of a file with these parts, the offset of each part in the file, and the file's size."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at, places = 0, {}
    for part in sorted(parts, key=lambda part: -itemsize(shapes[part.name].dtype)):
        held = shapes[part.name]
        size = volume(part.box) * itemsize(held.dtype)
        known = SAFETENSORS.get(held.dtype)  # any other dtype is written as bytes, and the manifest names it
        place = ",".join(f"{begin}:{end}" for begin, end in part.box)
        header[part.name if part.box == whole_box(held.shape) else f"{part.name}[{place}]"] = {
            "dtype": known or "U8",
            "shape": _lengths(part.box) if known else [size],
            "data_offsets": [at, at + size],
        }
        places[part] = at
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {part: len(begin) + place for part, place in places.items()}, len(begin) + at


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read(folder: Path, stored: StoredTensor, wanted: Sequence[tuple[int, int]]) -> Tensor:
    """Read a box of a tensor from the files of a checkpoint."""
    out = torch.empty(_lengths(wanted), dtype=getattr(torch, stored.dtype))
    for piece in stored.pieces:
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(piece.box, wanted, strict=True)]
        if all(begin < end for begin, end in both):
            inside = tuple(slice(b - o, e - o) for (b, e), (o, _) in zip(both, wanted, strict=True))
            _read_into(out[inside], folder, piece, [b - o for (b, _), (o, _) in zip(both, piece.box, strict=True)])
    return out


def _read_into(out: Tensor, folder: Path, piece: StoredPiece, begins: Sequence[int]) -> None:
    """Read a part of a piece into `out`. begins: the index at which the part begins in each dim of the piece."""
    strides = torch.empty(_lengths(piece.box), device="meta").stride()
    first, last = (sum(map(operator.mul, at, strides)) for at in (begins, [length - 1 for length in out.shape]))
    direct = last + 1 == out.numel() and out.is_contiguous()
    read = out if direct else torch.empty(last + 1, dtype=out.dtype)
    left, path = as_bytes(read), folder / piece.file
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(piece.at + first * out.element_size())
            while left:
                if not (count := file.readinto(left)):
                    raise CheckpointError(f"{path} is too short: the file changed while it was read.")
                left = left[count:]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from None
    if not direct:
        out.copy_(read.as_strided(out.shape, strides))

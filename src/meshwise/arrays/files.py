"""Load and save arrays part by part: `.npy` and safetensors.

No device or rank holds more than its own parts.

Over ranks, each rank reads or writes its own parts of one file, which must lie on storage that all ranks reach.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from meshwise.arrays.array import Array, numbered
from meshwise.arrays.creation import Placement, made
from meshwise.arrays.dtypes import numpy_dtype
from meshwise.arrays.moves import agreed
from meshwise.arrays.space import Space
from meshwise.spec.dtypes import SAFETENSORS
from meshwise.spec.errors import DataError, UsageError

KINDS = (".npy", ".safetensors")
_RAW = {torch.bfloat16: np.dtype(np.int16)}


def load(space: Space, path: Any, *, device: Any = None, sharding: Placement = None) -> Any:
    """Load the array of a `.npy` file, or a dict of the arrays of a safetensors file.

    Each device reads only its own part. Raises DataError if the file is missing or damaged.
    device, sharding: where the array, or each of the arrays, is placed.
    """
    file = _kind(path, "load")
    if not file.is_file():
        raise DataError(f"{file} does not exist, or is not a file. Pass the path of a .npy or .safetensors file.")
    if file.suffix == ".npy":
        return _load_npy(space, file, (device, sharding))
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: _of_slice(space, opened.get_slice(name), (device, sharding)) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DataError(f"{file} is not a safetensors file, or it is damaged ({error}).") from error


def _load_npy(space: Space, file: Path, placement: tuple[Any, Placement]) -> Array:
    try:
        values = np.load(file, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{file} is not a .npy file of numbers, or it is damaged ({error}).") from error
    values = values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))
    dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype

    def part(own: Any, where: Any, at: torch.device) -> torch.Tensor:
        return torch.from_numpy(np.array(values[where])).to(at).reshape(own)

    return made(space, values.shape, dtype, placement, part)


def _of_slice(space: Space, stored: Any, placement: tuple[Any, Placement]) -> Array:
    shape = tuple(stored.get_shape())
    kinds = {name: getattr(torch, dtype) for dtype, name in SAFETENSORS.items()}
    if stored.get_dtype() not in kinds:
        raise UsageError(f"the file has dtype {stored.get_dtype()}, which arrays do not support. Convert the file.")

    def part(own: Any, where: Any, at: torch.device) -> torch.Tensor:
        values: torch.Tensor = stored[where] if shape else stored[...]
        return values.clone().to(at).reshape(own)

    return made(space, shape, kinds[stored.get_dtype()], placement, part)


def save(path: Any, given: Any) -> None:
    """Write an array to a `.npy` file, or a dict of arrays to a safetensors file. Each device writes its own part.

    The data is written under a temporary name. The file is renamed to `path` after all data is written.
    """
    file = _kind(path, "save")
    named: Mapping[str, Array] = given if isinstance(given, Mapping) else {"": given}
    if isinstance(given, Mapping) != (file.suffix == ".safetensors"):
        raise UsageError(f"save {file.name}: pass one array for a .npy file, or a dict of arrays for .safetensors.")
    for name, x in named.items():
        if not isinstance(x, Array):
            raise UsageError(f"save {file.name}: {name or 'this'} is {type(x).__name__}, not an array. Use xp.asarray.")
    if not named:
        raise UsageError(f"save {file.name}: the dict is empty. Give at least one array.")
    space = next(iter(named.values())).space
    being = file.with_name(f".{file.name}.part")
    first = 0 in space.here
    header, begins = _npy_header(named[""]) if file.suffix == ".npy" else _safetensors_header(named)
    total = len(header) + sum(x.nbytes for x in named.values())
    if first:
        with being.open("wb") as opened:
            opened.write(header)
            opened.truncate(total)
    _wait(space)
    for x, begin in zip(named.values(), begins, strict=True):
        _write(being, len(header) + begin, x)
    _wait(space)
    if first:
        being.replace(file)
    _wait(space)


def _wait(space: Space) -> None:
    """Wait until every rank has called this. Does nothing if one process has all devices."""
    agreed(space, [0] * len(space.here), "save")


def _npy_header(x: Array) -> tuple[bytes, list[int]]:
    descr = np.lib.format.dtype_to_descr(numpy_dtype(x.dtype))
    text = repr({"descr": descr, "fortran_order": False, "shape": x.shape}).encode()
    size = -(-(10 + len(text) + 1) // 64) * 64 - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", size) + text.ljust(size - 1) + b"\n", [0]


def _safetensors_header(named: Mapping[str, Array]) -> tuple[bytes, list[int]]:
    table: dict[str, Any] = {}
    begins, at = [], 0
    for name, x in named.items():
        code = SAFETENSORS.get(str(x.dtype).removeprefix("torch."))
        if code is None:
            raise UsageError(f"save {name}: safetensors files cannot store {x.dtype}. Save the array to a .npy file.")
        size = x.nbytes
        table[name] = {"dtype": code, "shape": list(x.shape), "data_offsets": [at, at + size]}
        begins.append(at)
        at += size
    text = json.dumps(table).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text, begins


def _write(file: Path, begin: int, x: Array) -> None:
    """Write the local parts to the file, from byte `begin` on. For a replicated array, only the first device writes."""
    if not x.size:
        return
    kind = _RAW.get(x.dtype) or numpy_dtype(x.dtype)
    into = np.memmap(file, dtype=kind, mode="r+", offset=begin, shape=x.shape)
    for part, tensor in numbered(x):
        if part == 0 or x.sharding.dim is not None:
            values = tensor.cpu()
            into[x.sharding.interval(x.shape, part)] = (values.view(torch.int16) if x.dtype in _RAW else values).numpy()
    into.flush()


def _kind(path: Any, verb: str) -> Path:
    file = Path(path)
    if file.suffix not in KINDS:
        raise UsageError(f"{verb} {file.name}: the name must end in .npy or .safetensors.")
    return file


MAKERS = {"load": load}
FUNCTIONS = {"save": save}

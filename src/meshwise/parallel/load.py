"""Load weights of a safetensors checkpoint straight into a model.

Each rank reads only its part of each tensor.

A checkpoint is one file, or several files with the index that Hugging Face writes. A deferred model only records where
its values are stored, and reads them after the plan has divided the model. Tensors that the checkpoint lacks are
computed by replaying the constructor.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwise.parallel.op_record import record_of
from meshwise.parallel.op_replay import StorageView
from meshwise.spec.dtypes import SAFETENSORS
from meshwise.spec.errors import UsageError
from meshwise.spec.words import some
from meshwise.torch_compat.dispatch import is_fake
from meshwise.torch_compat.modules import persistent_tensors
from meshwise.torch_compat.sharding import with_local
from meshwise.transfer.sharded import local_part

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {code: getattr(torch, name) for name, code in SAFETENSORS.items()}


@dataclass(frozen=True)
class Loaded:
    """What `load_weights` has done. All fields list names of parameters and buffers.

    names: the loaded tensors.
    converted: the tensors that changed their dtype, such as `name: bfloat16 to float32`.
    kept: the tensors of the model that the checkpoint lacks.
    unused: the tensors of the checkpoint that the model lacks.
    """

    names: tuple[str, ...]
    converted: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Stored:
    """A tensor in a checkpoint file. dtype: None if the dtype of the stored tensor is not in `DTYPES`."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None

    def part(self, like: Tensor, device: torch.device | str) -> Tensor:
        """Read this rank's part of the stored tensor. The result is sharded like `like` and has the dtype of `like`."""
        with safe_open(self.file, "pt") as opened:  # closed at once, because mapped pages count as used memory
            stored = opened.get_slice(self.name) if like.dim() else None
            read = opened.get_tensor(self.name) if stored is None else local_part(like, stored.__getitem__)
            local = torch.empty(read.shape, dtype=like.dtype).copy_(read)
            del read
        return with_local(like, local.to(device))


def load_weights(model: nn.Module, path: str | Path, *, strict: bool = True) -> Loaded:
    """Read the parameters and buffers of `model` from a safetensors checkpoint, in place.

    path: a file, an index (`model.safetensors.index.json`), or a folder that contains one of them.
    strict: if False, tensors that the checkpoint lacks keep their start values, and tensors that the model lacks are
        ignored.

    The model may be plain, distributed, or deferred. A tied tensor may be stored under any of its names. Raises
    UsageError for names and shapes that do not fit, before any values are read.
    """
    stored, own = _stored(Path(path)), _tied(model)
    chosen: dict[int, tuple[str, Tensor, _Stored]] = {}
    for names, tensor in own:
        found = next((name for name in names if name in stored), None)
        if found is not None:
            chosen[id(tensor)] = found, tensor, stored[found]
    missing = [names[0] for names, tensor in own if id(tensor) not in chosen]
    foreign = sorted(stored.keys() - {name for names, _ in own for name in names})
    _check(Path(path), chosen.values(), missing if strict else [], foreign if strict else [])
    converted = []
    for name, tensor, there in chosen.values():
        if there.dtype != tensor.dtype:
            words = [str(dtype).removeprefix("torch.") for dtype in (there.dtype, tensor.dtype)]
            converted.append(f"{name}: {words[0]} to {words[1]}")
        _give(tensor, there)
    return Loaded(tuple(name for name, _, _ in chosen.values()), tuple(converted), tuple(missing), tuple(foreign))


@torch.no_grad()
def _give(tensor: Tensor, stored: _Stored) -> None:
    if is_fake(tensor):
        record = record_of(tensor)
        view: StorageView = record.known(tensor)
        if not view.whole:
            raise UsageError(f"mw.deferred cannot load {stored.name}, a view of a tensor. Build without mw.deferred.")
        record.loaded[view.storage] = functools.partial(_Stored.part, stored)
        record.loaded_after = len(record.operators)
        return
    part = stored.part(tensor, tensor.device)
    into = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    into.copy_(part.to_local() if isinstance(part, DTensor) else part)


def _tied(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return every parameter and persistent buffer, each together with all of its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, tensor in persistent_tensors(module).items():
            found.setdefault(id(tensor), ([], tensor))[0].append(f"{dot}{name}")
    return list(found.values())


def _stored(path: Path) -> dict[str, _Stored]:
    """Return the tensors of a checkpoint by name. Raise UsageError if the checkpoint cannot be read."""
    if path.is_dir():
        single = [path / SINGLE] if (path / SINGLE).exists() else sorted(path.glob("*.safetensors"))
        if not (path / INDEX).exists() and len(single) != 1:
            raise UsageError(f"{path} must have {INDEX} or exactly one .safetensors file. Give the path of a file.")
        path = path / INDEX if (path / INDEX).exists() else single[0]
    if not path.exists():
        raise UsageError(f"{path} does not exist. Give a .safetensors file, its index, or their folder.")
    found: dict[str, _Stored] = {}
    try:
        files = [path]
        if path.suffix == ".json":
            files = [path.parent / name for name in sorted(set(json.loads(path.read_text())["weight_map"].values()))]
        for file in files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    facts = opened.get_slice(name)
                    found[name] = _Stored(file, name, tuple(facts.get_shape()), DTYPES.get(facts.get_dtype()))
    except Exception as error:  # safetensors' error derives from Exception
        raise UsageError(f"{path} is not a safetensors checkpoint: {error}.") from None
    return found


def _check(path: Path, chosen: Iterable[tuple[str, Tensor, _Stored]], missing: list[str], foreign: list[str]) -> None:
    parts = []
    if missing:
        parts.append(f"it lacks {some(missing)}")
    if foreign:
        parts.append(f"it has {some(foreign)}, which the model lacks")
    hint = " Use strict=False to keep start values of missing tensors, and to ignore tensors that the model lacks."
    other = [(name, there.shape, tuple(t.shape)) for name, t, there in chosen if there.shape != tuple(t.shape)]
    if other:
        name, there, here = other[0]
        more = f" ({len(other) - 1} more differ)" if len(other) > 1 else ""
        parts.append(f"{name} has shape {there} in the checkpoint and {here} in the model{more}")
        hint = " Build the model with the sizes that the checkpoint was saved with."
    if parts:
        raise UsageError(f"{path} does not fit the model: {'; '.join(parts)}.{hint}")

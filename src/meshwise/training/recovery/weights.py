"""Write final weights as safetensors.

Plain PyTorch, or any other program, can load these files without meshwise.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save
from torch import Tensor, nn

from meshwise.records.claims import write_of
from meshwise.records.files import write_text, write_with
from meshwise.spec.errors import UsageError
from meshwise.spec.words import some
from meshwise.training.recovery.collect import collected, state_of
from meshwise.training.recovery.loading import Stored
from meshwise.training.recovery.tensor_files import NAMES, Held, WriteItem, as_bytes, held, laid_out
from meshwise.workers.environment import attempt

MOST = 5_000_000_000  # bytes of a file, as Hugging Face divides


@dataclass(frozen=True)
class Written:
    """The result of `export_weights`."""

    step: int
    files: tuple[str, ...]
    tensors: int
    size: int


def save_weights(model: nn.Module, path: Path, header: Mapping[str, str] | None = None) -> None:
    """Write the model's state_dict with whole tensors to `path`, on rank 0."""
    state = collected(state_of(model))
    if state is not None:
        tensors = {name: _written_as(tensor).contiguous().clone() for name, tensor in state.items()}
        content = save(tensors, metadata={"format": "pt", **(header or {})})
        write_of(path.parent, attempt(), path, lambda file: file.write(content))


def _written_as(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex64) if tensor.dtype == torch.complex128 else tensor


def export_weights(
    model: Mapping[str, Any], folder: Path, step: int, say: Callable[[str], None], most: int = MOST
) -> Written:
    """Write the tensors of a saved model into `folder`, in safetensors files of at most `most` bytes each."""
    other = [name for name, value in model.items() if not isinstance(value, Stored | Tensor)]
    if other:
        say(f"left out because they are not tensors: {some(other)}")
    tensors = {name: value for name, value in model.items() if name not in other}
    shapes = {name: value.held if isinstance(value, Stored) else held(value) for name, value in tensors.items()}
    if strange := sorted({each.dtype for each in shapes.values()} - NAMES.keys()):
        raise UsageError(f"safetensors cannot store {strange[0]} of this model. Use mw.checkpoint instead.")
    groups: list[list[str]] = [[]]
    for name, each in shapes.items():
        if groups[-1] and sum(shapes[other].size for other in groups[-1]) + each.size > most:
            groups.append([])
        groups[-1].append(name)
    several = len(groups) > 1
    number = f"{len(groups):05d}"
    files = [f"model{f'-{n:05d}-of-{number}' if several else ''}.safetensors" for n in range(1, len(groups) + 1)]
    for file, names in zip(files, groups, strict=True):
        write_with(folder / file, functools.partial(_write_tensors, {name: tensors[name] for name in names}, shapes))
    if several:
        places = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(each.size for each in shapes.values())}, "weight_map": places}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")
    return Written(step, tuple(files), len(shapes), sum(each.size for each in shapes.values()))


def _write_tensors(tensors: Mapping[str, Stored | Tensor], shapes: Mapping[str, Held], file: BinaryIO) -> None:
    beginning, places, _ = laid_out((WriteItem(name, *shapes[name].boxes) for name in tensors), shapes)
    file.write(beginning)
    for part in places:
        value = tensors[part.name]
        file.write(as_bytes((value.whole() if isinstance(value, Stored) else value).contiguous()))

"""Write the weights of a run's state, for any other program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from meshwise.records.checkpoints import CHECKPOINTS
from meshwise.records.files import write_with
from meshwise.spec.dtypes import SAFETENSORS
from meshwise.spec.errors import UsageError
from meshwise.spec.units import bytes_text, plural
from meshwise.spec.words import some
from meshwise.training.recovery.loading import Stored, load
from meshwise.training.recovery.tensor_files import Held, WriteItem, as_bytes, laid_out, whole_box

FOLDER = "weights"


def weights(folder: Path, out: Path | None, only: str | None, say: Callable[[str], None]) -> tuple[Path, str]:
    """Write the model's tensors from a run's newest complete checkpoint.

    Returns the folder, and a sentence that says what was written."""
    out = out or folder / FOLDER
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already. Remove it, or name another folder with --out.")
    found = load(folder / CHECKPOINTS, say=say, only=only)
    model = found.tree["model"]
    tensors = {name: value for name, value in model.items() if isinstance(value, Stored)}
    if other := model.keys() - tensors.keys():
        say(f"left out because they are not tensors: {some(sorted(other))}")
    shapes = {name: Held(each.tensor.dtype, each.shape, (whole_box(each.shape),)) for name, each in tensors.items()}
    if strange := sorted({each.dtype for each in shapes.values()} - SAFETENSORS.keys()):
        raise UsageError(f"safetensors cannot store {strange[0]} of this model. Use mw.checkpoint instead.")
    write_with(out / "model.safetensors", partial(_write, tensors, shapes))
    written = f"{plural(len(shapes), 'tensor')}, {bytes_text(sum(each.size for each in shapes.values()))}"
    return out, f"step {found.saved.step}: {written}: {out}"


def _write(tensors: Mapping[str, Stored], shapes: Mapping[str, Held], file: BinaryIO) -> None:
    """Write the tensors one after the other, as a host may not hold them all."""
    beginning, places, _ = laid_out((WriteItem(name, *shapes[name].boxes) for name in tensors), shapes)
    file.write(beginning)
    for part in places:
        file.write(as_bytes(tensors[part.name].whole()))

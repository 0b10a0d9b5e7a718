"""Checkpoints: a state is on the disk whole, with its SHA-256, or it is not there.

`checkpoint/latest.json` is written after the state it names, so a crash in between leaves the older one in force.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from meshwise.records.files import write_text, write_with
from meshwise.spec.errors import CheckpointError
from meshwise.transfer import collectives

KEPT = 2  # the newest, and one more in case the newest turns out to be unreadable


def save_checkpoint(folder: Path, saved: dict[str, Any]) -> Path:
    """Write a packed state into `folder`; older ones than the last two are removed."""
    path = folder / f"step-{saved['step']:08d}.pt"
    write_with(path, lambda file: torch.save(saved, file))
    facts = {"file": path.name, "sha256": _digest(path), **{key: saved[key] for key in ("step", "epoch", "index")}}
    write_text(folder / "latest.json", json.dumps(facts) + "\n")
    for old in sorted(folder.glob("step-*.pt"))[:-KEPT]:
        if old != path:
            old.unlink(missing_ok=True)
    return path


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """The newest packed state in `folder`, on every rank. Collective. Raises CheckpointError without a whole one.

    Rank 0 verifies the file. Where every rank sees it, each maps it into memory and reads what it needs; else rank 0
    sends it.
    """
    path, size = collectives.broadcast_object(_verified(folder) if collectives.get_rank() == 0 else None)
    sees = path.exists() and path.stat().st_size == size
    if all(collectives.gather_objects(sees)):
        return _read(path)
    return dict(collectives.broadcast_object(_read(path) if collectives.get_rank() == 0 else None))


def _verified(folder: Path) -> tuple[Path, int]:
    """The newest state's file and its size, once its digest was found right."""
    try:
        facts = json.loads((folder / "latest.json").read_text())
        path, expected = folder / facts["file"], facts["sha256"]
        digest = _digest(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: no checkpoint was saved there. Run with --save-every N, or start anew."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'latest.json'}: cannot be read ({error}).") from None
    if digest != expected:
        raise CheckpointError(
            f"{path}: is damaged (its SHA-256 is not the one that was saved). Older states lie beside it."
        )
    return path.resolve(), path.stat().st_size


def _read(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read ({str(error).partition(chr(10))[0]}).") from None
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path}: holds no state of a run.")
    return saved


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Write the weights of a run's state, for any other program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshwise.records.checkpoints import CHECKPOINTS
from meshwise.spec.errors import UsageError
from meshwise.training.recovery.loading import open_newest
from meshwise.training.recovery.weights import Written, export_weights

FOLDER = "weights"


def weights(folder: Path, out: Path | None, only: str | None, say: Callable[[str], None]) -> tuple[Path, Written]:
    """Write the model's weights from a run's newest complete checkpoint to a folder."""
    out = out or folder / FOLDER
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already. Remove it, or name another folder with --out.")
    found = open_newest(folder / CHECKPOINTS, say, only)
    return out, export_weights(found.tree["model"], out, found.saved.step, say)

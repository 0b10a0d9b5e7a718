"""Simulate a full disk and damaged files.

The faults are `disk-full`, `corrupt-checkpoint` and `cut-checkpoint`.

Tested in tests/injection/test_faults.py and tests/faults/test_disks_and_links.py.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from meshwise.records.checkpoints import MANIFEST, PART, checkpoints_in

PATIENCE = 10.0  # seconds for a checkpoint that is being written


class _FullFile(io.FileIO):
    """A file in which every write fails, as on a full disk."""

    refused: ClassVar[bool] = False

    def write(self, data: Any) -> int:
        _FullFile.refused = True
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.name))


class FullDisk:
    """Simulates a full disk for some folders, from the creation of this object until `end` is called.

    The object replaces Python's `open`, so that writes to files in `folders` fail. Files that were opened before can
    still be written, and empty files can be created.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = tuple(str(folder.resolve()) + os.sep for folder in folders)
        self._real, _FullFile.refused = io.open, False
        io.open = builtins.open = self._open

    @property
    def refused(self) -> bool:
        """Whether a write to one of the folders has failed since this object was created."""
        return _FullFile.refused

    def end(self) -> None:
        """Let writes succeed again."""
        io.open = builtins.open = self._real

    def _open(self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        inside = not isinstance(file, int) and str(Path(file).absolute()).startswith(self._folders)
        if not inside or not set(mode) & set("wax+"):
            return self._real(file, mode, buffering, *rest, **named)
        raw = _FullFile(file, mode.replace("t", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, "utf-8")


def newest_file(folder: Path | None, rank: int) -> Path | None:
    """Return this rank's file in the newest checkpoint of a folder, or the checkpoint's manifest if the rank has no
    file. Return None if there is no checkpoint.

    Waits up to PATIENCE seconds for a checkpoint that is being written.
    """
    until = time.monotonic() + PATIENCE
    while folder is not None and any(folder.glob(f"*{PART}")) and time.monotonic() < until:
        time.sleep(0.01)
    found = [] if folder is None else checkpoints_in(folder)[-1:]
    own = [path for saved in found for path in saved.path.glob(f"rank{rank}.*")]
    return next(iter([*own, *(saved.path / MANIFEST for saved in found)]), None)


def flip_bit(path: Path) -> None:
    """Flip one bit in the middle of the file."""
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 0x08]))


def cut(path: Path) -> None:
    """Remove the second half of the file."""
    os.truncate(path, path.stat().st_size // 2)

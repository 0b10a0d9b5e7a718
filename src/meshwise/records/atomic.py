"""Files that are whole or not there: written beside their place, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears at `path` when the with-body succeeds, and leaves nothing behind when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            beside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, whole or not at all."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_with(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write to `path` what `write(file)` writes, whole or not at all."""
    with atomic_file(path) as file:
        write(file)

"""Write files atomically: write beside the target, sync, then rename.

This module also handles JSON lines: one record per line, appended as the run goes on. A last line that a crash cut
short is left out when the file is read.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

Record = dict[str, Any]
_places: dict[Path, int] = {}
"""Folders that were passed to `stay_in`, and their inodes. `make_folder` never makes such a folder, even a lost one."""


def stay_in(folder: Path) -> None:
    """Forbid this module to create the folder `folder` from now on. If somebody removes or moves the folder, functions
    that write files into it raise OSError instead of making a new one."""
    _places[folder.absolute()] = folder.stat().st_ino if folder.exists() else 0


def is_lost(folder: Path) -> bool:
    """Return whether a folder that was passed to `stay_in` was removed, moved or replaced."""
    path = folder.absolute()
    try:
        return path in _places and path.stat().st_ino != _places[path]
    except FileNotFoundError:
        return True
    except OSError:  # for example, a network disk does not answer: the folder may still be there
        return False


def make_folder(folder: Path) -> None:
    """Make a folder if it is missing. Raises OSError if this fails, or if a folder on its path is lost (`is_lost`)."""
    places = [folder, *folder.parents]
    if lost := next(filter(is_lost, places), None):
        raise FileNotFoundError(errno.ENOENT, "the run folder was removed or moved", str(lost))
    # Make only folders below those that were passed to `stay_in`, which must not be made again.
    below = itertools.takewhile(lambda place: place.absolute() not in _places, places)
    for each in reversed([place for place in below if not place.exists()]):
        each.mkdir(exist_ok=True)


@contextlib.contextmanager
def atomic_file(path: Path, room: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a binary file that appears at `path` if the `with` block succeeds, and leaves nothing behind otherwise.

    room: a folder on the same disk in which the file is written first. Raises FileNotFoundError if this folder is gone
    at the end.
    """
    make_folder(path.parent)
    own = uuid.uuid4().hex[:12]  # containers on several machines have the same process ids
    beside = (room or path.parent) / f".{path.name}.{own}.part"
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # keep the first error
            beside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, completely or not at all."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_with(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write the file at `path` by calling `write(file)`, completely or not at all."""
    with atomic_file(path) as file:
        write(file)


def append_lines(path: Path, records: Iterable[Record], same: BinaryIO | None = None) -> bool:
    """Append each record as one line of JSON. Either all records are appended, or none.

    The file and its folder are created if they are missing.

    same: the file as it was opened before. If another file is at `path` now, nothing is written, and the result is
    False.
    """
    make_folder(path.parent)
    text = "".join(json.dumps(record) + "\n" for record in records)
    with path.open("ab+", buffering=0) as file:
        if same is not None and not os.path.sameopenfile(file.fileno(), same.fileno()):
            return False
        before = file.tell()
        if before > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # the last line was cut off: begin a new one
                text = "\n" + text
        left = memoryview(text.encode())
        try:
            while len(left):
                left = left[file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):  # remove what was written, so that the caller can retry
                file.truncate(before)
            raise
    return True


def read_json(path: Path) -> Record:
    """Return the record in a JSON file. Returns {} if there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if isinstance(found := json.loads(path.read_text(encoding="utf-8")), dict):
            return found
    return {}


def read_lines(path: Path) -> list[Record]:
    """Return all complete records of the file. Returns [] if there is no such file."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


def kept_lines(path: Path, wanted: Callable[[Record], bool]) -> bytes:
    """Return the contents of the file, without the records for which `wanted` returns False."""
    return "".join(json.dumps(record) + "\n" for record in read_lines(path) if wanted(record)).encode()

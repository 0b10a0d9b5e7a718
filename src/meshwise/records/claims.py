"""Find which attempt of a run counts: the newest that was claimed.

attempts/2.json        the claim of attempt 2: made once, by the machine whose launcher begins it, before anything else
attempts/2.run.json    the run's record since then; run.json is a copy for people and other programs
attempts/2/            the room of attempt 2, a directory where it prepares files, and moves files that it removes

If a network is cut, both halves may want to continue, but the file system lets only one of them create the claim. A
machine that was cut off and comes back writes as an earlier attempt, so what it writes is not read.

A process may pause at any point, also between reading the claims and acting on them. Therefore a claim removes the
rooms of earlier attempts. A file that an earlier attempt prepared in its room cannot be renamed to its final place any
more, and the earlier attempt cannot remove files by moving them into its room.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from meshwise.records.files import atomic_file, make_folder, read_json

CLAIMS = "attempts"
_CLAIM, _RECORD = re.compile(r"(\d{1,9})\.json"), re.compile(r"(\d{1,9})\.run\.json")


def claim(folder: Path, number: int, facts: Mapping[str, Any]) -> bool:
    """Claim attempt `number` of the run in `folder`.

    Returns False if this attempt or a later one is already claimed.
    """
    claims = folder / CLAIMS
    if newest(folder) >= number:
        return False
    make_folder(claims / str(number))
    try:
        with (claims / f"{number}.json").open("x", encoding="utf-8") as file:
            json.dump(dict(facts), file)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    for room in [path for path in claims.iterdir() if path.name.isdecimal() and int(path.name) < number]:
        with contextlib.suppress(OSError):
            gone = room.rename(room.with_name(f"{room.name}.over"))
            shutil.rmtree(gone, ignore_errors=True)
    return True


def room_of(folder: Path, number: int) -> Path | None:
    """Return the directory in which attempt `number` of a run prepares files, and to which it moves files that it
    removes. It is called the room of the attempt.

    Returns None if the attempt has no room: none was claimed, or a later claim has removed it.
    """
    room = folder / CLAIMS / str(number)
    return room if room.is_dir() else None


def write_of(folder: Path, number: int, path: Path, write: Callable[[BinaryIO], object]) -> bool:
    """Write `path` atomically by calling `write(file)`, as attempt `number` of the run in `folder`.

    Returns False, and changes nothing, if a later attempt is claimed.
    """
    room = room_of(folder, number)
    if room is None and is_over(folder, number):
        return False
    try:
        with atomic_file(path, room) as file:
            write(file)
    except FileNotFoundError:
        if not is_over(folder, number):
            raise
        return False
    return True


def newest(folder: Path) -> int:
    """Return the number of the newest attempt that a machine has claimed, or 0 if none is claimed."""
    return max(_numbers(folder, _CLAIM), default=0)


def is_over(folder: Path, number: int) -> bool:
    """Return whether attempt `number` no longer counts, because a machine has claimed a later one."""
    return newest(folder) > number


def record_path(folder: Path, number: int) -> Path:
    """Return the path of the record that attempt `number` of a run writes."""
    return folder / CLAIMS / f"{number}.run.json"


def newest_record(folder: Path, until: int | None = None) -> Path | None:
    """Return the path of the newest attempt's record, or None if no attempt has one."""
    numbers = [number for number in _numbers(folder, _RECORD) if until is None or number <= until]
    return record_path(folder, max(numbers)) if numbers else None


def claims_of(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Return the contents of all claims of a run, by the number of the attempt. The contents are {} for a file that
    cannot be read."""
    return {number: read_json(folder / CLAIMS / f"{number}.json") for number in sorted(_numbers(folder, _CLAIM))}


def _numbers(folder: Path, named: re.Pattern[str]) -> list[int]:
    try:
        files = [path.name for path in (folder / CLAIMS).iterdir()]
    except OSError:
        return []
    return [int(found[1]) for found in map(named.fullmatch, files) if found]

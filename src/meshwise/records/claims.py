"""Find which attempt of a run counts: the newest that was claimed.

attempts/2.json        claims attempt 2: made once, by the machine whose launcher begins it, before anything else
attempts/2.run.json    the run's record since then; run.json is the same, for people and other programs
attempts/2/            where attempt 2 prepares what is to get a name in the folder, and puts what it removes

Two halves of a network that was cut may both want to go on: the file system lets one of them make the claim. What a
machine writes that was cut off and comes back later is of an earlier attempt: it is not read. A process may stand still
at any point, also between a look at the claims and what it does then. So a claim takes the rooms of earlier attempts
away: a file that was prepared there gets no name any more, and nothing can be removed into it.
Tested in tests/records/test_claims.py and by bench/frozen_ranks.py.
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

from meshwise.records.files import atomic_file, make_folder

CLAIMS = "attempts"
_CLAIM, _RECORD = re.compile(r"(\d{1,9})\.json"), re.compile(r"(\d{1,9})\.run\.json")


def claim(folder: Path, number: int, facts: Mapping[str, Any]) -> bool:
    """Claim attempt `number` of the run in `folder`. False if it, or a later one, is claimed already."""
    claims = folder / CLAIMS
    if newest(folder) >= number:
        return False
    make_folder(claims / str(number))
    try:
        file = os.open(claims / f"{number}.json", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(file, "w", encoding="utf-8") as opened:
        json.dump(dict(facts), opened)
        opened.flush()
        os.fsync(opened.fileno())
    for room in [path for path in claims.iterdir() if path.name.isdecimal() and int(path.name) < number]:
        with contextlib.suppress(OSError):
            gone = room.rename(room.with_name(f"{room.name}.over"))
            shutil.rmtree(gone, ignore_errors=True)
    return True


def room_of(folder: Path, number: int) -> Path | None:
    """Return where attempt `number` of the run prepares files; None without claims, and once a later one is claimed."""
    room = folder / CLAIMS / str(number)
    return room if room.is_dir() else None


def write_of(folder: Path, number: int, path: Path, write: Callable[[BinaryIO], object]) -> bool:
    """Write `write(file)` to `path`, whole, as attempt `number` of the run in `folder`. Returns False, without any
    change, once a later attempt is claimed."""
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
    """Return the number of the newest claimed attempt; 0 in the folder of a run without claims."""
    return max(_numbers(folder, _CLAIM), default=0)


def is_over(folder: Path, number: int) -> bool:
    """Check whether a later attempt than this one has begun elsewhere."""
    return newest(folder) > number


def record_path(folder: Path, number: int) -> Path:
    """Return the path of a run's record since attempt `number`."""
    return folder / CLAIMS / f"{number}.run.json"


def newest_record(folder: Path, until: int | None = None) -> Path | None:
    """Return the record of the newest attempt that has one, up to `until`; None in the folder of a run without
    claims."""
    numbers = [number for number in _numbers(folder, _RECORD) if until is None or number <= until]
    return record_path(folder, max(numbers)) if numbers else None


def claims_of(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Return the contents of each claim, by its number."""
    found: dict[int, Mapping[str, Any]] = {}
    for number in sorted(_numbers(folder, _CLAIM)):
        facts: Any = None
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads((folder / CLAIMS / f"{number}.json").read_text(encoding="utf-8"))
        found[number] = facts if isinstance(facts, dict) else {}
    return found


def _numbers(folder: Path, named: re.Pattern[str]) -> list[int]:
    try:
        files = [path.name for path in (folder / CLAIMS).iterdir()]
    except OSError:
        return []
    return [int(found[1]) for found in map(named.fullmatch, files) if found]

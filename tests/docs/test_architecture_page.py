"""docs/architecture.md: the files that it names are there, and its rooms are those of the floors."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_floors import FLOORS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_that_is_named_is_there() -> None:
    named = set(re.findall(r"`([a-z_]+/(?:[a-z_]+/)*(?:[a-z_]+\.(?:py|toml))?)`", PAGE))
    places = (ROOT / "src" / "meshwise", ROOT)
    assert len(named) > 80
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


def test_every_room_stands_on_its_floor() -> None:
    told = {room: int(floor) for floor, room in re.findall(r"^\| (\d+) \| `([a-z]+)(?:/|\.py)` \|", PAGE, re.MULTILINE)}
    assert told == {room: floor for room, floor in FLOORS.items() if not room.startswith("__")}

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


def test_the_page_begins_with_the_lines_of_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    first = page[page.index("## One step") : page.index("## Rooms")]
    blocks = re.findall(r"\(\.\./(src/meshwise/[a-z_/]+\.py)\)\):\n\n```python\n(.*?)```", first, flags=re.S)
    assert len(blocks) == 4
    for file, block in blocks:
        lines = [line.strip() for line in block.strip().splitlines()]
        code = [line.strip() for line in (ROOT / file).read_text().splitlines()]
        assert any(code[at : at + len(lines)] == lines for at in range(len(code))), f"{file} has other lines"

"""docs/architecture.md: the files that it names are there, its houses and rooms are those of the floors."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_floors import HOUSES, ROOMS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_that_is_named_is_there() -> None:
    named = set(re.findall(r"`([a-z_]+/(?:[a-z_]+/)*(?:[a-z_]+\.(?:py|toml))?)`", PAGE))
    places = (ROOT / "src" / "meshwise", ROOT)
    assert len(named) > 80
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []


def test_the_houses_and_the_rooms_of_training_stand_in_their_order() -> None:
    told = re.findall(r"^\| `([a-z_/]+)/` \|", PAGE, re.MULTILINE)
    rooms = [room for floor in ROOMS["training"] for room in floor.split() if room.count("/")]
    assert told == [*HOUSES, *(room for room in rooms if room != "training/commands")]


def test_the_page_begins_with_the_lines_of_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    first = page[page.index("## One step") : page.index("## Houses")]
    blocks = re.findall(r"\(\.\./(src/meshwise/[a-z_/]+\.py)\)\):\n\n```python\n(.*?)```", first, flags=re.S)
    assert len(blocks) == 4
    for file, block in blocks:
        lines = [line.strip() for line in block.strip().splitlines()]
        code = [line.strip() for line in (ROOT / file).read_text().splitlines()]
        assert any(code[at : at + len(lines)] == lines for at in range(len(code))), f"{file} has other lines"

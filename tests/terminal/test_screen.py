"""Lines that are made when they are printed: they fit the console, keep numbers by their units, and leave room."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from meshwise.terminal.screen import Drawn, Screen, spaced


def screen(width: int) -> Screen:
    return Screen(Console(file=io.StringIO(), width=width), width)


@pytest.mark.parametrize("width", range(12, 40))
def test_a_number_is_never_separated_from_its_unit(width: int) -> None:
    lines = screen(width).wrap(Text("it took 1,234 ms of 12 s, and 18 % of 61.2 GiB went there"))
    assert all(len(line.plain) <= width for line in lines)
    for unit in ("1,234 ms", "12 s", "18 %", "61.2 GiB"):
        assert any(unit in line.plain for line in lines), unit


def test_the_second_and_later_lines_can_be_indented() -> None:
    lines = screen(16).wrap(Text("note      one two three four"), indent=10)
    assert [line.plain for line in lines] == ["note      one", " " * 10 + "two", " " * 10 + "three", " " * 10 + "four"]


def test_lines_are_made_for_the_console_on_which_they_are_printed() -> None:
    drawn = Drawn(lambda screen: [Text(f"µ {screen.width}" + "x" * 100)])
    for width, encoding, start in ((30, "utf-8", "µ 30"), (20, "ascii", "u 20")):
        raw = io.BytesIO()
        file = io.TextIOWrapper(raw, encoding)
        Console(file=file, width=width).print(drawn)
        file.flush()
        text = raw.getvalue().decode(encoding)
        assert text.startswith(start) and len(text) == width + 1


@pytest.mark.parametrize(("height", "empty"), [(None, 2), (9, 2), (5, 2), (4, 1), (3, 0), (1, 0)])
def test_parts_are_apart_as_long_as_there_is_room(height: int | None, empty: int) -> None:
    lines = spaced([[Text("a")], [], [Text("b")], [Text("c")]], height)
    assert [line.plain for line in lines if line.plain] == ["a", "b", "c"]
    assert sum(not line.plain for line in lines) == empty

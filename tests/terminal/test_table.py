"""Tables of a terminal: columns line up, rows become blocks where columns do not fit, and nothing is markup."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from meshwise.terminal.table import table_lines, width_of

TITLES = ["device", "steps", "a step"]
ROWS = [["rank 0", "30", "33 ms"], ["rank 10", "1,234", Text("4.5 ms", "red")]]


def plain(*arguments: object, **options: object) -> list[str]:
    return [line.plain for line in table_lines(*arguments, **options)]  # type: ignore[arg-type]


def test_the_first_column_is_to_the_left_and_numbers_to_the_right() -> None:
    assert plain(TITLES, ROWS) == [
        "device   steps  a step",
        "rank 0      30   33 ms",
        "rank 10  1,234  4.5 ms",
    ]


def test_other_columns_can_be_to_the_left() -> None:
    assert plain(TITLES, ROWS, left=(0, 2)) == [
        "device   steps  a step",
        "rank 0      30  33 ms",
        "rank 10  1,234  4.5 ms",
    ]


@pytest.mark.parametrize("width", [21, 14, 1])
def test_rows_become_blocks_where_the_table_is_too_wide(width: int) -> None:
    assert plain(TITLES, ROWS, 22) == plain(TITLES, ROWS)
    assert plain(TITLES, ROWS, width) == [
        "device  rank 0",
        "steps   30",
        "a step  33 ms",
        "",
        "device  rank 10",
        "steps   1,234",
        "a step  4.5 ms",
    ]


def test_a_block_leaves_out_what_is_empty_and_keeps_styles() -> None:
    lines = table_lines(["a", "b"], [["long enough", ""], ["x", Text("y", "red")]], 3)
    assert [line.plain for line in lines] == ["a  long enough", "", "a  x", "b  y"]
    assert {str(span.style) for span in lines[-1].spans} == {"dim", "red"}


def test_a_long_cell_of_a_block_goes_on_below_and_loses_nothing() -> None:
    assert plain(["run", "plan"], [["a", "data=4, accumulate=2, precision='bf16'"]], 34) == [
        "run   a",
        "plan  data=4, accumulate=2,",
        "      precision='bf16'",
    ]
    name = "x" * 70
    assert "".join(line[6:] for line in plain(["run", "plan"], [["a", name]], 40)[1:]) == name


def test_titles_are_dim_and_cells_keep_their_style() -> None:
    title, _, row = table_lines(TITLES, ROWS)
    assert {str(span.style) for span in title.spans} == {"dim"}
    assert [row.plain[span.start : span.end].strip() for span in row.spans if "red" in str(span.style)] == ["4.5 ms"]


def test_markup_is_shown_as_it_is() -> None:
    assert plain(["[b]x[/b]"], [["[red]y"], [":smile:"]]) == ["[b]x[/b]", "[red]y", ":smile:"]


CELLS = st.text(st.characters(exclude_categories=("C", "Z", "M")), max_size=12)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=6), st.integers(1, 60))
def test_no_cell_is_cut_or_left_out_whatever_the_width(rows: list[tuple[str, str, str]], width: int) -> None:
    lines = table_lines(["a", "b", "c"], rows, width)
    assert width_of(lines) <= max(width, *(cell_len(cell) + 3 for row in rows for cell in row))
    words = [word for line in lines for word in line.plain.split()]
    assert [word for word in words if word not in "abc"] == [
        cell for row in rows for cell in row if cell and cell not in "abc"
    ]

"""Tables of a terminal: columns line up, whole ones are left out where they do not fit, and nothing is markup."""

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


def test_other_columns_can_be_to_the_left_and_the_gap_narrower() -> None:
    assert plain(TITLES, ROWS, left=(0, 2), gap=1) == [
        "device  steps a step",
        "rank 0     30 33 ms",
        "rank 10 1,234 4.5 ms",
    ]


@pytest.mark.parametrize(("width", "columns"), [(22, 3), (21, 2), (14, 2), (13, 1), (1, 1)])
def test_the_last_columns_are_left_out_where_they_do_not_fit(width: int, columns: int) -> None:
    lines = plain(TITLES, ROWS, width)
    assert lines == plain(TITLES[:columns], [row[:columns] for row in ROWS])


def test_titles_are_dim_and_cells_keep_their_style() -> None:
    title, _, row = table_lines(TITLES, ROWS)
    assert {str(span.style) for span in title.spans} == {"dim"}
    assert [row.plain[span.start : span.end].strip() for span in row.spans if "red" in str(span.style)] == ["4.5 ms"]


def test_markup_is_shown_as_it_is() -> None:
    assert plain(["[b]x[/b]"], [["[red]y"], [":smile:"]]) == ["[b]x[/b]", "[red]y", ":smile:"]


CELLS = st.text(st.characters(exclude_categories=("C", "Z", "M")), max_size=12)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=6), st.integers(1, 60))
def test_no_cell_is_cut_and_lines_are_as_wide_as_asked_for_but_for_one_column(
    rows: list[tuple[str, str, str]], width: int
) -> None:
    lines = table_lines(["a", "b", "c"], rows, width)
    assert len(lines) == len(rows) + 1
    first = max(cell_len(row[0]) for row in rows)
    assert width_of(lines) <= max(width, first, 1)
    for row, line in zip(rows, lines[1:], strict=True):
        words = line.plain.split()
        assert words == [cell for cell in row if cell][: len(words)]

"""Texts of others in our sentences: no control characters, a screenful at most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshwise.spec.words import MOST_CHARACTERS, MOST_LINES, error_text, readable, some, without_control


def test_a_short_text_stays_as_it_is() -> None:
    assert readable("expected 3 columns,\n\tgot 4 · größer") == "expected 3 columns,\n\tgot 4 · größer"


def test_colours_cursor_moves_titles_and_bells_are_removed() -> None:
    assert without_control("\x1b[31mred\x1b[0m \x1b]0;title\x07\a\b\r\x1b[2Jtext\x9b") == "red text"


def test_a_long_text_is_cut_and_says_how_much_is_left() -> None:
    lines = readable("\n".join(f"line {n}" for n in range(1000))).splitlines()
    assert len(lines) == MOST_LINES and lines[0] == "line 0" and lines[-1].endswith("more characters)")
    shown = readable("x" * 10_000)
    assert shown == "x" * MOST_CHARACTERS + " … (8,000 more characters)"


@given(st.text())
def test_whatever_the_text_it_is_printable_and_no_longer_than_a_screen(text: str) -> None:
    shown = readable(text)
    assert not [c for c in shown if ord(c) < 32 and c not in "\n\t"]
    assert len(shown) <= MOST_CHARACTERS + 40 and shown.count("\n") <= MOST_LINES


def test_an_error_that_cannot_say_what_it_is() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert error_text(Odd()) == "Odd: (its text cannot be made)"
    assert error_text(ValueError("\x1b[1mno")) == "ValueError: no"


def test_some_of_several_names() -> None:
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"

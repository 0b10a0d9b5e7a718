"""Quantities with units: what is written is read back, and every slip is answered with what to write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.hardware.quantity import EXAMPLES, UNITS, read_quantity, write_quantity
from meshwise.spec.errors import UsageError

kinds = st.sampled_from(sorted(UNITS))


@given(st.floats(1e-15, 1e25), kinds)
def test_reading_gives_exactly_what_was_written(value: float, kind: str) -> None:
    assert read_quantity(write_quantity(value, kind), kind, "here") == value


@given(st.integers(1, 2**53))
def test_whole_bytes_stay_whole(count: int) -> None:
    assert read_quantity(write_quantity(count, "bytes"), "bytes", "here") == count


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (80e9, "bytes", "80 GB"),
        (80 * 2**30, "bytes", "80 GiB"),
        (1536, "bytes", "1.5 KiB"),
        (3.35e12, "bytes/s", "3.35 TB/s"),
        (450e9, "bytes/s", "450 GB/s"),
        (989.5e12, "FLOP/s", "989.5 TFLOP/s"),
        (2.25e15, "FLOP/s", "2250 TFLOP/s"),
        (4e-6, "seconds", "4 µs"),
        (5e-10, "seconds", "0.5 ns"),
        (0.0, "seconds", "0 ns"),
    ],
)
def test_it_is_written_as_people_write_it(value: float, kind: str, text: str) -> None:
    assert write_quantity(value, kind) == text
    assert read_quantity(text, kind, "here") == value


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("200 Gbit/s", "bytes/s", 25e9),
        ("200Gbit/s", "bytes/s", 25e9),
        ("  1.5e3 kB ", "bytes", 1.5e6),
        ("4 us", "seconds", 4e-6),
        ("16_000 MiB", "bytes", 16_000 * 2**20),
        ("1 PFLOP/s", "FLOP/s", 1e15),
        ("0 s", "seconds", 0.0),
    ],
)
def test_other_spellings_are_read(text: str, kind: str, value: float) -> None:
    assert read_quantity(text, kind, "here") == value


@pytest.mark.parametrize("kind", sorted(UNITS))
def test_the_examples_and_every_unit_can_be_read(kind: str) -> None:
    assert read_quantity(EXAMPLES[kind], kind, "here") > 0
    for unit, factor in UNITS[kind].items():
        assert read_quantity(f"3 {unit}", kind, "here") == float(3 * factor)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (80, "bytes", "not a number with a unit"),
        (None, "bytes", "not a number with a unit"),
        ("80", "bytes", "not a number with a unit"),
        ("GB", "bytes", "not a number with a unit"),
        ("-80 GB", "bytes", "not a number with a unit"),
        ("80 GB GB", "bytes", "not a number with a unit"),
        ("80 Gb", "bytes", "not a unit of bytes. Did you mean 'GB'?"),
        ("80 GB", "bytes/s", "a unit of bytes, but bytes/s are needed"),
        ("80 GB/s", "bytes", "a unit of bytes/s, but bytes are needed"),
        ("4 ms", "FLOP/s", "a unit of seconds"),
        ("0 GB", "bytes", "above zero and finite"),
        ("0 GB/s", "bytes/s", "above zero and finite"),
        ("1e400 GB", "bytes", "above zero and finite"),
        ("1e999999999999999999999 GB", "bytes", "above zero and finite"),
        ("1e-999 s", "seconds", "above zero and finite"),
        ("inf GB", "bytes", "not a number with a unit"),
        ("9" * 5000 + " furlongs", "bytes", "not a unit of bytes"),
    ],
)
def test_a_slip_is_answered_with_what_to_write(text: object, kind: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_quantity(text, kind, "m.toml: memory")
    said = str(caught.value)
    assert said.startswith("m.toml: memory = ") and message in said and EXAMPLES[kind] in said
    assert len(said) < 300


@given(st.text() | st.integers() | st.floats() | st.none() | st.lists(st.integers()), kinds)
def test_nothing_gives_anything_but_a_number_or_a_sentence(text: object, kind: str) -> None:
    try:
        assert 0 <= read_quantity(text, kind, "here") < float("inf")
    except UsageError as error:
        assert EXAMPLES[kind] in str(error)

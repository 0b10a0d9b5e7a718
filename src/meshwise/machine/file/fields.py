"""Define how keys of a machine file are read, checked and written.

Each key is a row.

A key of a table is the field of the dataclass that the table describes, so that a new field is a new row. An error
names the file, the table and the key, and says what to write instead. Nothing but UsageError leaves here.

Tested in tests/machine/test_machine_file.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from meshwise.spec.errors import UsageError, nearest
from meshwise.spec.machine import MOST_DEVICES
from meshwise.spec.quantity import read_quantity, value_text, write_quantity

UNKNOWN = "unknown"
"""The user writes this word in place of a figure to mark it as unknown, even if the catalog has a value."""
LARGEST = 2**53
"""The largest integer to accept. No machine has larger counts or sizes, and a float would round them."""
SHORTEST, LONGEST = 1e-12, 1e9  # seconds of one transfer; what is outside is a slip of the unit
Table = Mapping[str, Any]


@dataclass(frozen=True)
class Field:
    """How the value of a key is read and written.

    read: `read(value, place)` converts a value of the file. `place` says where the value is, for errors.
    write: `write(value)` converts it back.
    """

    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any] = lambda value: value


Fields = Mapping[str, Field]
"""The keys that a table may have, and how the value of each is read and written."""


def read_table(
    table: Table, known: Fields, where: str, also: Iterable[str] = (), required: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Read and convert the values of a table. Raises UsageError for unknown and for missing keys.

    also: further keys that are allowed, which the caller reads.
    required: keys that must be in the table, with an example of the value of each.
    """
    names = [*also, *known]
    for key in table:
        if key not in names:
            near = nearest(key[:60], names)
            raise UsageError(f"{where}: unknown key '{key[:60]}'.{near} Use one of {', '.join(names)}.")
    for key, example in (required or {}).items():
        if table.get(key) in (None, "", []):
            raise UsageError(f"{where}: {key} is missing. Write {key} = {example}.")
    return {key: field.read(table[key], f"{where}: {key}") for key, field in known.items() if key in table}


def write_table(thing: Any, known: Fields) -> dict[str, Any]:
    """Convert the fields of a dataclass to a table of the file. Fields that are empty or have their default value are
    left out."""
    default = {field.name: field.default for field in fields(thing)}
    values = {name: getattr(thing, name) for name in known}
    return {name: known[name].write(v) for name, v in values.items() if v not in (default[name], (), {})}


# ---- Kinds of values -------------------------------------------------------------------------------------------------


def wrong(value: object, where: str, must: str) -> UsageError:
    """Return the error to raise for an invalid value."""
    return UsageError(f"{where} = {value_text(value)} must be {must}.")


def of_type(kind: type, must: str) -> Field:
    """Return a field that accepts only values of this type, and reads them unchanged.

    must: what the value must be, for the error message, such as "a number".
    """

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, kind):
            raise wrong(value, where, must)
        return value

    return Field(read)


TEXT = of_type(str, "a text, in quotes")
FLAG = of_type(bool, "true or false, without quotes")
TABLE = of_type(dict, "a table: keys and values below its name in brackets")


def number(least: float, most: float) -> Field:
    """Return a field that accepts a number from `least` to `most`."""

    def read(value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(value, where, "a number without quotes")
        if not least <= value <= most:
            raise wrong(value, where, f"from {least:g} to {most:g}")
        return float(value)

    return Field(read)


def whole(least: int, most: int = LARGEST) -> Field:
    """Return a field that accepts an integer from `least` to `most`."""

    def read(value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(value, where, f"a whole number without quotes, such as {least}")
        if not least <= value <= most:
            raise wrong(value, where, f"from {least} to {most:,}")
        return value

    return Field(read)


def quantity(kind: str) -> Field:
    """Return a field that accepts a number with its unit, such as "80 GB", and converts it to the base unit of
    `kind`."""
    return Field(lambda value, where: read_quantity(value, kind, where), lambda value: write_quantity(value, kind))


def or_unknown(field: Field) -> Field:
    """Return a field that accepts what `field` accepts, and also "unknown", which is read as None."""
    return Field(
        lambda value, where: None if value == UNKNOWN else field.read(value, where),
        lambda value: UNKNOWN if value is None else field.write(value),
    )


def one_of(*known: str) -> Field:
    """Return a field that accepts one of these words, or an empty string."""

    def read(value: Any, where: str) -> str:
        if TEXT.read(value, where) not in ("", *known):
            near = nearest(value, known)
            raise UsageError(f"{where} = '{value[:60]}' is unknown.{near} Use one of {', '.join(known)}.")
        return str(value)

    return Field(read)


def list_of(field: Field, what: str) -> Field:
    """Return a field that accepts a list of values, each of which `field` reads.

    what: what the values are, for errors.
    """

    def read(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise wrong(value, where, f"a list of {what}")
        return tuple(field.read(item, f"{where}[{at}]") for at, item in enumerate(value, 1))

    return Field(read, lambda values: [field.write(value) for value in values])


def table_of(field: Field) -> Field:
    """Return a field that accepts a table with any keys. `field` reads the values. An example is a table of shares by
    dtype."""

    def read(value: Any, where: str) -> dict[str, Any]:
        return {name: field.read(item, f"{where}.{name[:60]}") for name, item in TABLE.read(value, where).items()}

    return Field(read, lambda table: {name: field.write(value) for name, value in table.items()})


def record(make: Callable[[dict[str, Any], str], Any], known: Fields, required: Mapping[str, str]) -> Field:
    """Return a field that accepts a table with the keys `known`, and converts it to an object.

    make: `make(values, place)` returns the object for the values of the table.
    """
    return Field(
        lambda value, where: make(read_table(TABLE.read(value, where), known, where, required=required), where),
        lambda thing: write_table(thing, known),
    )


def one_or_each(field: Field) -> Field:
    """Return a field that accepts one value for all devices of a table, or a list with one value for each device."""

    def read(value: Any, where: str) -> Any:
        return [field.read(item, where) for item in value] if isinstance(value, list) else field.read(value, where)

    return Field(read, field.write)


def _tables(value: Any, where: str) -> list[Table]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise wrong(value, where, "a list of tables. Write its name in double brackets above the keys of each")
    return value


def _bytes(value: Any, where: str) -> int:
    size = read_quantity(value, "bytes", where)
    if size != int(size) or size > LARGEST:
        raise wrong(value, where, 'a whole number of bytes. Write it as "80 GB"')
    return int(size)


def _limit(value: Any, where: str) -> float:
    """Read a limit, which is a count, a number of bytes with its unit, or `inf` for no limit."""
    if isinstance(value, str):
        return read_quantity(value, "bytes", where)
    if isinstance(value, float) and math.isinf(value):
        return value
    return float(number(-LARGEST, LARGEST).read(value, where))


def _seconds(value: Any, where: str) -> float:
    plain = read_quantity(value, "seconds", where) if isinstance(value, str) else value
    return float(number(SHORTEST, LONGEST).read(plain, where))


TABLES, SECONDS = Field(_tables), Field(_seconds)
COUNT, LANES = or_unknown(whole(0)), or_unknown(whole(1, 1024))
BYTES = or_unknown(Field(_bytes, lambda value: write_quantity(value, "bytes")))
RATE, TIME = or_unknown(quantity("bytes/s")), or_unknown(quantity("seconds"))
LIMIT = Field(_limit, lambda value: int(value) if float(value).is_integer() else value)
MANY = or_unknown(whole(1, MOST_DEVICES))

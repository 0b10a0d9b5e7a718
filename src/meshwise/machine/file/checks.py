"""Values of a TOML table that a person wrote, each checked: its key, its type, its unit, its range.

An error names the file, the table and the key, and says what to write instead. Nothing but UsageError leaves here.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from meshwise.spec.errors import UsageError, nearest
from meshwise.spec.quantity import read_quantity

UNKNOWN = "unknown"
"""Stands for a figure that is not known, where the catalog has one."""
LARGEST = 2**53
"""Whole numbers above it are no counts, sizes or lanes of any machine, and floats would round them."""
SHORTEST, LONGEST = 1e-12, 1e9  # seconds of one transfer; what is outside is a slip of the unit
Table = Mapping[str, Any]


def read_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a text. Raises UsageError, with line and column, for what is no TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(
            f"{where}: tables or lists within too many others. Write it as `meshwise bench --save`."
        ) from None
    except ValueError as error:  # TOMLDecodeError, or a number that Python refuses to read
        raise UsageError(f"{where}: no TOML: {error}.") from None


def only_keys(table: Table, known: Iterable[str], where: str) -> None:
    """Raises UsageError for a key that is not known, with the nearest that is."""
    known = list(known)
    for key in table:
        if key not in known:
            raise UsageError(
                f"{where}: unknown key '{key[:60]}'.{nearest(key[:60], known)} Known are {', '.join(known)}."
            )


def table_of(table: Table, key: str, where: str) -> Table:
    """The table under a key; empty where there is none."""
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise UsageError(f"{where}: {key} = {_shown(value)}: must be a table. Write [{key}] with its keys below it.")
    return value


def tables_of(table: Table, key: str, where: str) -> list[Table]:
    """The list of tables under a key (`[[device]]`); empty where there is none."""
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise UsageError(f"{where}: {key}: must be a list of tables. Write [[{key}]] above the keys of each.")
    return value


def text_of(table: Table, key: str, where: str, default: str = "") -> str:
    """The text under a key."""
    value = table.get(key, default)
    if not isinstance(value, str):
        raise UsageError(f'{where}: {key} = {_shown(value)}: must be a text. Write {key} = "…", in quotes.')
    return value


def texts_of(table: Table, key: str, where: str) -> tuple[str, ...]:
    """The list of texts under a key."""
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise UsageError(f'{where}: {key} = {_shown(value)}: must be a list of texts. Write {key} = ["…", "…"].')
    return tuple(value)


def number_table_of(table: Table, key: str, where: str, kind: str = "") -> dict[str, float]:
    """A table of numbers, such as shares by dtype; kind: numbers or quantities of it."""
    inner = table_of(table, key, where)
    return {name: _limit(value, kind, f"{where}, {key}.{name[:60]}") for name, value in inner.items()}


def text_table_of(table: Table, key: str, where: str) -> dict[str, str]:
    """A table of texts, such as origins by figure."""
    inner = table_of(table, key, where)
    return {name: text_of(inner, name, f"{where}, {key}") for name in inner}


def count_of(table: Table, key: str, where: str, least: int, most: int = LARGEST) -> int | None:
    """The whole number under a key, within its range; None where there is none."""
    if key not in table or table[key] == UNKNOWN:
        return None
    return checked_count(table[key], f"{where}: {key}", least, most)


def checked_count(value: object, where: str, least: int, most: int = LARGEST) -> int:
    """A whole number within its range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(
            f"{where} = {_shown(value)}: must be a whole number. Write it without quotes, such as {least}."
        )
    if not least <= value <= most:
        raise UsageError(f"{where} = {_shown(value)}: must be from {least} to {most:,}.")
    return value


def flag_of(table: Table, key: str, where: str) -> bool | None:
    """true or false under a key; None where there is none."""
    value = table.get(key)
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"{where}: {key} = {_shown(value)}: must be true or false, without quotes.")
    return value


def quantity_of(table: Table, key: str, kind: str, where: str, default: float | None = None) -> float | None:
    """The quantity under a key in base units; `default` where there is none, None where it is "unknown"."""
    if key not in table:
        return default
    if table[key] == UNKNOWN:
        return None
    return read_quantity(table[key], kind, f"{where}: {key}")


def bytes_of(table: Table, key: str, where: str, default: int | None = None) -> int | None:
    """Whole bytes under a key."""
    value = quantity_of(table, key, "bytes", where, default)
    if value is None:
        return None
    if value != int(value) or value > LARGEST:
        raise UsageError(f'{where}: {key} = {_shown(table[key])}: no whole number of bytes. Write it as "80 GB".')
    return int(value)


def rising_sizes(table: Table, key: str, where: str) -> tuple[int, ...]:
    """The sizes under a key, in bytes, each larger than the one before."""
    value = table.get(key)
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: {key} is missing: the sizes in bytes. Write {key} = [1024, 1048576].")
    sizes = tuple(checked_count(size, f"{where}: {key}[{at}]", 1) for at, size in enumerate(value))
    for before, after in pairwise(sizes):
        if after <= before:
            raise UsageError(f"{where}: {key}: {after} follows {before}: sizes must rise. Sort the rows by size.")
    return sizes


def seconds_list(table: Table, key: str, where: str, count: int) -> tuple[float, ...]:
    """Seconds for each of `count` sizes."""
    value = table.get(key)
    if not isinstance(value, list) or len(value) != count:
        has = f"{len(value)} values" if isinstance(value, list) else "no list"
        raise UsageError(f"{where}: {key}: {has} for {count} sizes. Write one number of seconds for each size.")
    return tuple(_seconds(seconds, f"{where}: {key}[{at}]") for at, seconds in enumerate(value))


def batch_slice(table: Table, key: str, where: str) -> float:
    """A number that is not negative, 0 where there is none."""
    return checked_number(table.get(key, 0.0), f"{where}: {key}", 0.0, 1e9)


def checked_number(value: object, where: str, least: float, most: float) -> float:
    """A number within its range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where} = {_shown(value)}: must be a number without quotes.")
    if not least <= value <= most:
        raise UsageError(f"{where} = {_shown(value)}: must be from {least:g} to {most:g}.")
    return float(value)


def _seconds(value: object, where: str) -> float:
    if isinstance(value, str):
        value = read_quantity(value, "seconds", where)
    return checked_number(value, where, SHORTEST, LONGEST)


def _limit(value: object, kind: str, where: str) -> float:
    if kind:
        return read_quantity(value, kind, where)
    if isinstance(value, str):
        return read_quantity(value, "bytes", where)
    if isinstance(value, float) and math.isinf(value):
        return value
    return checked_number(value, where, -LARGEST, LARGEST)


def _shown(value: object) -> str:
    """The value as it stands, cut when it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return "that value"
    return text if len(text) <= 60 else text[:57] + "…"

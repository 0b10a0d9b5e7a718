"""Define the tables of a machine file: how each key is read.

The keys of a table are the fields of the dataclass that it describes, so a new field needs a row here. An error
names the file, the table and the key, and says what to write instead. Only UsageError is raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from meshwise.hardware.quantity import read_quantity, value_text
from meshwise.spec.errors import UsageError, check_known
from meshwise.spec.machine import MOST_DEVICES, Collective, Matmul
from meshwise.spec.timings import Timings, fitted

UNKNOWN = "unknown"
"""The user writes this word in place of a figure to mark it as unknown, even if the catalog has a value."""
LARGEST = 2**53
"""The largest integer to accept. No machine has larger counts or sizes, and a float would round them."""
SHORTEST, LONGEST = 1e-12, 1e9  # limits in seconds for one transfer, to detect values in a wrong unit
Table = Mapping[str, Any]
Read = Callable[[Any, str], Any]
"""`read(value, place)` converts a value of the file. `place` says where the value is, for errors."""
Known = Mapping[str, Read]
"""The keys that a table may have, and how the value of each is read."""


def read_table(table: Table, known: Known, where: str, required: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read and convert the values of a table."""
    for key in table:
        check_known(f"{where}: key", key[:60], known)
    for key, example in (required or {}).items():
        if table.get(key) in (None, "", []):
            raise UsageError(f"{where}: {key} is missing. Write {key} = {example}.")
    return {key: read(table[key], f"{where}: {key}") for key, read in known.items() if key in table}


# ---- Kinds of values -------------------------------------------------------------------------------------------------


def wrong(value: object, where: str, must: str) -> UsageError:
    """Return the error to raise for an invalid value."""
    return UsageError(f"{where} = {value_text(value)} must be {must}.")


def of_type(kind: type, must: str) -> Read:
    """Return a function that accepts only values of this type, and reads them unchanged."""

    def read(value: Any, where: str) -> Any:
        if not isinstance(value, kind):
            raise wrong(value, where, must)
        return value

    return read


def number(least: float, most: float) -> Read:
    """Return a function that accepts numbers from `least` to `most`, only integers if `least` is an integer."""
    whole = isinstance(least, int)
    must = f"a whole number without quotes, such as {least}" if whole else "a number without quotes"

    def read(value: Any, where: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise wrong(value, where, must)
        if not least <= value <= most:
            raise wrong(value, where, f"from {least} to {most:,}" if whole else f"from {least:g} to {most:g}")
        return value if whole else float(value)

    return read


def quantity(unit: str) -> Read:
    """Return a function that accepts a number with its unit, such as "80 GB", and converts it to the base unit."""
    return lambda value, where: read_quantity(value, unit, where)


def or_unknown(read: Read) -> Read:
    """Return a function that accepts what `read` accepts, and also "unknown", which is read as None."""
    return lambda value, where: None if value == UNKNOWN else read(value, where)


def one_of(*known: str) -> Read:
    """Return a function that accepts one of these words, or an empty string."""

    def read(value: Any, where: str) -> Any:
        if text(value, where):
            check_known(where, value[:60], known)
        return value

    return read


def list_of(read: Read, what: str) -> Read:
    """Return a function that accepts a list of values, each of which `read` reads."""

    def read_list(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise wrong(value, where, f"a list of {what}")
        return tuple(read(item, f"{where}[{at}]") for at, item in enumerate(value, 1))

    return read_list


def table_of(read: Read) -> Read:
    """Return a function that accepts a table with any keys."""
    return lambda value, where: {name: read(item, f"{where}.{name[:60]}") for name, item in table(value, where).items()}


def one_or_each(read: Read) -> Read:
    """Return a function that accepts one value for all devices of a table, or a list with a value for each device."""
    return lambda value, where: [read(one, where) for one in value] if isinstance(value, list) else read(value, where)


def amount(unit: str, least: float, most: float) -> Read:
    """Return a function that accepts a number from `least` to `most`, plain or as a text with its unit."""
    plain = number(least, most)

    def read(value: Any, where: str) -> Any:
        given = read_quantity(value, unit, where) if isinstance(value, str) else value
        plain(given, where)  # only checks the value, so that integers stay integers
        return given

    return read


ENDS = '["host -> cuda:0", "cuda:0 <-> cuda:1"]'
text = of_type(str, "a text, in quotes")
flag = of_type(bool, "true or false, without quotes")
table = of_type(dict, "a table: keys and values below its name in brackets")
count, lanes = or_unknown(number(0, LARGEST)), or_unknown(number(1, 1024))
many = or_unknown(number(1, MOST_DEVICES))
memory = or_unknown(lambda value, where: int(read_quantity(value, "bytes", where)))
tables = list_of(table, "tables. Write its name in double brackets above the keys of each")
rate, duration = or_unknown(quantity("bytes/s")), or_unknown(quantity("seconds"))


# ---- Tables ----------------------------------------------------------------------------------------------------------


def matmul(value: Any, where: str) -> Matmul:
    """Read a measured matrix product."""
    example = {**dict.fromkeys(("m", "n", "k"), "4096"), "seconds": "0.001"}
    return Matmul(**{"dtype": "", **read_table(table(value, where), MATMUL, where, example)})


def collective(value: Table, where: str) -> Collective:
    """Read the measured times of a collective."""
    values = read_table(value, COLLECTIVE, where, {"kind": '"all-reduce"', "ranks": "8", **_TIMES})
    return Collective(values["kind"], values["ranks"], values.get("backend", ""), _timings(values, where))


def timings(value: Any, where: str) -> Timings:
    """Read measured times from a table of the machine file."""
    return _timings(read_table(table(value, where), TIMINGS, where, _TIMES), where)


def _timings(values: Table, where: str) -> Timings:
    sizes = values["bytes"]
    for before, after in pairwise(sizes):
        if after <= before:
            raise UsageError(f"{where}: the sizes in bytes must increase, but {after} follows {before}.")
    columns = {name: values.get(name, ()) for name in COLUMNS}
    for name, column in columns.items():
        if column and len(column) != len(sizes):
            raise UsageError(
                f"{where}: {name} has {len(column)} values for {len(sizes)} sizes. Write one value for each size."
            )
    if "fit" not in values:
        return fitted(sizes, *columns.values())
    fit = read_table(values["fit"], FIT, f"{where}: fit")
    bandwidth = fit.get("bandwidth") or math.inf
    seconds, *others = columns.values()
    return Timings(sizes, seconds, fit.get("latency") or 0.0, bandwidth, fit.get("residual", 0.0), *others)


FILE: Known = {
    "name": text,
    "measured": text,
    "warnings": list_of(text, 'texts: ["…", "…"]'),
    "links_as_written": flag,  # older versions wrote this key, which is now ignored
    "versions": table_of(text),
    "part": table_of(table),
    **dict.fromkeys(("host", "device", "link", "collective"), tables),
}
HOST: Known = {
    "count": many,
    **dict.fromkeys(("name", "processor"), text),
    **dict.fromkeys(("cores", "cores_present", "sockets", "numa_nodes"), count),
    **dict.fromkeys(("memory", "memory_present"), memory),
    "limits": table_of(amount("bytes", -float(LARGEST), math.inf)),
}
FIGURES: Known = {
    "memory": memory,
    "memory_bandwidth": rate,
    "peak": table_of(quantity("FLOP/s")),
    "achievable": table_of(number(0.0, 2.0)),
    "origins": table_of(text),
}
"""Figures of a device. The catalog has them for the device models that it knows. A machine file may replace them."""
MATMUL: Known = {
    "dtype": text,
    **dict.fromkeys(("m", "n", "k"), number(1, LARGEST)),
    "seconds": number(SHORTEST, LONGEST),
}
DEVICE: Known = {
    **dict.fromkeys(("count", "hosts"), many),
    "name": text,
    "part": text,
    "host": or_unknown(number(0, MOST_DEVICES)),
    **FIGURES,
    "memory_rate": rate,
    "launch": duration,
    "numa": one_or_each(or_unknown(number(-1, LARGEST))),
    "pci": one_or_each(text),
    "matmuls": list_of(matmul, "tables such as { dtype = …, m = …, n = …, k = …, seconds = … }"),
}
LINK: Known = {
    "ends": list_of(text, f"texts: {ENDS}"),
    "kind": one_of("pcie", "nvlink", "xgmi", "c2c", "memory", "network", "process"),
    "bandwidth": rate,
    "latency": duration,
    **dict.fromkeys(("generation", "width", "full_generation", "full_width"), lanes),
    "peer": flag,
    "crosses": one_of("bridge", "socket"),
    "origin": text,
    "timings": table_of(timings),
}
COLUMNS = ("seconds", "p95", "p99", "in_step")
FIT: Known = {"latency": duration, "bandwidth": rate, "residual": number(0.0, 1e9)}
TIMINGS: Known = {
    "bytes": list_of(number(1, LARGEST), "sizes in bytes"),
    **dict.fromkeys(COLUMNS, list_of(amount("seconds", SHORTEST, LONGEST), "seconds, one for each size")),
    "fit": table,
}
COLLECTIVE: Known = {"kind": text, "ranks": number(1, LARGEST), "backend": text, **TIMINGS}
_TIMES = {"bytes": "[1024, 1048576]", "seconds": "[2e-05, 0.00014], one for each size"}

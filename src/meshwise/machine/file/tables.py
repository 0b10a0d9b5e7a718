"""The tables of a machine file: what may stand in each, a row a key. `read.py` and `write.py` both go by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from meshwise.machine.file.fields import (
    BYTES,
    COUNT,
    FLAG,
    LANES,
    LIMIT,
    LONGEST,
    RATE,
    SECONDS,
    SHORTEST,
    TABLE,
    TABLES,
    TEXT,
    TIME,
    Field,
    Fields,
    list_of,
    number,
    one_of,
    one_or_each,
    or_unknown,
    quantity,
    record,
    table_of,
    whole,
    write_table,
)
from meshwise.machine.words import MOST_DEVICES
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import Collective, Matmul
from meshwise.spec.timings import Timings, fitted

TEXTS = table_of(TEXT)
FILE: Fields = {
    "name": TEXT,
    "measured": TEXT,
    "warnings": list_of(TEXT, 'texts: ["…", "…"]'),
    "links_as_written": FLAG,  # of files before 0.2, whose links stood in another order; now they stand as written
    "versions": TEXTS,
    "host": TABLES,
    "part": table_of(TABLE),
    "device": TABLES,
    "link": TABLES,
    "collective": TABLES,
}
HOST: Fields = {
    "name": TEXT,
    "processor": TEXT,
    **dict.fromkeys(("cores", "cores_present", "sockets", "numa_nodes"), COUNT),
    **dict.fromkeys(("memory", "memory_present"), BYTES),
    "limits": table_of(LIMIT),
}
FIGURES: Fields = {
    "memory": BYTES,
    "memory_bandwidth": RATE,
    "peak": table_of(quantity("FLOP/s")),
    "achievable": table_of(number(0, 2)),
    "origins": TEXTS,
}
"""Fields of a device that its part has too."""
MATMUL: Fields = {
    "dtype": TEXT,
    **dict.fromkeys(("m", "n", "k"), whole(1)),
    "seconds": number(SHORTEST, LONGEST),
}
DEVICE: Fields = {
    "name": TEXT,
    "part": TEXT,
    "host": or_unknown(whole(0, MOST_DEVICES)),
    **FIGURES,
    "memory_rate": RATE,
    "launch": TIME,
    "numa": one_or_each(or_unknown(whole(-1))),
    "pci": one_or_each(TEXT),
    "matmuls": list_of(
        record(
            lambda values, where: Matmul(**{"dtype": "", **values}),
            MATMUL,
            dict.fromkeys(("m", "n", "k"), "4096") | {"seconds": "0.001"},
        ),
        "tables such as { dtype = …, m = …, n = …, k = …, seconds = … }",
    ),
}

# ---- Links and collectives -------------------------------------------------------------------------------------------

_SECONDS = list_of(SECONDS, "seconds, one for each size")
_FIT: Fields = {"latency": TIME, "bandwidth": RATE, "residual": number(0, 1e9)}
_TIMINGS: Fields = {
    "bytes": list_of(whole(1), "sizes in bytes"),
    **dict.fromkeys(("seconds", "p95", "p99"), _SECONDS),
    "fit": record(lambda values, where: values, _FIT, {}),
}
_TIMES = {"bytes": "[1024, 1048576]", "seconds": "[2e-05, 0.00014], one for each size"}


def _timings(values: Mapping[str, Any], where: str) -> Timings:
    """Sizes that rise, times of every size, and their fit; without a fit it is made here."""
    sizes = values["bytes"]
    for before, after in pairwise(sizes):
        if after <= before:
            raise UsageError(f"{where}: bytes: {after} follows {before}: sizes must rise. Sort the rows by size.")
    columns = {name: values.get(name, ()) for name in ("seconds", "p95", "p99")}
    for name, column in columns.items():
        if column and len(column) != len(sizes):
            raise UsageError(
                f"{where}: {name}: {len(column)} values for {len(sizes)} sizes. Write one number of seconds for each."
            )
    if "fit" not in values:
        return fitted(sizes, *columns.values())
    fit = values["fit"]
    bandwidth = fit.get("bandwidth") or float("inf")
    plain = Timings(sizes, columns["seconds"], fit.get("latency") or 0.0, bandwidth, fit.get("residual", 0.0))
    return replace(plain, p95=columns["p95"], p99=columns["p99"])


def write_timings(timings: Timings) -> dict[str, Any]:
    """Times by size and their fit, as values of a file."""
    columns = {"bytes": timings.sizes, "seconds": timings.seconds, "p95": timings.p95, "p99": timings.p99}
    finite = {name: _FIT[name] for name in _FIT if getattr(timings, name) != float("inf")}
    return {**{name: column for name, column in columns.items() if column}, "fit": write_table(timings, finite)}


LINK: Fields = {
    "kind": one_of("pcie", "nvlink", "xgmi", "c2c", "memory", "network", "process"),
    "bandwidth": RATE,
    "latency": TIME,
    **dict.fromkeys(("generation", "width", "full_generation", "full_width"), LANES),
    "peer": FLAG,
    "crosses": one_of("bridge", "socket"),
    "origin": TEXT,
    "timings": table_of(Field(record(_timings, _TIMINGS, _TIMES).read, write_timings)),
}
COLLECTIVE = record(
    lambda values, where: Collective(
        values["kind"], values["ranks"], values.get("backend", ""), _timings(values, where)
    ),
    {"kind": TEXT, "ranks": whole(1), "backend": TEXT, **_TIMINGS},
    {"kind": '"all-reduce"', "ranks": "8", **_TIMES},
)

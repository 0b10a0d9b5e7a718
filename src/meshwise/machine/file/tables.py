"""Define the tables of a machine file, a row a key.

`read.py` and `write.py` both use them.

Tested in tests/machine/test_machine_file.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from meshwise.machine.file import fields
from meshwise.machine.file.fields import Field, Fields, write_table
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import MOST_DEVICES, Collective, Matmul
from meshwise.spec.timings import Timings, fitted

TEXTS = fields.table_of(fields.TEXT)
FILE: Fields = {
    "name": fields.TEXT,
    "measured": fields.TEXT,
    "warnings": fields.list_of(fields.TEXT, 'texts: ["…", "…"]'),
    "links_as_written": fields.FLAG,  # of older files, whose links stood in another order; now they stand as written
    "versions": TEXTS,
    "host": fields.TABLES,
    "part": fields.table_of(fields.TABLE),
    "device": fields.TABLES,
    "link": fields.TABLES,
    "collective": fields.TABLES,
}
HOST: Fields = {
    "name": fields.TEXT,
    "processor": fields.TEXT,
    **dict.fromkeys(("cores", "cores_present", "sockets", "numa_nodes"), fields.COUNT),
    **dict.fromkeys(("memory", "memory_present"), fields.BYTES),
    "limits": fields.table_of(fields.LIMIT),
}
FIGURES: Fields = {
    "memory": fields.BYTES,
    "memory_bandwidth": fields.RATE,
    "peak": fields.table_of(fields.quantity("FLOP/s")),
    "achievable": fields.table_of(fields.number(0, 2)),
    "origins": TEXTS,
}
"""Figures of a device. The catalog has them for the device models that it knows. A machine file may replace them."""
MATMUL: Fields = {
    "dtype": fields.TEXT,
    **dict.fromkeys(("m", "n", "k"), fields.whole(1)),
    "seconds": fields.number(fields.SHORTEST, fields.LONGEST),
}
DEVICE: Fields = {
    "name": fields.TEXT,
    "part": fields.TEXT,
    "host": fields.or_unknown(fields.whole(0, MOST_DEVICES)),
    **FIGURES,
    "memory_rate": fields.RATE,
    "launch": fields.TIME,
    "numa": fields.one_or_each(fields.or_unknown(fields.whole(-1))),
    "pci": fields.one_or_each(fields.TEXT),
    "matmuls": fields.list_of(
        fields.record(
            lambda values, where: Matmul(**{"dtype": "", **values}),
            MATMUL,
            dict.fromkeys(("m", "n", "k"), "4096") | {"seconds": "0.001"},
        ),
        "tables such as { dtype = …, m = …, n = …, k = …, seconds = … }",
    ),
}

# ---- Links and collectives -------------------------------------------------------------------------------------------

_SECONDS = fields.list_of(fields.SECONDS, "seconds, one for each size")
_COLUMNS = ("seconds", "p95", "p99", "in_step")
_FIT: Fields = {"latency": fields.TIME, "bandwidth": fields.RATE, "residual": fields.number(0, 1e9)}
_TIMINGS: Fields = {
    "bytes": fields.list_of(fields.whole(1), "sizes in bytes"),
    **dict.fromkeys(_COLUMNS, _SECONDS),
    "fit": fields.record(lambda values, where: values, _FIT, {}),
}
_TIMES = {"bytes": "[1024, 1048576]", "seconds": "[2e-05, 0.00014], one for each size"}


def _timings(values: Mapping[str, Any], where: str) -> Timings:
    """Read measured times from a table of the machine file: message sizes in increasing order, a time for each size,
    and the latency and bandwidth that were fitted to these times. If the file has no fit, it is computed. Raises
    UsageError if the sizes do not increase, or if a list has another length."""
    sizes = values["bytes"]
    for before, after in pairwise(sizes):
        if after <= before:
            raise UsageError(f"{where}: the sizes in bytes must increase, but {after} follows {before}.")
    columns = {name: values.get(name, ()) for name in _COLUMNS}
    for name, column in columns.items():
        if column and len(column) != len(sizes):
            raise UsageError(
                f"{where}: {name} has {len(column)} values for {len(sizes)} sizes. Write one value for each size."
            )
    if "fit" not in values:
        return fitted(sizes, *columns.values())
    fit = values["fit"]
    bandwidth = fit.get("bandwidth") or float("inf")
    seconds, *others = columns.values()
    return Timings(sizes, seconds, fit.get("latency") or 0.0, bandwidth, fit.get("residual", 0.0), *others)


def write_timings(timings: Timings) -> dict[str, Any]:
    """Convert measured times to a table of the machine file. The table has the message sizes, a time for each size, and
    the latency and bandwidth that were fitted to these times."""
    columns = {"bytes": timings.sizes, **{name: getattr(timings, name) for name in _COLUMNS}}
    finite = {name: _FIT[name] for name in _FIT if getattr(timings, name) != float("inf")}
    return {**{name: column for name, column in columns.items() if column}, "fit": write_table(timings, finite)}


LINK: Fields = {
    "kind": fields.one_of("pcie", "nvlink", "xgmi", "c2c", "memory", "network", "process"),
    "bandwidth": fields.RATE,
    "latency": fields.TIME,
    **dict.fromkeys(("generation", "width", "full_generation", "full_width"), fields.LANES),
    "peer": fields.FLAG,
    "crosses": fields.one_of("bridge", "socket"),
    "origin": fields.TEXT,
    "timings": fields.table_of(Field(fields.record(_timings, _TIMINGS, _TIMES).read, write_timings)),
}
COLLECTIVE = fields.record(
    lambda values, where: Collective(
        values["kind"], values["ranks"], values.get("backend", ""), _timings(values, where)
    ),
    {"kind": fields.TEXT, "ranks": fields.whole(1), "backend": fields.TEXT, **_TIMINGS},
    {"kind": '"all-reduce"', "ranks": "8", **_TIMES},
)

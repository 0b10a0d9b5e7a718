"""Links and collectives of a machine file: ends that exist, sizes that rise, times of every size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwise.machine.file.checks import (
    Table,
    batch_slice,
    checked_count,
    count_of,
    flag_of,
    only_keys,
    quantity_of,
    rising_sizes,
    seconds_list,
    table_of,
    text_of,
    texts_of,
)
from meshwise.spec.errors import UsageError, nearest
from meshwise.spec.machine import DEVICE, HOST, NODE, Collective, Device, Host, Link
from meshwise.spec.timings import Timings, fitted

KINDS = ("pcie", "nvlink", "xgmi", "c2c", "memory", "network", "process", "")
CROSSES = ("", "bridge", "socket")
_LANES = ("generation", "width", "full_generation", "full_width")
_LINK = ("ends", "kind", "bandwidth", "latency", *_LANES, "peer", "crosses", "origin", "timings")
_TIMINGS = ("bytes", "seconds", "p95", "p99", "fit")


def read_links(
    tables: Sequence[Table], devices: Sequence[Device], hosts: Sequence[Host], where: str
) -> tuple[Link, ...]:
    """The links in the order of the file, one for each of a table's ends."""
    known = {HOST, DEVICE, NODE, *(device.name for device in devices), *(f"node{at}" for at in range(len(hosts)))}
    found: dict[tuple[str, str], Link] = {}
    for at, table in enumerate(tables, 1):
        place = f"{where}, [[link]] {at}"
        only_keys(table, _LINK, place)
        facts = _facts(table, place)
        for source, target in _ends(table, known, place):
            if (source, target) in found:
                raise UsageError(f"{place}: {source} -> {target} has a link already. Write each pair of ends once.")
            found[source, target] = Link(source, target, **facts)
    return tuple(found.values())


def _facts(table: Table, place: str) -> dict[str, Any]:
    lanes = {key: count_of(table, key, place, 1, 1024) for key in _LANES}
    timings = table_of(table, "timings", place)
    return {
        "kind": _one_of(text_of(table, "kind", place), KINDS, f"{place}: kind"),
        "bandwidth": quantity_of(table, "bandwidth", "bytes/s", place),
        "latency": quantity_of(table, "latency", "seconds", place),
        **lanes,
        "peer": flag_of(table, "peer", place),
        "crosses": _one_of(text_of(table, "crosses", place), CROSSES, f"{place}: crosses"),
        "timings": {path: _timings_at(table_of(timings, path, place), f"{place}, {path[:60]}") for path in timings},
        "origin": text_of(table, "origin", place),
    }


def _timings_at(table: Table, place: str) -> Timings:
    only_keys(table, _TIMINGS, place)
    return read_timings(table, place)


def _one_of(value: str, known: Sequence[str], place: str) -> str:
    if value not in known:
        names = ", ".join(name for name in known if name)
        raise UsageError(f"{place} = '{value[:60]}': not known.{nearest(value, known)} Known are {names}.")
    return value


def _ends(table: Table, known: set[str], place: str) -> list[tuple[str, str]]:
    write = 'Write ends = ["host -> cuda:0", "cuda:0 <-> cuda:1"].'
    found = []
    for text in texts_of(table, "ends", place):
        arrow = "<->" if "<->" in text else "->"
        source, found_arrow, target = (part.strip() for part in text.partition(arrow))
        if not found_arrow:
            raise UsageError(f"{place}: '{text[:60]}': no ends of a link. {write}")
        for end in (source, target):
            if end not in known:
                raise UsageError(
                    f"{place}: '{end[:60]}' is no device of this machine.{nearest(end, known)} Ends are devices of the "
                    f"file, host, device (any), node (any host) or node0."
                )
        found += [(source, target)] if arrow == "->" or source == target else [(source, target), (target, source)]
    if not found:
        raise UsageError(f"{place}: ends is missing. {write}")
    return found


def read_collective(table: Table, place: str) -> Collective:
    """One measured collective."""
    only_keys(table, ("kind", "ranks", "backend", *_TIMINGS), place)
    kind = text_of(table, "kind", place)
    if not kind:
        raise UsageError(f'{place}: kind is missing. Write kind = "all-reduce".')
    ranks = checked_count(table.get("ranks"), f"{place}: ranks", 1)
    return Collective(kind, ranks, text_of(table, "backend", place), read_timings(table, place))


def read_timings(table: Table, place: str) -> Timings:
    """Sizes, seconds, percentiles and their fit; without a fit it is made here."""
    sizes = rising_sizes(table, "bytes", place)
    seconds = seconds_list(table, "seconds", place, len(sizes))
    p95, p99 = (seconds_list(table, key, place, len(sizes)) if table.get(key) else () for key in ("p95", "p99"))
    if "fit" not in table:
        return fitted(sizes, seconds, p95, p99)
    fit = table_of(table, "fit", place)
    only_keys(fit, ("latency", "bandwidth", "residual"), f"{place}, fit")
    latency = quantity_of(fit, "latency", "seconds", f"{place}, fit")
    bandwidth = quantity_of(fit, "bandwidth", "bytes/s", f"{place}, fit")
    return Timings(
        sizes, seconds, latency or 0.0, bandwidth or float("inf"), batch_slice(fit, "residual", place), p95, p99
    )

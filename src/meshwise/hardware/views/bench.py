"""Show a bench in a terminal, and as plain data for --json.

The text shows what each device, path and collective reached, and what is wrong.

Rates are for the largest measured size unless a size is given above them. No number is ever cut: columns that do
not fit are left out, the last first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import truediv
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from meshwise.hardware.measure.result import COPY, Bench, DeviceResult, PathResult
from meshwise.hardware.views.devices import devices_dict
from meshwise.spec.bandwidth import DEFINITIONS, bus_bandwidth
from meshwise.spec.json_values import json_value
from meshwise.spec.machine import Device
from meshwise.spec.timings import Timings, rate_at, seconds_at
from meshwise.spec.units import bandwidth_text, bytes_text, flops_text, percent_text, seconds_text
from meshwise.terminal.screen import Drawn, Screen, spaced
from meshwise.terminal.table import Cell, table_lines

MOST_ROWS = 16
"""The largest number of measured copies that are shown with one row each. More copies are shown as a matrix."""
MIDDLE_SIZES = (64 << 10, 1 << 20)
"""The sizes at which collectives are shown, besides the largest size."""
WRONG = "bold red"
FACTS = ("operation", "source", "target", "path", "ranks", "wrong", "note")


def done_text(done: PathResult | DeviceResult) -> str:
    """Describe a finished measurement in one line: `all-reduce, gloo: 812 MB/s at 16.0 MiB`."""
    if isinstance(done, DeviceResult):
        best = max(done.matmuls, key=lambda product: product.rate, default=None)
        product = f", {best.dtype} products at {flops_text(best.rate)}" if best else ""
        return f"{done.device}: memory at {bandwidth_text(done.memory_rate or 0.0)}{product}"
    size = done.timings.sizes[-1]
    return f"{done}: {_rate(done, size)}" + (f" at {bytes_text(size)}" if done.wrong is None else "")


def bench_text(bench: Bench, width: int | None = None) -> RenderableType:
    """Draw the bench for a terminal."""
    return Drawn(lambda screen: _lines(bench, screen), width)


def _lines(bench: Bench, screen: Screen) -> list[Text]:
    width = screen.table_width
    copies = [result for result in bench.results if result.operation == COPY]
    collectives = [result for result in bench.results if result.operation != COPY]
    parts = [_devices(bench.machine.devices, width), _copies(copies, width)]
    return spaced([*parts, _collectives(collectives, width), screen.wrap(*_end(bench))], None)


def _devices(devices: Sequence[Device], width: int) -> list[Text]:
    measured = [device for device in devices if device.memory_rate is not None]
    dtypes = dict.fromkeys(product.dtype for device in measured for product in device.matmuls)
    rows = [
        {"device": d.name, "memory": bandwidth_text(d.memory_rate or 0.0), "launch": seconds_text(d.launch or 0.0)}
        | {f"{dtype} products": _best(d, dtype) for dtype in dtypes}
        for d in measured
    ]
    return _table(rows, width)


def _table(rows: Sequence[Mapping[str, Cell]], width: int) -> list[Text]:
    """Return a table as lines. Each row has its cells by the title of their column."""
    titles = list(rows[0]) if rows else []
    return table_lines(titles, [list(row.values()) for row in rows], width) if rows else []


def _best(device: Device, dtype: str) -> str:
    """Format the best rate of a dtype over all shapes, with its share of the device's peak if the peak is known."""
    best, peak = device.best_rates.get(dtype), device.peak.get(dtype)
    share = f" {percent_text(best / peak)}" if best and peak else ""
    return flops_text(best) + share if best else "none"


def _copies(results: Sequence[PathResult], width: int) -> list[Text]:
    if len(results) > MOST_ROWS and len({r.target for r in results}) > 2:
        return _matrices(results, width)
    rows = [
        {"copy": f"{r.source} → {r.target}", "path": r.path, "one way": _rate(r, r.timings.sizes[-1])}
        | {"at": bytes_text(r.timings.sizes[-1]), "latency": _latency(r.timings), **_slowest(r.timings)}
        for r in results
    ]
    return _table(rows, width)


def _collectives(results: Sequence[PathResult], width: int) -> list[Text]:
    rows = [
        {"collective": r.operation, "ranks": str(r.ranks), "path": r.path, "latency": _latency(r.timings)}
        | {bytes_text(size): _rate(r, size) for size in MIDDLE_SIZES}
        | {"largest": _rate(r, r.timings.sizes[-1]), "at": bytes_text(r.timings.sizes[-1]), **_slowest(r.timings)}
        for r in results
    ]
    said = Text(f"bus bandwidth by the definitions of {DEFINITIONS}", "dim")
    return [*_table(rows, width), said] if rows else []


def _slowest(timings: Timings) -> dict[str, str]:
    """Format percentiles at the largest size, where they were recorded."""
    percentiles = {"p95": timings.p95, "p99": timings.p99}
    return {name: seconds_text(table[-1]) if table else "" for name, table in percentiles.items()}


def _matrices(results: Sequence[PathResult], width: int) -> list[Text]:
    """Return a table for each kind of path: the GB/s from each source to each target."""
    lines: list[Text] = []
    for path in dict.fromkeys(result.path for result in results):
        cells = {(r.source, r.target): r for r in results if r.path == path}
        sources = dict.fromkeys(source for source, _ in cells)
        targets = [*sources, *dict.fromkeys(target for _, target in cells if target not in sources)]
        rows: list[dict[str, Cell]] = [
            {f"{path}, GB/s": source, **{target: _cell(cells.get((source, target))) for target in targets}}
            for source in sources
        ]
        lines += [Text(), *_table(rows, width)]
    return lines[1:]


def _cell(result: PathResult | None) -> Text:
    if result is None:
        return Text("-", "dim")
    if result.wrong is not None:
        return Text("corrupt", WRONG)
    return Text(f"{rate_at(result.timings, result.timings.sizes[-1]) / 1e9:.1f}")


def _latency(timings: Timings) -> str:
    """Format the fitted latency, or the time of the smallest size as an upper bound."""
    return seconds_text(timings.latency) if timings.latency else f"< {seconds_text(timings.seconds[0])}"


def _rate(result: PathResult, size: int) -> Cell:
    """Format the bus bandwidth at a size. For a copy, this is its one-way rate."""
    if result.wrong is not None:
        return Text("corrupt", WRONG)
    if size not in result.timings.sizes:
        return "-"
    return bandwidth_text(bus_bandwidth(result.operation, result.ranks, size, seconds_at(result.timings, size)))


def _end(bench: Bench) -> list[Text]:
    lines = [Text(f"corrupt     {result.wrong}", WRONG) for result in bench.wrong]
    right = len(bench.results) - len(bench.wrong)
    if bench.results:
        lines.append(Text(f"integrity   {right} of {len(bench.results)} paths delivered the bytes they were given"))
    cut = [result for result in bench.results if result.note]
    if cut:
        most = bytes_text(max(size for result in cut for size in result.timings.sizes))
        text = f"{len(cut)} of {len(bench.results)} paths stopped at {most} or less, when their time was over"
        lines.append(Text(f"sizes       {text}; --seconds gives them more", "dim"))
    if bench.stopped is not None:
        lines.append(Text(f"stopped     {bench.stopped.why}", "yellow"))
    return lines


# ---- As plain data ---------------------------------------------------------------------------------------------------


def bench_dict(bench: Bench) -> dict[str, Any]:
    """Convert a bench to plain data, with its measurements and their errors, and the measured machine."""
    return {
        "exit_code": bench.exit_code,
        "stopped": bench.stopped.why if bench.stopped else None,
        "seconds": bench.seconds,
        "definitions": DEFINITIONS,
        "results": [_result(result) for result in bench.results],
        "machine": devices_dict(bench.machine),
    }


def _result(result: PathResult) -> dict[str, Any]:
    t = result.timings
    columns: dict[str, Sequence[float]] = {
        "bytes": t.sizes,
        "seconds": t.seconds,
        "p95": t.p95,
        "p99": t.p99,
        "in_step": t.in_step,
        "algorithm_bandwidth": list(map(truediv, t.sizes, t.seconds)),
        "bus_bandwidth": list(map(partial(bus_bandwidth, result.operation, result.ranks), t.sizes, t.seconds)),
    }
    rows = [{name: column[at] if column else None for name, column in columns.items()} for at in range(len(t.sizes))]
    fit = json_value({"latency": t.latency, "bandwidth": t.bandwidth, "residual": t.residual})
    return {**{name: getattr(result, name) for name in FACTS}, "fit": fit, "sizes": rows}

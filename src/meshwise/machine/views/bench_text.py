"""Show a bench in a terminal: figures and faults.

It shows what each device, path and collective reached, and what is wrong.

Rates are of the largest size that was measured unless a size stands above them. No number is ever cut: columns that do
not fit are left out, the last first.

Tested in tests/machine/test_bench.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from meshwise.machine.bench import COPY, Bench
from meshwise.machine.measure.result import DeviceResult, PathResult
from meshwise.spec.bandwidth import DEFINITIONS, bus_bandwidth
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


def done_text(done: PathResult | DeviceResult) -> str:
    """Describe a finished measurement in one line: `all-reduce, gloo: 812 MB/s at 16.0 MiB`."""
    if isinstance(done, DeviceResult):
        best = max(done.matmuls, key=lambda product: product.rate, default=None)
        product = f", {best.dtype} products at {flops_text(best.rate)}" if best else ""
        return f"{done.device}: memory at {bandwidth_text(done.memory_rate or 0.0)}{product}"
    if done.wrong is not None:
        return f"{done}: corrupt"
    size = done.timings.sizes[-1]
    return f"{done}: {_bus(done, size)} at {bytes_text(size)}"


def bench_text(bench: Bench, width: int | None = None) -> RenderableType:
    """Draw the bench for a terminal.

    width: the largest number of characters in a line. The default is the width of the console.
    """
    return Drawn(lambda screen: _lines(bench, screen), width)


def _lines(bench: Bench, screen: Screen) -> list[Text]:
    width = screen.table_width
    copies = [result for result in bench.results if result.operation == COPY]
    collectives = [result for result in bench.results if result.operation != COPY]
    parts = [_devices(bench.machine.devices, width), _copies(copies, width)]
    return spaced([*parts, _collectives(collectives, width), screen.wrap(*_end(bench))], None)


def _devices(devices: Sequence[Device], width: int) -> list[Text]:
    measured = [d for d in devices if d.memory_rate is not None]
    if not measured:
        return []
    dtypes = list(dict.fromkeys(product.dtype for d in measured for product in d.matmuls))
    rows = [
        [d.name, bandwidth_text(d.memory_rate or 0.0), seconds_text(d.launch or 0.0), *(_best(d, t) for t in dtypes)]
        for d in measured
    ]
    return table_lines(["device", "memory", "launch", *(f"{dtype} products" for dtype in dtypes)], rows, width)


def _best(device: Device, dtype: str) -> str:
    """Format the best rate of a dtype over all shapes, with its share of the device's peak if the peak is known."""
    best, peak = device.best_rates.get(dtype), device.peak.get(dtype)
    if best is None:
        return "none"
    return flops_text(best) + (f" {percent_text(best / peak)}" if peak else "")


def _copies(results: Sequence[PathResult], width: int) -> list[Text]:
    if not results:
        return []
    if len(results) > MOST_ROWS and len({r.target for r in results}) > 2:
        return _matrices(results, width)
    rows: list[list[Cell]] = []
    for result in results:
        timings = result.timings
        rate = Text("corrupt", WRONG) if result.wrong is not None else _rate(timings)
        cells = [f"{result.source} → {result.target}", result.path, rate, bytes_text(timings.sizes[-1])]
        rows.append([*cells, _latency(timings), *_slowest(timings)])
    titles = ["copy", "path", "one way", "at", "latency", "p95", "p99"]
    return table_lines(titles, rows, width)


def _slowest(timings: Timings) -> list[str]:
    """Format the 95th and the 99th percentile of the seconds that were measured for the largest message. A percentile
    that was not recorded becomes ""."""
    return [seconds_text(table[-1]) if table else "" for table in (timings.p95, timings.p99)]


def _matrices(results: Sequence[PathResult], width: int) -> list[Text]:
    """Return one matrix for each path. Its rows are sources, its columns are targets, and its cells are GB/s one
    way."""
    lines: list[Text] = []
    for path in dict.fromkeys(result.path for result in results):
        cells = {(r.source, r.target): r for r in results if r.path == path}
        sources = list(dict.fromkeys(source for source, _ in cells))
        targets = [*sources, *dict.fromkeys(target for _, target in cells if target not in sources)]
        rows: list[list[Cell]] = [
            [source, *(_cell(cells.get((source, target))) for target in targets)] for source in sources
        ]
        lines += [Text(), *table_lines([f"{path}, GB/s", *targets], rows, width)]
    return lines[1:]


def _cell(result: PathResult | None) -> Text:
    if result is None:
        return Text("-", "dim")
    if result.wrong is not None:
        return Text("corrupt", WRONG)
    return Text(f"{rate_at(result.timings, result.timings.sizes[-1]) / 1e9:.1f}")


def _rate(timings: Timings) -> str:
    return bandwidth_text(rate_at(timings, timings.sizes[-1]))


def _collectives(results: Sequence[PathResult], width: int) -> list[Text]:
    if not results:
        return []
    rows: list[list[Cell]] = []
    for result in results:
        ends = f" {result.source} → {result.target}" if result.source or result.target else ""
        timings = result.timings
        cells = [result.operation + ends, str(result.ranks), result.path, _latency(timings)]
        cells += [_bus(result, size) for size in MIDDLE_SIZES]
        cells += [_bus(result, timings.sizes[-1]), bytes_text(timings.sizes[-1])]
        fit = Text("corrupt", WRONG) if result.wrong else _fit(timings)
        rows.append([*cells, fit, *_slowest(timings)])
    sizes = map(bytes_text, MIDDLE_SIZES)
    titles = ["collective", "ranks", "path", "latency", *sizes, "largest", "at", "fit", "p95", "p99"]
    return [*table_lines(titles, rows, width), Text(f"bus bandwidth by the definitions of {DEFINITIONS}", "dim")]


def _latency(timings: Timings) -> str:
    """Format the fitted latency. If there is none, as with a single size, format the time of the smallest size as an
    upper bound."""
    return seconds_text(timings.latency) if timings.latency else f"< {seconds_text(timings.seconds[0])}"


def _fit(timings: Timings) -> str:
    return f"±{percent_text(timings.residual)}" if len(timings.sizes) > 2 else "-"


def _bus(result: PathResult, size: int) -> str:
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

"""Convert a bench to plain data, for --json.

Every figure is in bytes, seconds or FLOP/s.

Tested in tests/machine/test_bench.py.
"""

from __future__ import annotations

from typing import Any

from meshwise.machine.bench import Bench
from meshwise.machine.measure.result import PathResult
from meshwise.machine.views.machine_dict import machine_dict
from meshwise.spec.bandwidth import DEFINITIONS, algorithm_bandwidth, bus_bandwidth
from meshwise.spec.json_values import json_value

FACTS = ("operation", "source", "target", "path", "ranks", "wrong", "note")


def bench_dict(bench: Bench) -> dict[str, Any]:
    """Convert a bench to plain data, with its measurements and their errors, and the measured machine."""
    return {
        "exit_code": bench.exit_code,
        "stopped": bench.stopped.why if bench.stopped else None,
        "seconds": bench.seconds,
        "definitions": DEFINITIONS,
        "results": [_result(result) for result in bench.results],
        "machine": machine_dict(bench.machine),
    }


def _result(result: PathResult) -> dict[str, Any]:
    t = result.timings
    unknown = (None,) * len(t.sizes)
    columns = zip(t.sizes, t.seconds, t.p95 or unknown, t.p99 or unknown, t.in_step or unknown, strict=True)
    table = [
        {
            "bytes": size,
            "seconds": seconds,
            "p95": p95,
            "p99": p99,
            "in_step": in_step,
            "algorithm_bandwidth": algorithm_bandwidth(size, seconds),
            "bus_bandwidth": bus_bandwidth(result.operation, result.ranks, size, seconds),
        }
        for size, seconds, p95, p99, in_step in columns
    ]
    fit = json_value({"latency": t.latency, "bandwidth": t.bandwidth, "residual": t.residual})
    return {**{name: getattr(result, name) for name in FACTS}, "fit": fit, "sizes": table}

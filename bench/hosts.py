"""What do collectives reach between hosts, and does the fitted model predict sizes that it has not seen?

    python bench/hosts.py        (as root: hosts are network namespaces with shaped links, see tests/hosts.py)

Two and three hosts with links of 200 Mbit/s and 1 Gbit/s. Claims: the bus bandwidth of all-reduce, broadcast and
send/receive is within 10 % of the link's rate, and t = latency + bytes / bandwidth, fitted at some sizes, predicts
others in between, measured in another run, within 10 % (median). Where it cannot run it says so and ends with 0.

A shaped link carries a burst at once after it was idle (2 ms of its rate, and at least 64 KiB), as no real link does.
So sizes are chosen of which the burst is at most 6 %; what smaller ones do is kept, and nothing is claimed of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

from keep import keep

sys.path.insert(0, str(Path(__file__).parents[1]))
from meshwise.machine.measure.processes import paths_between
from meshwise.machine.measure.result import PathResult
from meshwise.spec.bandwidth import DEFINITIONS, bus_bandwidth
from meshwise.spec.timings import seconds_at
from tests.hosts import bits_of, burst_of, hosts, run_on, why_not
from tests.machine.test_shaped_links import measured
from tests.timeline.test_slow_link import bits_a_second

MIB = 1 << 20
SIZES = {  # to fit, and to predict
    "200mbit": ((1 * MIB, 3 * MIB, 8 * MIB), (2 * MIB, 5 * MIB)),
    "1gbit": ((4 * MIB, 12 * MIB, 32 * MIB), (8 * MIB, 20 * MIB)),
}
SMALL = ((1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 * MIB), (4 << 10, 32 << 10, 256 << 10, 2 * MIB))
PATH_SECONDS = 4.0
LIMIT = 0.1
CLAIMED = ("copy", "send-receive", "all-reduce", "broadcast")
DIRECT = "gloo direct"
EXPLAINED = {
    "every path": "a full frame carries 1448 of 1514 bytes (Ethernet, IP, TCP with timestamps): 95.6 % of the rate.",
    "broadcast, gloo": "gloo follows a binomial tree: from three hosts on the source sends the tensor more than once "
    "over its one link. `direct` passes chunks along a chain.",
    "reduce-scatter, gloo": "gloo reduces everything on every rank and keeps a part: the bytes of an all-reduce, half "
    "of the bus bandwidth.",
    "all-gather, gloo": "of two hosts: gloo's receiver says that it is ready over the connection on which it sends its "
    "own part, and behind that, so that the two directions take turns for half of the tensor: 2/3 of the rate.",
    "all-to-all, gloo": "the same: both directions of a pair share one connection, and often take turns: 1/2.",
    "one-to-all, all-to-one": "several flows share a link at one of its ends, and the last one counts.",
}


def main() -> None:
    """Measure, print, keep."""
    reason = why_not()
    if reason is not None:
        print(f"not here: {reason}")
        return
    cases = {}
    for rate in SIZES:
        for count in (2, 3):
            cases[f"{count} hosts, {rate}"] = case = one(rate, count)
            print(f"{count} hosts, links of {rate}; one TCP connection carries {case['tcp_share']:.1%} of it")
            for name, path in case["paths"].items():
                print(f"  {name:<30} {path['bus_share']:6.1%} of the rate, predicted within {path['error']:.1%}")
    small = {rate: small_sizes(rate) for rate in SIZES}
    claims = claims_of(cases)
    keep(
        "hosts", {"definitions": DEFINITIONS, "claims": claims, "cases": cases, "small": small, "explained": EXPLAINED}
    )
    for name, claim in claims.items():
        print(f"{'met' if claim['met'] else 'NOT MET'}  {name}: {claim['value']:.1%}, limit {claim['limit']:.0%}")
    sys.exit(0 if all(claim["met"] for claim in claims.values()) else 1)


def one(rate: str, count: int) -> dict[str, Any]:
    """Every path between `count` hosts: its bus bandwidth at the largest size, and how well it is predicted."""
    fit, unseen = SIZES[rate]
    what = ("links", "collectives", "direct")
    paths = len(paths_between([f"node{number}" for number in range(count)], "gloo", what))
    with hosts(count, rate) as cluster:
        tcp = bits_a_second(cluster[0], cluster[1], fit[-1])
        results = run_on(cluster, measured, fit, paths * PATH_SECONDS, what)[0]
        others = run_on(cluster, measured, unseen, paths * PATH_SECONDS / 2, what)[0]
    found = {}
    for result, other in zip(results, others, strict=True):
        size, seconds = result.timings.sizes[-1], result.timings.seconds[-1]
        bandwidth = bus_bandwidth(result.operation, result.ranks, size, seconds)
        found[named(result)] = {
            "sizes": result.timings.sizes,
            "seconds": result.timings.seconds,
            "p95": result.timings.p95,
            "bus_bandwidth": bandwidth,
            "bus_share": 8 * bandwidth / bits_of(rate),
            "latency": result.timings.latency,
            "bandwidth": result.timings.bandwidth,
            "predicted": predicted(result, other),
            "error": median(error for _, _, error, _ in predicted(result, other)),
            "wrong": result.wrong or other.wrong,
            "note": result.note or other.note,
        }
    return {"burst": burst_of(rate), "tcp_share": tcp / bits_of(rate), "paths": found}


def predicted(fit: PathResult, other: PathResult) -> list[tuple[int, float, float, float]]:
    """Of each unseen size: bytes, seconds, and the relative errors of the line and of the interpolated table."""
    timings = fit.timings
    rows = []
    for size, seconds in zip(other.timings.sizes, other.timings.seconds, strict=True):
        line = timings.latency + size / timings.bandwidth
        rows.append((size, seconds, abs(line / seconds - 1), abs(seconds_at(timings, size) / seconds - 1)))
    return rows


def small_sizes(rate: str) -> dict[str, Any]:
    """The same from 1 KiB on between two hosts, where latency and the burst count; nothing is claimed of it."""
    with hosts(2, rate) as cluster:
        results, others = (run_on(cluster, measured, sizes, 40.0, ("links", "collectives"))[0] for sizes in SMALL)
    return {
        named(result): {
            "sizes": result.timings.sizes,
            "seconds": result.timings.seconds,
            "residual": result.timings.residual,
            "predicted": predicted(result, other),
        }
        for result, other in zip(results, others, strict=True)
    }


def claims_of(cases: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The worst of each claim over all cases, of the way that meshwise itself takes: composed where that exists."""
    values: dict[str, float] = {}
    errors: list[float] = []
    for operation in CLAIMED:
        shares = []
        for case in cases.values():
            found = {name: path for name, path in case["paths"].items() if of(name, operation)}
            own = {name: path for name, path in found.items() if name.endswith(DIRECT)} or found
            shares += [path["bus_share"] for path in own.values()]
            errors += [error for path in own.values() for _, _, error, _ in path["predicted"]]
        values[f"{operation} off the rate"] = max(abs(share - 1) for share in shares)
    every = [path for case in cases.values() for path in case["paths"].values()]
    values["prediction of these, median error"] = median(errors)
    values["prediction of every path, median error"] = median(e for path in every for _, _, e, _ in path["predicted"])
    return {name: {"value": value, "limit": LIMIT, "met": value <= LIMIT} for name, value in values.items()}


def of(name: str, operation: str) -> bool:
    """Whether a path is of this operation."""
    return name.startswith(operation)


def named(result: PathResult) -> str:
    """The path as it is printed: `copy node0 -> node1, gloo`."""
    ends = f" {result.source} -> {result.target}" if result.source else ""
    return f"{result.operation}{ends}, {result.path}"


if __name__ == "__main__":
    main()

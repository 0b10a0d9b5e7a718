"""Is a slow link told from a slow rank? Three hosts on this machine, with links of known speed and clocks of their own.

    python bench/slow_link.py        (as root: hosts are network namespaces, see tests/hosts.py)

4 MiB of gradients a step. Claims: slow links are called communication-bound and no rank is named; a rank that sleeps
100 ms in its backward is named with its phase and its cost; both are told apart. In gloo's ring all-reduce each of n
ranks sends 2 (n - 1) / n of the bytes over its link, so the bus bandwidth should come near to what the link carries.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from keep import keep

sys.path.insert(0, str(Path(__file__).parents[1]))
from meshwise.timeline.run_report import Report
from tests.hosts import hosts, run_on, why_not
from tests.timeline.sleeping import measured
from tests.timeline.test_slow_link import bits_a_second

STEPS, SIZE, REPEATS = 20, 1 << 20, 3
AHEAD = (0, 7, 400)
SLOW = {1: {"backward": 100.0}}
CASES: dict[str, tuple[list[str | None], dict[int, dict[str, float]], set[str]]] = {
    "links of 200 Mbit/s": (["200mbit"] * 3, {}, {"communication"}),
    "rank 1 slow, links as they are": ([None] * 3, SLOW, {"straggler 1 backward"}),
    "rank 1 slow, links of 200 Mbit/s": (["200mbit"] * 3, SLOW, {"communication", "straggler 1 backward"}),
    "rank 1 slow, links of 1 Gbit/s": (["1gbit"] * 3, SLOW, {"communication", "straggler 1 backward"}),
    "rank 0's link 50 Mbit/s, others 1 Gbit/s": (["50mbit", "1gbit", "1gbit"], {}, {"communication"}),
    "rank 1's link 50 Mbit/s, others 1 Gbit/s": (["1gbit", "50mbit", "1gbit"], {}, {"communication"}),
    "rank 2's link 50 Mbit/s, others 1 Gbit/s": (["1gbit", "1gbit", "50mbit"], {}, {"communication"}),
}


def one(case: str) -> dict[str, Any]:
    """One run of a case: what is found, and how far it is from what was set."""
    rates, late, expected = CASES[case]
    with tempfile.TemporaryDirectory() as folder, hosts(3, rates, AHEAD) as cluster:
        link = min(bits_a_second(cluster[at], cluster[at - 1], 8_000_000) for at in range(3)) / 8
        _, report, _ = measured(partial(run_on, cluster), Path(folder), STEPS, late, ranks=3, size=SIZE)
    found = {_named(finding.kind, finding.rank, finding.phase): finding for finding in report.findings}
    bandwidth = max((c.bytes, c.bus_bandwidth or 0.0) for c in report.collectives if c.name == "all-reduce")[1]
    return {
        "verdict": report.verdict,
        "found": {name: {"seconds_a_step": finding.seconds, "share": finding.share} for name, finding in found.items()},
        "as_expected": set(found) - {"compute"} == expected,
        "step_seconds": report.step_seconds,
        "bus_bandwidth": bandwidth,
        "tcp_bytes_a_second": link,
        "bus_bandwidth_of_tcp": bandwidth / link,
        "clock_off_seconds": _clock_off(report),
        "clock_error_seconds": report.error_seconds,
    }


def _named(kind: str, rank: int | None, phase: str | None) -> str:
    return kind if rank is None else f"{kind} {rank} {phase}"


def _clock_off(report: Report) -> float:
    """The largest difference between a clock's offset, as it was found, and as it was set."""
    return max(abs(clock.offset_seconds + AHEAD[clock.rank]) for clock in report.clocks)


def main() -> None:
    """Measure, print, keep."""
    reason = why_not(own_clocks=True)
    if reason is not None:
        sys.exit(f"not here: {reason}")
    result: dict[str, Any] = {"steps": STEPS, "bytes": 4 * SIZE, "slow_seconds": 0.1, "cases": {}}
    for case in CASES:
        runs = [one(case) for _ in range(REPEATS)]
        result["cases"][case] = {"expected": sorted(CASES[case][2]), "runs": runs}
        for run in runs:
            found = ", ".join(f"{name} {value['seconds_a_step'] * 1e3:.0f} ms" for name, value in run["found"].items())
            print(
                f"{case:42} {'yes' if run['as_expected'] else 'NO ':3} {run['bus_bandwidth_of_tcp']:.0%}  {found}",
                flush=True,
            )
    keep("slow_link", result)


if __name__ == "__main__":
    main()

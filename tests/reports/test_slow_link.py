"""Three ranks on three hosts: a slow link is told from a slow rank, by name and by what each costs.

Hosts are network namespaces with shaped links and clocks of their own (tests/hosts.py). The expected bus bandwidth is
the links': in gloo's ring all-reduce each of n ranks sends 2 (n - 1) / n of the bytes over its link, and as much comes
in at the same time.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from meshwise.reports.run_report import Finding, Report
from tests.hosts import NAMESPACES, Host, hosts, run_on, why_not
from tests.reports.sleeping import measured

pytestmark = [pytest.mark.usefixtures("processes"), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

AHEAD = (0, 7, 400) if why_not(own_clocks=True) is None else ()
"""Seconds by which the hosts' clocks are ahead."""
SERVE = """
import socket, time
server = socket.create_server(("", 5001))
print("ready", flush=True)
line = server.accept()[0]
line.recv(1)
began, seen = time.perf_counter(), 0
while part := line.recv(1 << 20):
    seen += len(part)
print(8 * seen / (time.perf_counter() - began))
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 5001)).sendall(bytes(int(sys.argv[2])))"


def bits_a_second(sender: Host, receiver: Host, size: int) -> float:
    """Of data, in one TCP connection that carries `size` bytes."""
    server = receiver.popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    assert sender.popen([sys.executable, "-c", SEND, receiver.address, str(size)]).wait() == 0
    return float(server.communicate()[0])


def test_a_link_carries_what_it_is_shaped_to_in_both_directions() -> None:
    with hosts(2, ["200mbit", None]) as (slow, fast):
        assert 80e6 < bits_a_second(slow, fast, 6_000_000) < 220e6  # a busy core carries less, and never more
        assert 80e6 < bits_a_second(fast, slow, 6_000_000) < 220e6
    with hosts(2, None) as (one, other):
        assert bits_a_second(one, other, 100_000_000) > 5e8


def test_hosts_end_with_what_runs_on_them_whatever_happens() -> None:
    process = None
    with pytest.raises(KeyboardInterrupt), hosts(1, None) as (host,):
        name = host.namespace
        assert (NAMESPACES / name).exists()
        process = host.popen(["sleep", "1000"])
        raise KeyboardInterrupt
    assert process is not None and process.returncode is not None
    assert not (NAMESPACES / name).exists()


def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    code = "from tests.hosts import hosts\nwith hosts(2, '1gbit') as h:\n  print(h[0].namespace, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        name = other.stdout.readline().strip()
        with hosts(1, None):
            assert (NAMESPACES / name).exists()  # its process lives
        other.kill()
    with hosts(1, None):
        assert not (NAMESPACES / name).exists()


@pytest.mark.skipif(not AHEAD, reason=str(why_not(own_clocks=True)))
def test_a_host_has_a_clock_of_its_own() -> None:
    with hosts(2, None, AHEAD) as cluster:
        code = "import time; print(time.perf_counter())"
        said = [host.popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for host in cluster]
        here, there = (float(process.communicate()[0]) for process in said)
    assert there - here == pytest.approx(7, abs=5)


def run(
    folder: Path,
    rate: str | Sequence[str | None] | None,
    late: Mapping[int, Mapping[str, float]],
    steps: int,
    size: int,
) -> tuple[Report, dict[str, Finding]]:
    """The report of three ranks with links of this rate and late by so many ms; its findings by kind."""
    with hosts(3, rate, AHEAD) as cluster:
        _, report, _ = measured(partial(run_on, cluster), folder, steps, late, ranks=3, size=size, machines=3)
    assert report.missing == [] and report.steps == steps
    return report, {finding.kind: finding for finding in report.findings}


def clocks_are_right(report: Report) -> bool:
    """Whether each clock's offset is within its error of the one that its host was given."""
    ahead = dict(enumerate(AHEAD))
    return all(
        abs(clock.offset_seconds + ahead.get(clock.rank, 0)) <= clock.error_seconds < 0.005 for clock in report.clocks
    )


def cause(report: Report) -> Finding:
    """What takes most: after the verdict, where that is that the devices are slower than one."""
    assert report.verdict == report.findings[0].sentence
    return next(finding for finding in report.findings if finding.kind != "slower")


def bus_bandwidth(report: Report) -> float:
    """Bytes a second of the gradients' all-reduce."""
    return max((c.bytes, c.bus_bandwidth or 0.0) for c in report.collectives if c.name == "all-reduce")[1]


@pytest.mark.slow
def test_a_slow_rank_on_fast_links_is_named(tmp_path: Path) -> None:
    report, found = run(tmp_path, None, {1: {"backward": 100.0}}, steps=14, size=1 << 18)
    assert clocks_are_right(report)
    late = found["straggler"]
    assert report.verdict == late.sentence
    assert (late.rank, late.phase) == (1, "backward") and late.seconds == pytest.approx(0.100, rel=0.2)
    assert "communication" not in found or found["communication"].seconds < 0.02  # what two busy cores make of it


@pytest.mark.slow
def test_slow_links_are_no_rank(tmp_path: Path) -> None:
    report, found = run(tmp_path, "100mbit", {}, steps=20, size=1 << 19)
    assert clocks_are_right(report)
    assert cause(report) == found["communication"] and "sending is slow, not a rank" in cause(report).sentence
    assert "straggler" not in found
    assert bus_bandwidth(report) == pytest.approx(100e6 / 8, rel=0.15)


@pytest.mark.slow
def test_slow_links_and_a_slow_rank_are_both_found(tmp_path: Path) -> None:
    report, found = run(tmp_path, "100mbit", {1: {"backward": 100.0}}, steps=20, size=1 << 19)
    assert clocks_are_right(report)
    late, communication = found["straggler"], found["communication"]
    assert (late.rank, late.phase) == (1, "backward") and late.seconds == pytest.approx(0.100, rel=0.2)
    # Counted once each: 2 MiB at 100 Mbit/s, and the sleep.
    assert communication.seconds == pytest.approx(4 / 3 * 2 * (1 << 20) / 12.5e6, rel=0.2)
    assert bus_bandwidth(report) == pytest.approx(100e6 / 8, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("slow", range(3))
def test_one_slow_link_is_no_slow_rank(tmp_path: Path, slow: int) -> None:
    rates = ["50mbit" if rank == slow else "1gbit" for rank in range(3)]
    report, found = run(tmp_path, rates, {}, steps=20, size=1 << 18)
    assert clocks_are_right(report)
    assert cause(report) == found["communication"]
    assert "straggler" not in found and "imbalance" not in found

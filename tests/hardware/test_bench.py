"""A bench as a value: what was measured finds its place in the machine, and gives an exit code."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from meshwise.hardware.measure.result import Bench, DeviceResult, PathResult, Stop, bench_of, merged, only_devices
from meshwise.hardware.views.bench import bench_dict, bench_text, done_text
from meshwise.hardware.words import machine_from_words
from meshwise.spec.machine import Device, Host, Machine, Matmul, link_between
from meshwise.spec.timings import Timings, fitted

SIZES = tuple(1 << power for power in range(10, 31, 2))


def line(rate: float, latency: float = 1e-5) -> Timings:
    seconds = [latency + size / rate for size in SIZES]
    return fitted(SIZES, seconds, seconds, seconds)


def result(operation: str, source: str, target: str, path: str, rate: float, wrong: str | None = None) -> PathResult:
    return PathResult(operation, source, target, path, 2, line(rate), wrong)


PAIR = only_devices(machine_from_words("2xH100"), ["cuda:0", "cuda:1"])
GOOD = [
    result("copy", "host", "cuda:0", "pinned", 55e9),
    result("copy", "cuda:0", "cuda:1", "peer", 395e9),
    result("all-reduce", "", "", "nccl", 300e9),
]


def bench(results: list[PathResult], computed: list[DeviceResult] | None = None, stopped: Stop | None = None) -> Bench:
    return bench_of(PAIR, results, computed or [], measured="2026-11-21, torch 2.13.0", seconds=1.5, stopped=stopped)


def shown(found: Bench, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(bench_text(found, width), soft_wrap=True)
    return console.export_text()


def test_copies_become_timings_of_links_and_collectives_stay_collectives() -> None:
    machine = bench(GOOD).machine
    there = link_between(machine, "cuda:0", "cuda:1")
    assert there is not None and set(there.timings) == {"peer"}
    assert [c.kind for c in machine.collectives] == ["all-reduce"]
    assert machine.measured.startswith("2026-11-21")


def test_a_link_that_was_known_for_any_pair_keeps_its_facts() -> None:
    there = link_between(bench(GOOD).machine, "cuda:0", "cuda:1")
    assert there is not None and there.kind == "nvlink" and there.bandwidth == 450e9


def test_what_is_well_ends_with_0() -> None:
    assert bench(GOOD).exit_code == 0


def test_corrupt_data_ends_with_1_whatever_its_speed_and_has_none() -> None:
    wrong = "cuda:0 -> cuda:1, peer: byte 77 of 1,024 is not what was sent"
    found = bench([*GOOD, result("copy", "cuda:0", "cuda:1", "staged", 1e9, wrong)])
    assert found.exit_code == 1 and found.wrong[0].wrong == wrong
    link = link_between(found.machine, "cuda:0", "cuda:1")
    assert link is not None and "staged" not in link.timings
    text = shown(found)
    assert f"corrupt     {wrong}" in " ".join(text.split("\n")) and "3 of 4 paths delivered the bytes" in text


def test_computed_figures_are_of_their_device() -> None:
    computed = [DeviceResult("cuda:1", 2.5e12, (Matmul("bf16", 8192, 8192, 8192, 1.4e-3),), 5e-6)]
    first, second = bench([], computed).machine.devices
    assert first.memory_rate is None and second.memory_rate == 2.5e12 and second.launch == 5e-6
    text = shown(bench([], computed))
    assert "cuda:1" in text and "785 TFLOP/s 79 %" in text and "2.50 TB/s" in text


def test_cpu_workers_share_the_cpu_of_the_host() -> None:
    here = Machine("here", (Device("cpu:0", "some processor", memory=1 << 30),), hosts=(Host(cores=2),))
    two = only_devices(here, ["cpu:0", "cpu:1"])
    assert [device.name for device in two.devices] == ["cpu:0", "cpu:1"]
    assert {device.part for device in two.devices} == {"some processor"}
    found = bench_of(two, [result("copy", "cpu:0", "cpu:1", "gloo", 1e9)], [], measured="now", seconds=1.0)
    (link,) = found.machine.links
    assert (link.source, link.target, link.kind, list(link.timings)) == ("cpu:0", "cpu:1", "process", ["gloo"])
    assert found.exit_code == 0


def test_hosts_are_merged_with_a_warning_where_versions_differ() -> None:
    there = Machine("there", (Device("cuda:0", "H100-SXM"),), hosts=(Host("b"),), versions={"torch": "2.12.0"})
    here = Machine("here", (Device("cuda:0", "H100-SXM"),), hosts=(Host("a"),), versions={"torch": "2.13.0"})
    both = merged([here, there])
    assert [(device.name, device.host) for device in both.devices] == [("cuda:0", 0), ("cuda:0", 1)]
    assert [host.name for host in both.hosts] == ["a", "b"] and both.name == "2 hosts"
    assert both.warnings == ("node1 has torch 2.12.0, node0 has 2.13.0: make them equal",)


def test_json_has_every_figure_and_no_infinity() -> None:
    flat = PathResult("copy", "host", "cuda:0", "pinned", 2, fitted((1024,), (1e-5,)), None)
    told = json.loads(json.dumps(bench_dict(bench([*GOOD, flat], stopped=Stop("by Ctrl-C", 130))), allow_nan=False))
    row = told["results"][2]["sizes"][-1]
    assert told["definitions"] == "nccl-tests" and told["stopped"] == "by Ctrl-C" and told["exit_code"] == 130
    assert row["bus_bandwidth"] == row["algorithm_bandwidth"] and row["p99"] == row["seconds"]  # two ranks: factor 1


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_screen_and_no_number_is_cut(width: int) -> None:
    eight = only_devices(machine_from_words("8xH100"), [f"cuda:{i}" for i in range(8)])
    pairs = [result("copy", f"cuda:{a}", f"cuda:{b}", "peer", 395e9) for a in range(8) for b in range(8) if a != b]
    found = bench_of(eight, [*pairs, *GOOD[2:]], [], measured="now", seconds=1.0)
    lines = shown(found, width).splitlines()
    assert max(map(len, lines)) <= width and "…" not in "".join(lines)
    assert "393.6" in "".join(lines)


def test_one_line_for_what_was_just_measured() -> None:
    assert done_text(GOOD[0]) == "copy host -> cuda:0, pinned: 55.0 GB/s at 1.0 GiB"
    assert done_text(result("all-reduce", "", "", "gloo", 1e9, "rank 1")) == "all-reduce, gloo: corrupt"
    assert done_text(DeviceResult("cpu:0", 2e10)) == "cpu:0: memory at 20.0 GB/s"


def test_what_is_kept_has_four_digits() -> None:
    found = bench([result("copy", "host", "cuda:0", "pinned", 55.4321987e9)], [DeviceResult("cuda:0", 123.456789e9)])
    link = link_between(found.machine, "host", "cuda:0")
    assert link is not None and found.machine.devices[0].memory_rate == 123.5e9
    assert all(float(f"{s:.4g}") == s for s in link.timings["pinned"].seconds)

"""Measured against what the parts should reach: the level, the cause, and nothing said where nothing is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from machine.machines import machines

from meshwise.machine.judge import SLOW_CAUSES, Verdict, exit_code, judge, sentence
from meshwise.machine.words import machine_from_words
from meshwise.spec.bandwidth import bus_factor
from meshwise.spec.machine import Collective, Link, Machine, Matmul
from meshwise.spec.timings import Timings, fitted

SIZES = (2**20, 2**25, 2**30)


def timings(rate: float) -> Timings:
    return fitted(SIZES, [size / (rate * (1 if size == SIZES[-1] else 0.5)) for size in SIZES])


def described(words: str, *links: Link) -> Machine:
    return replace(machine_from_words(words), links=links)


def on_host(rate: float, path: str = "pinned", **facts: object) -> Link:
    return Link("host", "cuda:0", "pcie", timings={path: timings(rate)}, **facts)  # type: ignore[arg-type]


def between(rate: float, path: str = "peer", kind: str = "nvlink", **facts: object) -> Link:
    return Link("cuda:0", "cuda:1", kind, timings={path: timings(rate)}, **facts)  # type: ignore[arg-type]


def verdict_of(words: str, *links: Link, path: str = "") -> Verdict:
    found = [v for v in judge(described(words, *links)) if v.what.endswith(path)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("share", "level"),
    [(1.2, "good"), (0.86, "good"), (0.84, "low"), (0.61, "low"), (0.59, "far below"), (0.01, "far below")],
)
def test_levels(share: float, level: str) -> None:
    verdict = verdict_of("H100-SXM", on_host(share * 0.88 * 63e9))
    assert (verdict.level, verdict.what) == (level, "host -> cuda:0, pinned")
    assert verdict.expected == pytest.approx(0.88 * 63e9) and verdict.measured == pytest.approx(share * 0.88 * 63e9)
    assert "63.0 GB/s" in verdict.origin and "88 %" in verdict.origin


def test_the_best_rate_over_the_sizes_counts() -> None:
    assert verdict_of("H100-SXM", on_host(55e9)).measured == pytest.approx(55e9)


def test_a_slow_link_has_its_cause_in_words_and_numbers() -> None:
    narrow = verdict_of("V100-PCIe", on_host(6.1e9, generation=3, width=8))
    assert (narrow.level, narrow.causes) == ("far below", ("narrow-pcie",))
    assert "8 of 16 lanes" in narrow.why[0]
    assert "8 of 16 lanes" in sentence(narrow) and "47 % of the 13.1 GB/s expected" in sentence(narrow)
    old = verdict_of("H100-SXM", on_host(26e9, generation=4, width=16))
    assert (old.level, old.causes) == ("far below", ("old-pcie-generation",)) and "generation 4 of 5" in old.why[0]
    both = verdict_of("H100-SXM", on_host(6e9, generation=3, width=8))
    assert both.causes == ("narrow-pcie", "old-pcie-generation")
    idle = verdict_of("H100-SXM", on_host(3e9, generation=1, width=16))
    assert idle.causes == ("idle-link",)
    woke = verdict_of("H100-SXM", on_host(26e9, generation=2, width=16))
    assert woke.causes == ("idle-link",)  # faster than generation 2 can be
    other = verdict_of("H100-SXM", on_host(30e9, crosses="socket"))
    assert other.causes == ("other-socket",)


def test_a_good_link_has_no_cause() -> None:
    assert verdict_of("H100-SXM", on_host(55e9, generation=1, width=8, crosses="socket")).causes == ()


def test_an_unknown_part_is_judged_by_what_its_link_says_it_can_do() -> None:
    machine = described("H100-SXM", on_host(13e9, full_generation=4, full_width=8))
    machine = replace(machine, devices=(replace(machine.devices[0], part="NVIDIA Something"),))
    (verdict,) = judge(machine)
    assert verdict.level == "good" and verdict.expected == pytest.approx(0.83 * 15.75e9)
    assert "what the device reports" in verdict.origin
    bare = replace(machine, links=(replace(machine.links[0], full_generation=None, full_width=None),))
    assert (judge(bare)[0].level, judge(bare)[0].expected) == ("unknown", None)


def test_pageable_memory_is_told_and_not_judged() -> None:
    verdict = verdict_of("H100-SXM", on_host(6e9, "pageable"))
    assert (verdict.level, verdict.expected, verdict.causes) == ("unknown", None, ("pageable",))


def test_both_ways_is_judged_by_each_direction() -> None:
    good = verdict_of("A100-SXM", on_host(18.6e9, "pinned both ways"))
    assert good.level == "good" and good.expected == pytest.approx(0.59 * 31.5e9)
    assert verdict_of("2xH100-SXM", between(390e9, "peer both ways")).level == "good"
    assert verdict_of("2xH100-SXM", between(200e9, "peer both ways")).level == "far below"


def test_links_between_devices() -> None:
    assert verdict_of("2xH100-SXM", between(376e9, width=18)).level == "good"
    fewer = verdict_of("2xH100-SXM", between(250e9, width=12, generation=4))
    assert (fewer.level, fewer.causes) == ("low", ("fewer-links",)) and "12 of 18" in fewer.why[0]
    bridged = verdict_of("2xH100-NVL", between(260e9, width=12, generation=4))
    assert (bridged.level, bridged.causes) == ("good", ())  # 12 links are all that this part has
    off = verdict_of("2xA100-PCIe", between(14e9, "staged", kind="pcie", peer=False, crosses="bridge"))
    assert (off.level, off.causes) == ("far below", ("peer-off", "through-bridge"))
    mesh = verdict_of("2xV100-SXM2-32GB", between(48e9, generation=2, width=2))
    assert (mesh.level, mesh.causes) == ("good", ())


def test_a_staged_path_is_judged_by_its_slower_leg() -> None:
    legs = [Link("host", "device", "pcie"), Link("device", "host", "pcie")]
    verdict = verdict_of("2xRTX-4090", *legs, between(24e9, "staged", kind="pcie", peer=False))
    assert (verdict.level, verdict.causes) == ("good", ("peer-off",))
    assert verdict.expected == pytest.approx(0.83 * 31.5e9) and "slower leg" in verdict.origin
    half = [replace(leg, generation=4, width=8) for leg in legs]
    slow = verdict_of("2xRTX-4090", *half, between(12e9, "staged", kind="pcie", peer=False))
    assert slow.level == "far below" and set(slow.causes) == {"narrow-pcie", "peer-off"}
    alone = verdict_of("2xRTX-4090", between(24e9, "staged", kind="pcie", peer=False))
    assert (alone.level, alone.expected) == ("unknown", None)


def collective(words: str, kind: str, ranks: int, bus: float, backend: str = "nccl") -> Verdict:
    factor = bus_factor(kind, ranks) or 1.0
    measured = fitted(SIZES, [factor * size / bus for size in SIZES])
    return judge(replace(machine_from_words(words), collectives=(Collective(kind, ranks, backend, measured),)))[0]


def test_collectives_by_their_bus_bandwidth() -> None:
    ring = collective("8xH200", "all-reduce", 8, 366e9)
    assert (ring.level, ring.causes) == ("good", ()) and ring.measured == pytest.approx(366e9)
    assert ring.what == "all-reduce, 8 ranks, nccl" and ring.expected == pytest.approx(0.81 * 450e9)
    assert collective("8xH200", "all-reduce", 8, 473e9).causes == ("in-network",)
    assert collective("8xH200", "all-gather", 8, 361e9).level == "good"
    assert collective("8xH200", "all-reduce", 8, 150e9).level == "far below"
    assert collective("8xB200", "all-reduce", 8, 682e9).level == "good"
    borrowed = collective("8xH200", "broadcast", 8, 360e9)
    assert borrowed.level == "good" and "none was measured of broadcast" in borrowed.origin
    assert collective("8xMI300X", "all-reduce", 8, 312.9e9).level == "good"
    assert collective("8xMI300X", "all-reduce", 2, 47.7e9).level == "good"  # one link of seven


def test_collectives_between_hosts_by_the_network() -> None:
    assert collective("2x8xH100@3200Gb", "all-reduce", 16, 330e9).level == "good"
    assert collective("2x8xH100@200Gb", "all-reduce", 16, 23.5e9).level == "good"
    assert collective("3x1xcpu@200Gb", "all-reduce", 3, 23.7e9, "gloo").level == "good"
    assert collective("3x1xcpu@200Gb", "all-reduce", 3, 12e9, "gloo").level == "far below"
    assert collective("3x1xcpu@200Gb", "all-gather", 3, 16.2e9, "gloo").level == "good"  # gloo's reaches 65 %
    assert collective("2x8xH100", "all-reduce", 16, 330e9).level == "unknown"


def test_what_has_no_expectation_is_unknown() -> None:
    assert collective("4xcpu", "all-reduce", 4, 1e9, "gloo").level == "unknown"
    assert collective("8xH100", "one-to-all", 8, 1e9).level == "unknown"
    assert collective("8xH100", "all-reduce", 1, 1e9).level == "unknown"
    assert collective("8xL4", "all-reduce", 8, 1e9).level == "unknown"  # nobody measured PCIe
    assert verdict_of("GH200", Link("host", "cuda:0", "c2c", timings={"pinned": timings(4e11)})).level == "unknown"


def test_links_between_hosts() -> None:
    machine = machine_from_words("2x1xcpu@1Gb")
    link = Link("node0", "node1", "network", timings={"gloo": timings(0.119e9)})
    good = judge(replace(machine, links=(*machine.links, link)))
    assert [(v.what, v.level) for v in good] == [("node0 -> node1, gloo", "good")]
    slow = judge(replace(machine, links=(*machine.links, replace(link, timings={"gloo": timings(0.05e9)}))))
    assert slow[0].level == "far below"


def test_memory_and_matmuls() -> None:
    machine = described("H200")
    device = replace(
        machine.devices[0],
        memory_rate=4.3e12,
        matmuls=tuple(
            Matmul(dtype, 8192, 8192, 8192, 2 * 8192**3 / rate)
            for dtype, rate in (("bf16", 780e12), ("bf16", 100e12), ("fp8", 500e12), ("fp64", 60e12))
        ),
    )
    found = {verdict.what: verdict for verdict in judge(replace(machine, devices=(device,)))}
    assert {what: verdict.level for what, verdict in found.items()} == {
        "cuda:0, memory": "good",
        "cuda:0, bf16 matmul": "good",
        "cuda:0, fp8 matmul": "far below",
        "cuda:0, fp64 matmul": "unknown",
    }
    assert found["cuda:0, bf16 matmul"].expected == pytest.approx(0.803 * 989.5e12)
    assert found["cuda:0, bf16 matmul"].measured == pytest.approx(780e12)
    assert found["cuda:0, fp8 matmul"].causes == ("power-or-clocks",)
    assert "TFLOP/s" in sentence(found["cuda:0, fp8 matmul"])
    assert "mamf" in found["cuda:0, bf16 matmul"].origin


def test_a_processor_has_no_expectation() -> None:
    machine = machine_from_words("cpu")
    device = replace(machine.devices[0], memory_rate=1e10, matmuls=(Matmul("fp32", 64, 64, 64, 1e-4),))
    assert {verdict.level for verdict in judge(replace(machine, devices=(device,)))} == {"unknown"}


def test_a_share_of_nothing_is_no_expectation() -> None:
    machine = machine_from_words("H100")
    device = replace(machine.devices[0], achievable={"bf16": 0.0}, matmuls=(Matmul("bf16", 64, 64, 64, 1e-4),))
    (verdict,) = judge(replace(machine, devices=(device,)))
    assert (verdict.level, verdict.expected) == ("unknown", None)


def test_devices_of_several_hosts_are_told_apart() -> None:
    machine = machine_from_words("2x1xH100-SXM@400Gb")
    devices = tuple(replace(device, memory_rate=3e12) for device in machine.devices)
    found = [verdict.what for verdict in judge(replace(machine, devices=devices))]
    assert found == ["node0 cuda:0, memory", "node1 cuda:0, memory"]


def test_exit_codes() -> None:
    good, low, far, corrupt = (
        Verdict("x", level, 1.0, 1.0, (), "") for level in ("good", "low", "far below", "corrupt")
    )
    assert exit_code([], False) == exit_code([good, low], False) == 0
    assert exit_code([good, far], False) == 3
    assert exit_code([good, far], True) == exit_code([], True) == exit_code([far, corrupt], False) == 1


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(machines())
def test_any_machine_can_be_judged(machine: Machine) -> None:
    for verdict in judge(machine):
        assert verdict.level in ("good", "low", "far below", "unknown")
        assert (verdict.expected is None) == (verdict.level == "unknown")
        assert set(verdict.causes) <= set(SLOW_CAUSES) and len(verdict.why) == len(verdict.causes)
        assert verdict.origin and sentence(verdict).startswith(verdict.what) and "{" not in "".join(verdict.why)


def test_small_messages_say_nothing_of_a_rate() -> None:
    small = fitted((1024, 65536), [5e-6 + size / 55e9 for size in (1024, 65536)])
    link = Link("host", "cuda:0", "pcie", timings={"pinned": small})
    machine = replace(described("2xH100", link), collectives=(Collective("all-reduce", 2, "nccl", small),))
    verdicts = judge(machine)
    assert [verdict.level for verdict in verdicts] == ["unknown", "unknown"] and exit_code(verdicts, False) == 0
    assert all("too small for a rate" in verdict.origin for verdict in verdicts)

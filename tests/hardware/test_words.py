"""A machine in words: forgiving in spelling, exact in what it says, unknown where nobody knows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise.hardware.catalog import parts
from meshwise.hardware.words import machine_from_words
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import MOST_DEVICES, link_between


def test_eight_devices_of_one_host() -> None:
    machine = machine_from_words("8xH100")
    assert [device.name for device in machine.devices] == [f"cuda:{index}" for index in range(8)]
    assert {device.part for device in machine.devices} == {"H100-SXM"} and len(machine.hosts) == 1
    device = machine.devices[0]
    assert (device.memory, device.memory_bandwidth, device.peak["bf16"]) == (80 * 2**30, 3.35e12, 989.5e12)
    assert device.achievable["bf16"] == 0.803
    assert {"memory", "memory_bandwidth", "peak", "achievable"} <= set(device.origins)
    to = link_between(machine, "host", "cuda:3")
    between = link_between(machine, "cuda:0", "cuda:7")
    assert to is not None and (to.kind, to.bandwidth) == ("pcie", 63e9)
    assert between is not None and (between.kind, between.bandwidth, between.peer) == ("nvlink", 450e9, True)
    assert link_between(machine, "node0", "node1") is None


def test_two_hosts_and_their_network() -> None:
    machine = machine_from_words("2x8xA100-80GB@200Gb")
    assert [(device.host, device.name) for device in machine.devices][7:9] == [(0, "cuda:7"), (1, "cuda:0")]
    assert {device.part for device in machine.devices} == {"A100-SXM-80GB"} and len(machine.hosts) == 2
    network = link_between(machine, "node0", "node1")
    assert network is not None and (network.kind, network.bandwidth) == ("network", 25e9)
    assert "200Gb" in network.origin


def test_a_part_without_peer_access() -> None:
    link = link_between(machine_from_words("4xRTX4090"), "cuda:0", "cuda:1")
    assert link is not None and (link.kind, link.peer, link.crosses) == ("pcie", False, "bridge")


def test_links_that_are_spread_over_a_mesh() -> None:
    link = link_between(machine_from_words("8xMI300X"), "cuda:0", "cuda:1")
    assert link is not None and (link.kind, link.bandwidth, link.full_width) == ("xgmi", 64e9, 1)


def test_processors_have_no_figures() -> None:
    machine = machine_from_words("4xcpu")
    assert [device.name for device in machine.devices] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert machine.devices[0].memory is None and machine.devices[0].peak == {}
    link = link_between(machine, "cpu:0", "cpu:1")
    assert link is not None and (link.kind, link.bandwidth) == ("process", None)
    assert any("meshwise bench" in warning for warning in machine.warnings)


@pytest.mark.parametrize(
    ("words", "part", "count"),
    [
        ("H100", "H100-SXM", 1),
        ("8XH100", "H100-SXM", 8),
        (" 8 x h100 ", "H100-SXM", 8),
        ("8×H100", "H100-SXM", 8),
        ("4x RTX 4090", "RTX-4090", 4),
        ("4xrtx-4090", "RTX-4090", 4),
        ("4x4090", "RTX-4090", 4),
        ("4xGeForce RTX 4090", "RTX-4090", 4),
        ("a100 80gb", "A100-SXM-80GB", 1),
        ("A100-40GB", "A100-SXM-40GB", 1),
        ("A100-PCIe", "A100-PCIe-80GB", 1),
        ("A100 PCIe 40GB", "A100-PCIe-40GB", 1),
        ("A100-SXM4-40GB", "A100-SXM-40GB", 1),
        ("H100-PCIe", "H100-PCIe", 1),
        ("H100NVL", "H100-NVL", 1),
        ("NVIDIA H100 SXM5 80GB", "H100-SXM", 1),
        ("V100-16GB", "V100-SXM2-16GB", 1),
        ("A6000", "RTX-A6000", 1),
        ("RTX 8000", "Quadro-RTX-8000", 1),
        ("RTX 6000 Ada", "RTX-6000-Ada", 1),
        ("AMD Instinct MI300X", "MI300X", 1),
        ("H200", "H200-SXM", 1),
        ("cpu", "cpu", 1),
    ],
)
def test_spelling_is_forgiven(words: str, part: str, count: int) -> None:
    machine = machine_from_words(words)
    assert {device.part for device in machine.devices} == {part} and len(machine.devices) == count


@pytest.mark.parametrize("name", [part.name for part in parts()])
def test_every_part_of_the_catalog_has_its_name(name: str) -> None:
    machine = machine_from_words(f"2x{name}")
    assert {device.part for device in machine.devices} == {name}
    assert not any("is taken as" in warning for warning in machine.warnings)


def test_what_was_assumed_is_said() -> None:
    assert any("H100 is taken as H100-SXM" in w and "H100-PCIe" in w for w in machine_from_words("H100").warnings)
    assert machine_from_words("8xB200").warnings == ()
    unknown = machine_from_words("2x8xH100-SXM")
    assert link_between(unknown, "node0", "node1").bandwidth is None  # type: ignore[union-attr]
    assert any("network" in w and "@200Gb" in w for w in unknown.warnings)
    assert any("peak.bf16" in w for w in machine_from_words("H100-NVL").warnings)
    assert any("only one host" in w for w in machine_from_words("8xH100-SXM@200Gb").warnings)


@pytest.mark.parametrize(
    ("rate", "bandwidth"),
    [
        ("200Gb", 25e9),
        ("200Gbit", 25e9),
        ("200 Gbit/s", 25e9),
        ("200Gbps", 25e9),
        ("25GB", 25e9),
        ("25GB/s", 25e9),
        ("1.6Tb", 200e9),
        ("8xInfiniBand-NDR", 400e9),
        ("8xNDR", 400e9),
        ("DGX-H100", 400e9),
        ("Ethernet-10", 1.25e9),
    ],
)
def test_the_rate_of_a_host(rate: str, bandwidth: float) -> None:
    link = link_between(machine_from_words(f"2x8xH100@{rate}"), "node0", "node1")
    assert link is not None and link.bandwidth == bandwidth


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("8xH10", "Nearest are"),
        ("8xH101", "H100"),
        ("4xRTX4091", "RTX-4090"),
        ("4xRTX4090 Laptop", "is not a known device"),
        ("TPUv5", "is not a known device"),
        ("8xcuda", "meshwise devices"),
        ("8xgpu", "Write a model such as H100; `meshwise devices` shows what is here"),
        ("", "names no device"),
        ("@200Gb", "names no device"),
        ("8x", "is not a known device"),
        ("0xH100", "the count 0"),
        ("2x0xH100", "the count 0"),
        ("1000000xH100", "the count 1000000"),
        ("1000x1000xH100", "1,000,000 devices"),
        ("9" * 100 + "xH100", "the count 999999999"),
        ("-1xH100", "is not a known device"),
        ("2x8x2xH100", "is not a known device"),
        ("2x8xH100@200", "@200Gb (Gbit/s)"),
        ("2x8xH100@", "@200Gb (Gbit/s)"),
        ("2x8xH100@0Gb", "@200Gb (Gbit/s)"),
        ("8xH100@fast", "@200Gb (Gbit/s)"),
        ("x" * 10_000, "10,000 characters"),
    ],
)
def test_what_cannot_be_read_is_told(words: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        machine_from_words(words)
    assert message in str(caught.value) and len(str(caught.value)) < 1200


def test_the_most_devices_can_be_described() -> None:
    assert len(machine_from_words(f"{MOST_DEVICES // 8}x8xH100@400Gb").devices) == MOST_DEVICES


@settings(deadline=None)
@given(st.text(max_size=300) | st.lists(st.sampled_from(["8", "x", "H100", "@", "Gb", " ", "²", "cpu"])).map("".join))
def test_no_words_give_anything_but_a_machine_or_a_sentence(words: str) -> None:
    try:
        machine = machine_from_words(words)
    except UsageError:
        return
    assert 1 <= len(machine.devices) <= MOST_DEVICES


def test_devices_of_two_parts_share_a_host_and_the_slower_link() -> None:
    machine = machine_from_words("2xA100-80GB + 2xV100-SXM2-32GB")
    assert [device.part for device in machine.devices] == ["A100-SXM-80GB"] * 2 + ["V100-SXM2-32GB"] * 2
    assert [device.host for device in machine.devices] == [0] * 4
    link = link_between(machine, "cuda:0", "cuda:3")
    assert link is not None and link.kind == "pcie" and link.bandwidth == pytest.approx(15.75e9, rel=0.01)
    assert any("links are assumed to be those of V100" in warning for warning in machine.warnings)


@pytest.mark.parametrize("words", ["8xH100+8xA100@200Gb", "1x8xH100 + 1x8xA100@200Gb"])
def test_parts_with_a_network_between_are_hosts(words: str) -> None:
    machine = machine_from_words(words)
    assert [device.host for device in machine.devices] == [0] * 8 + [1] * 8
    inside, across = link_between(machine, "cuda:0", "cuda:1"), link_between(machine, "node0", "node1")
    assert inside is not None and across is not None and across.bandwidth == 25e9
    assert inside.kind == "nvlink" and inside.bandwidth == pytest.approx(300e9)


@pytest.mark.parametrize("words", ["A100+", "+A100", "2xA100+2xcpu", "2xA100+2xfoo"])
def test_what_is_no_machine_of_two_parts_is_told(words: str) -> None:
    with pytest.raises(UsageError, match=r"names no device|cannot have both|not a known device"):
        machine_from_words(words)

"""Discovery finds each simulated machine as its vendor's listing has it: devices, matrix, host, warnings."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwise.hardware.discovery.discover import discover
from meshwise.spec.machine import Link, Machine, link_between
from tests.hardware.simulated.expected import EXPECTED, GB, MIB, Expected, Facts
from tests.hardware.simulated.machines import MACHINES, Simulated


def found_in(simulated: Simulated, cores: int, **more: object) -> Machine:
    return discover(simulated.nvml, simulated.sys, simulated.proc, affinity=range(cores), limits={}, environ={}, **more)  # type: ignore[arg-type]


@pytest.fixture(params=MACHINES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Machine, Expected]:
    expected = EXPECTED[request.param]
    return found_in(MACHINES[request.param](tmp_path), expected.cores), expected


def facts_of(link: Link | None) -> Facts | None:
    if link is None:
        return None
    bandwidth = None if link.bandwidth is None else round(link.bandwidth / GB, 3)
    full = (link.full_generation, link.full_width)
    return Facts(link.kind, link.generation, link.width, *full, bandwidth, link.peer, link.crosses)


def test_devices_are_those_of_the_listing(case: tuple[Machine, Expected]) -> None:
    machine, expected = case
    told = tuple((d.name, d.part, round((d.memory or 0) / MIB), d.numa, d.pci) for d in machine.devices)
    assert told == expected.devices


def test_links_to_the_host_are_as_found_and_as_they_could_be(case: tuple[Machine, Expected]) -> None:
    machine, expected = case
    for device in machine.devices:
        for ends in (("host", device.name), (device.name, "host")):
            assert facts_of(link_between(machine, *ends)) == expected.host


def test_the_matrix_is_that_of_the_listing(case: tuple[Machine, Expected]) -> None:
    machine, expected = case
    rows = [row.split() for row in expected.pairs.strip().splitlines()]
    names = [device.name for device in machine.devices]
    wanted = {
        (one, other): expected.links[rows[i][j]]
        for i, one in enumerate(names)
        for j, other in enumerate(names)
        if i != j
    }
    assert {pair: facts_of(link_between(machine, *pair)) for pair in wanted} == wanted
    assert len(machine.links) == len(wanted) + (2 * len(names) if expected.host else 0)


def test_the_host_is_that_of_the_listing(case: tuple[Machine, Expected]) -> None:
    machine, expected = case
    (host,) = machine.hosts
    assert (host.processor, host.sockets, host.numa_nodes) == (expected.processor, expected.sockets, expected.nodes)
    assert host.cores == host.cores_present == expected.cores


def test_what_looks_wrong_or_is_unknown_is_said_and_nothing_else(case: tuple[Machine, Expected]) -> None:
    machine, expected = case
    for words in expected.says:
        assert any(all(word in warning for word in words) for warning in machine.warnings), (words, machine.warnings)
    for word in expected.silent:
        assert not any(word in warning for warning in machine.warnings), (word, machine.warnings)


def test_every_nominal_figure_says_where_it_is_from(case: tuple[Machine, Expected]) -> None:
    machine, _ = case
    assert all(link.origin for link in machine.links if link.bandwidth is not None)
    for device in machine.devices:
        if device.memory_bandwidth is not None:
            assert device.origins["memory_bandwidth"]
        assert all(device.origins.get(f"peak.{dtype}") or device.origins["peak"] for dtype in device.peak)


def test_nvml_is_closed_again(tmp_path: Path) -> None:
    simulated = MACHINES["dgx_h100"](tmp_path)
    found_in(simulated, 8)
    assert simulated.nvml.opened == 0

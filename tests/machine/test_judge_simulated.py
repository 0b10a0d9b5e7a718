"""What is said of figures measured on the simulated machines, against verdicts that were written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwise.machine.catalog import part
from meshwise.machine.judge import Verdict, judge
from meshwise.machine.measure.bandwidth import bus_factor
from meshwise.machine.words import device_of
from meshwise.spec.machine import Collective, Device, Link, Machine
from meshwise.spec.timings import fitted
from tests.machine.simulated.expected import EXPECTED, Expected, Facts, Judged

SIZES = (2**20, 2**30)


def as_found(expected: Expected) -> Machine:
    """The machine that discovery must find: only what the hand-written expectations say."""
    devices = []
    for index, (name, part_name, memory, numa, pci) in enumerate(expected.devices):
        known = part(part_name)
        plain = Device(name, part_name) if known is None else device_of(known, index)
        devices.append(replace(plain, name=name, memory=memory * 2**20, numa=numa, pci=pci))
    links = []
    names = [device.name for device in devices]
    if expected.host is not None:
        for name in names:
            links += [_link("host", name, expected.host), _link(name, "host", expected.host)]
    for source, row in zip(names, expected.pairs.split("\n")[1:-1] or ["."], strict=True):
        for target, letter in zip(names, row.split(), strict=True):
            if letter != ".":
                links.append(_link(source, target, expected.links[letter]))
    return Machine("simulated", tuple(devices), tuple(links))


def _link(source: str, target: str, facts: Facts) -> Link:
    return Link(
        source,
        target,
        facts.kind,
        None if facts.bandwidth is None else facts.bandwidth * 1e9,
        None,
        facts.generation,
        facts.width,
        facts.full_generation,
        facts.full_width,
        facts.peer,
        facts.crosses,
    )


def with_figure(machine: Machine, judged: Judged) -> Machine:
    """The machine with this figure measured, and no other."""
    rate = judged.rate * 1e9
    if judged.path in ("nccl", "gloo"):
        factor = bus_factor(judged.source, int(judged.target))
        timings = fitted(SIZES, [factor * size / rate for size in SIZES])
        return replace(machine, collectives=(Collective(judged.source, int(judged.target), judged.path, timings),))
    timings = fitted(SIZES, [size / rate for size in SIZES])
    pair = (judged.source, judged.target)
    assert pair in [(link.source, link.target) for link in machine.links]
    links = [
        replace(link, timings={judged.path: timings}) if (link.source, link.target) == pair else link
        for link in machine.links
    ]
    return replace(machine, links=tuple(links))


def said_of(machine: Machine, judged: Judged) -> Verdict:
    (verdict,) = judge(with_figure(machine, judged))
    return verdict


CASES = [(name, judged) for name, expected in EXPECTED.items() for judged in expected.judged]


@pytest.mark.parametrize(("name", "judged"), CASES, ids=[f"{n}-{j.source}-{j.target}-{j.rate:g}" for n, j in CASES])
def test_the_verdict_is_the_one_written_by_hand(name: str, judged: Judged) -> None:
    verdict = said_of(as_found(EXPECTED[name]), judged)
    assert (verdict.level, verdict.causes) == (judged.level, judged.causes), verdict
    assert verdict.measured == pytest.approx(judged.rate * 1e9)
    assert len(verdict.why) == len(verdict.causes) and "{" not in "".join(verdict.why)


def test_two_fifths_of_every_good_rate_are_far_below() -> None:
    for name, judged in CASES:
        if judged.level == "good":
            slow = said_of(as_found(EXPECTED[name]), replace(judged, rate=judged.rate * 0.4))
            assert slow.level == "far below", (name, judged)


def test_a_part_that_nobody_knows_gets_no_expectation_of_its_matmuls() -> None:
    machine = as_found(EXPECTED["laptop_gpu"])
    device = replace(machine.devices[0], memory_rate=2e11)
    (verdict,) = judge(replace(machine, devices=(device,), links=()))
    assert (verdict.level, verdict.expected) == ("unknown", None)

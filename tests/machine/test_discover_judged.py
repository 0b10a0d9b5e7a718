"""From a simulated machine to its verdicts: figures as if measured there get the level and causes written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.machine.discovery.discover import discover
from meshwise.machine.judge import judge
from meshwise.spec.bandwidth import bus_bandwidth
from meshwise.spec.machine import Collective, Link, Machine, Matmul
from meshwise.spec.timings import Timings, fitted
from tests.machine.simulated.expected import EXPECTED, GB, Judged
from tests.machine.simulated.machines import MACHINES

SIZES = (2**20, 2**26, 2**30)
JUDGED = [(name, figure) for name, expected in EXPECTED.items() for figure in expected.judged]


def timings_at(rate: float) -> Timings:
    """A table whose every size moves at this rate."""
    return fitted(SIZES, [size / rate for size in SIZES])


def collective_at(figure: Judged) -> Collective:
    ranks = int(figure.target)
    factor = bus_bandwidth(figure.source, ranks, 1, 1.0)  # bus bandwidth of one byte a second
    return Collective(figure.source, ranks, figure.path, timings_at(figure.rate * GB / factor))


def with_figure(machine: Machine, figure: Judged) -> Machine:
    if figure.source == "all-reduce":
        return replace(machine, collectives=(collective_at(figure),))

    def measured(link: Link) -> Link:
        same = (link.source, link.target) == (figure.source, figure.target)
        return replace(link, timings={figure.path: timings_at(figure.rate * GB)}) if same else link

    return replace(machine, links=tuple(map(measured, machine.links)))


@pytest.mark.parametrize(("name", "figure"), JUDGED, ids=[f"{n}-{f.source}-{f.target}-{f.rate:g}" for n, f in JUDGED])
def test_a_figure_gets_its_verdict(name: str, figure: Judged, tmp_path: Path) -> None:
    simulated = MACHINES[name](tmp_path)
    machine = discover(
        simulated.nvml, simulated.sys, simulated.proc, affinity=range(EXPECTED[name].cores), limits={}, environ={}
    )
    (verdict,) = judge(with_figure(machine, figure))
    assert (verdict.level, verdict.causes) == (figure.level, figure.causes), verdict
    assert verdict.measured == pytest.approx(figure.rate * GB)


@pytest.mark.parametrize("name", ["laptop", "laptop_gpu"])
def test_what_a_device_of_an_unknown_part_does_is_judged_by_nothing(name: str, tmp_path: Path) -> None:
    simulated = MACHINES[name](tmp_path)
    machine = discover(simulated.nvml, simulated.sys, simulated.proc, affinity=range(32), limits={}, environ={})
    product = Matmul("fp32", 4096, 4096, 4096, seconds=0.01)
    device = replace(machine.devices[0], memory_rate=40 * GB, matmuls=(product,))
    verdicts = judge(replace(machine, devices=(device,)))
    assert {(verdict.level, verdict.expected) for verdict in verdicts} == {("unknown", None)}
    assert len(verdicts) == 2

"""What is said of figures measured on the simulated machines, against verdicts that were written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwise.machine.discovery.discover import discover
from meshwise.machine.file.read import machine_from_toml
from meshwise.machine.file.write import machine_to_toml
from meshwise.machine.judge import Verdict, judge
from meshwise.spec.bandwidth import bus_factor
from meshwise.spec.machine import Collective, Machine, Matmul
from meshwise.spec.timings import fitted
from tests.machine.simulated.expected import EXPECTED, Judged
from tests.machine.simulated.machines import MACHINES

SIZES = (2**20, 2**30)


def found(name: str, root: Path) -> Machine:
    """The machine as discovery finds it."""
    simulated = MACHINES[name](root)
    cores = range(EXPECTED[name].cores)
    return discover(simulated.nvml, simulated.sys, simulated.proc, affinity=cores, limits={}, environ={})


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
def test_the_verdict_is_the_one_written_by_hand(name: str, judged: Judged, tmp_path: Path) -> None:
    verdict = said_of(found(name, tmp_path), judged)
    assert (verdict.level, verdict.causes) == (judged.level, judged.causes), verdict
    assert verdict.measured == pytest.approx(judged.rate * 1e9)
    assert len(verdict.why) == len(verdict.causes) and "{" not in "".join(verdict.why)


def test_two_fifths_of_every_good_rate_are_far_below(tmp_path: Path) -> None:
    machines = {name: found(name, tmp_path / name) for name in MACHINES}
    for name, judged in CASES:
        if judged.level == "good":
            slow = said_of(machines[name], replace(judged, rate=judged.rate * 0.4))
            assert slow.level == "far below", (name, judged)


def test_a_part_that_nobody_knows_gets_no_expectation_of_its_own(tmp_path: Path) -> None:
    machine = found("laptop_gpu", tmp_path)
    device = replace(machine.devices[0], memory_rate=2e11, matmuls=(Matmul("bf16", 64, 64, 64, 1e-6),))
    verdicts = judge(replace(machine, devices=(device,)))
    assert [(verdict.level, verdict.expected) for verdict in verdicts] == [("unknown", None)] * 2


@pytest.mark.parametrize("name", MACHINES)
def test_a_found_machine_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    machine = found(name, tmp_path)
    assert machine_from_toml(machine_to_toml(machine), "m.toml") == machine

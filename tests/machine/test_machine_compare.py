"""What changed between two measurements of a machine, and what is only noise."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from io import StringIO

from hypothesis import HealthCheck, given, settings
from machine.machines import machines
from rich.console import Console

from meshwise.machine.compare import Change, compare
from meshwise.machine.views.changes_text import changes_text
from meshwise.spec.machine import Collective, Device, Link, Machine, Matmul
from meshwise.spec.timings import Timings, fitted

SIZES = (1024, 2**20, 2**30)


def timings(rate: float, latency: float = 1e-5, spread: float = 1.02) -> Timings:
    seconds = [latency + size / rate for size in SIZES]
    return fitted(SIZES, seconds, [spread * each for each in seconds])


MACHINE = Machine(
    "server",
    (
        Device(
            "cuda:0",
            "L4",
            memory=24 * 2**30,
            memory_rate=2.7e11,
            launch=5e-6,
            matmuls=(Matmul("bf16", 64, 64, 64, 1e-5),),
        ),
        Device("cuda:1", "L4", memory=24 * 2**30),
    ),
    (Link("host", "cuda:0", "pcie", generation=4, width=16, peer=True, timings={"pinned": timings(26e9)}),),
    collectives=(Collective("all-reduce", 2, "nccl", timings(10e9)),),
    versions={"torch": "2.13.0", "driver": "550"},
)


def clear(old: Machine, new: Machine) -> dict[str, Change]:
    return {change.what: change for change in compare(old, new) if change.kind != "same"}


def with_path(link_timings: Timings, **facts: object) -> Machine:
    return replace(MACHINE, links=(replace(MACHINE.links[0], timings={"pinned": link_timings}, **facts),))


def test_a_machine_beside_itself_has_no_clear_change() -> None:
    changes = compare(MACHINE, MACHINE)
    assert changes and {change.kind for change in changes} == {"same"}
    assert {change.speed for change in changes} == {1.0}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(machines(), machines())
def test_any_two_machines_can_be_compared(old: Machine, new: Machine) -> None:
    assert not [change for change in compare(old, old) if change.kind != "same"]
    for change in compare(old, new):
        assert change.kind in ("better", "worse", "changed", "gone", "new", "same")
    json.dumps([asdict(change) for change in compare(old, new)])


def test_a_path_at_half_its_rate_is_worse_and_twice_is_better() -> None:
    change = clear(MACHINE, with_path(timings(13e9)))["host -> cuda:0, pinned, 1.0 GiB"]
    assert (change.kind, change.old, change.new) == ("worse", "26.0 GB/s", "13.0 GB/s")
    assert 0.49 < change.speed < 0.51  # type: ignore[operator]
    assert clear(with_path(timings(13e9)), MACHINE)["host -> cuda:0, pinned, 1.0 GiB"].kind == "better"


def test_latency_is_told_by_the_smallest_size() -> None:
    found = clear(MACHINE, with_path(timings(26e9, latency=3e-5)))
    assert list(found) == ["host -> cuda:0, pinned, 1.0 KiB"]
    assert (found["host -> cuda:0, pinned, 1.0 KiB"].kind, found["host -> cuda:0, pinned, 1.0 KiB"].new) == (
        "worse",
        "30 µs",
    )


def test_a_tenth_is_no_clear_change() -> None:
    assert clear(MACHINE, with_path(timings(26e9 * 0.92))) == {}


def test_a_change_within_the_spread_is_no_clear_change() -> None:
    noisy = with_path(timings(26e9, spread=1.6))
    assert clear(noisy, with_path(timings(26e9 / 1.5, latency=1.5e-5, spread=1.6))) == {}
    assert clear(noisy, with_path(timings(26e9 / 1.7, latency=1.7e-5, spread=1.6))) != {}


def test_what_is_gone_and_what_is_new() -> None:
    other = replace(MACHINE, devices=(MACHINE.devices[0], Device("cuda:2", "L40S")), collectives=())
    found = clear(MACHINE, other)
    assert found["cuda:1"].kind == "gone" and found["cuda:2"].kind == "new"
    assert found["all-reduce, 2 ranks, nccl"].kind == "gone"
    assert clear(other, MACHINE)["all-reduce, 2 ranks, nccl"].kind == "new"


def test_a_link_that_lost_lanes_or_generations() -> None:
    same = MACHINE.links[0].timings["pinned"]
    narrow = clear(MACHINE, with_path(same, width=8))["host -> cuda:0, link"]
    assert (narrow.kind, narrow.old, narrow.new) == ("worse", "pcie 4 x16", "pcie 4 x8")
    assert clear(MACHINE, with_path(same, generation=5))["host -> cuda:0, link"].kind == "better"
    assert clear(MACHINE, with_path(same, generation=5, width=8))["host -> cuda:0, link"].kind == "changed"
    assert clear(MACHINE, with_path(same, width=None))["host -> cuda:0, link"].kind == "changed"
    assert clear(MACHINE, with_path(same, peer=False))["host -> cuda:0, peer access"].kind == "worse"


def test_devices_collectives_and_versions() -> None:
    device = replace(MACHINE.devices[0], memory_rate=1e11, launch=2e-6, matmuls=(Matmul("bf16", 64, 64, 64, 2e-5),))
    new = replace(
        MACHINE,
        devices=(device, MACHINE.devices[1]),
        collectives=(Collective("all-reduce", 2, "nccl", timings(20e9)),),
        versions={"torch": "2.14.0"},
    )
    found = {what: change.kind for what, change in clear(MACHINE, new).items()}
    assert found == {
        "cuda:0, memory rate": "worse",
        "cuda:0, launch": "better",
        "cuda:0, bf16 matmul": "worse",
        "all-reduce, 2 ranks, nccl, 1.0 GiB": "better",
        "version of torch": "changed",
        "version of driver": "gone",
    }


def shown(changes: list[Change], width: int = 100, colour: bool = False) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=colour, color_system="standard" if colour else None)
    console.print(changes_text(changes))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_text_tells_what_is_worse_first_and_sums_up_the_rest() -> None:
    new = replace(with_path(timings(13e9)), versions={"torch": "2.14.0", "driver": "550"})
    text = shown(compare(MACHINE, new))
    lines = text.splitlines()
    assert lines[1].startswith("host -> cuda:0, pinned, 1.0 GiB") and lines[1].endswith("worse")
    assert "version of torch" in lines[2]
    assert lines[-1] == "1 worse, 1 changed; no clear change in 6 figures"
    assert re.search(r"\x1b\[1;31m *worse", shown(compare(MACHINE, new), colour=True))


def test_the_text_without_a_change_is_one_line() -> None:
    assert shown(compare(MACHINE, MACHINE)).count("\n") == 1
    assert "nothing to compare" in shown(compare(Machine("a", ()), Machine("b", ())))


def test_the_text_fits_any_width() -> None:
    for width in (30, 60, 200):
        assert all(len(line) <= width for line in shown(compare(MACHINE, with_path(timings(13e9))), width).splitlines())

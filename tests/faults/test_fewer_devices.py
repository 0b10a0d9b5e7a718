"""A run goes on with the devices that are left of a machine, with the same global batch, and with more again
(launcher/devices_left.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwise.launcher.devices_left import DevicesLeft
from meshwise.launcher.restarts import Restarts
from meshwise.records import folder as names
from meshwise.records.files import read_lines
from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import PlanError, UsageError
from meshwise.spec.faults import Fault, parse_fault
from meshwise.spec.plan import Plan
from meshwise.spec.plan_file import plan_from_toml
from meshwise.workers.failure import Failure
from tests.faults.test_restarts import trained
from tests.faults.test_several_machines import EXACT, same_within

SLOTS = [WorkerSlot("cpu", None, (), 1)] * 3


def died(rank: int, step: int | None = None) -> Failure:
    return Failure(rank, "killed", "was killed", step=step)


def test_a_device_on_which_ranks_twice_came_to_no_step_is_left_out() -> None:
    devices = DevicesLeft(SLOTS)
    devices.failed(died(1), 1, ())
    assert devices.left(2) == 3
    devices.failed(died(1, step=5), 2, ())  # of the program, as far as known
    devices.failed(died(2), 3, ())
    assert devices.left(4) == 3
    devices.failed(died(1), 4, ())
    assert devices.left(5) == 2
    devices.use(2)
    assert devices.used == SLOTS[:2]


def test_a_lost_device_may_come_back() -> None:
    devices, fault = DevicesLeft(SLOTS), parse_fault("lost:rank=0,step=4,back=2")
    assert str(fault) == "lost:rank=0,step=4,phase=forward,back=2" and parse_fault(str(fault)) == fault
    devices.failed(died(0, 4), 1, [fault])
    assert [devices.left(attempt) for attempt in (2, 3, 4)] == [2, 2, 3]
    devices.failed(died(0, 4), 4, [Fault("lost", 0, 4)])
    assert [devices.left(attempt) for attempt in (5, 99)] == [2, 2]
    with pytest.raises(UsageError, match="only the fault lost has a field back="):
        parse_fault("kill:rank=0,step=4,back=2")


def test_a_gpu_that_fell_off_its_bus_is_left_out(tmp_path: Path) -> None:
    devices = DevicesLeft([WorkerSlot("cpu", None, (), 1), WorkerSlot("cpu", None, (), 1)], tmp_path)
    devices._addresses = ["0000:3B:00.0", "0000:3c:00.0"]
    for address in ("0000:3b:00.0", "0000:3c:00.0"):
        (tmp_path / "bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / address / "config").write_bytes(b"\xde\x10\x00\x23")
    assert devices.left(1) == 2
    (tmp_path / "bus/pci/devices/0000:3c:00.0/config").write_bytes(b"\xff" * 64)
    assert devices.left(1) == 1


def test_a_gpu_that_the_system_never_showed_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some containers and virtual machines /sys has no GPU."""
    monkeypatch.setattr("meshwise.launcher.devices_left.pci_address", lambda name: "0000:10:00.0")
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    assert DevicesLeft(SLOTS, tmp_path).left(2) == len(SLOTS)


def test_each_sees_the_accelerators_that_are_used() -> None:
    devices = DevicesLeft([WorkerSlot("cpu", at, (), 1, (0, 1)) for at in (0, 1)])
    devices.failed(died(0, 4), 1, [Fault("lost", 0, 4)])
    devices.use(devices.left(2))
    assert [(slot.index, slot.sees) for slot in devices.used] == [(1, (1,))]


def test_the_plan_is_brought_to_the_devices_and_back(tmp_path: Path) -> None:
    restarts = Restarts(tmp_path, asked=Plan(data=2, tensor=2))
    assert restarts.fit(3) == 2 and plan_from_toml(restarts.plan) == Plan(tensor=2)
    restarts.keep_plan()
    assert restarts.fit(4) == 4 and restarts.plan == ""
    restarts.keep_plan()
    assert plan_from_toml((tmp_path / names.PLAN).read_text()) == Plan(data=2, tensor=2)
    with pytest.raises(PlanError, match=r"needs at least 2 devices, but the run now has 1\."):
        restarts.fit(1)


@pytest.mark.usefixtures("processes")
def test_a_run_goes_on_with_one_device_fewer(tmp_path: Path) -> None:
    _, whole = trained(tmp_path / "a", *EXACT)
    run, folder = trained(tmp_path / "b", *EXACT, "--fault", "lost:rank=1,step=10")
    assert run.process.returncode == 0, run.output
    assert "attempt 2 of 4 begins from the state saved at step " in run.output
    assert ", on 1 device under Plan(data=1, precision='fp64')." in " ".join(run.output.split())
    assert same_within(folder, whole), run.output
    facts = names.read_run(folder)
    assert (facts["world"], facts["devices"]) == (1, ["cpu"])
    assert run.left_over() == []


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("plan", ["data=3", "shard=3"])
def test_a_run_has_more_devices_again_when_they_come_back(plan: str, tmp_path: Path) -> None:
    words = (*EXACT, "--set", plan)
    _, whole = trained(tmp_path / "a", *words, devices="3xcpu")
    faults = ("--fault", "lost:rank=2,step=6,back=1", "--fault", "kill:rank=0,step=13,attempt=2")
    run, folder = trained(tmp_path / "b", *words, *faults, devices="3xcpu")
    assert run.process.returncode == 0, run.output
    said = " ".join(run.output.split())
    assert f", on 2 devices under Plan({plan[:-1]}2" in said and f", on 3 devices under Plan({plan}" in said
    assert same_within(folder, whole), run.output
    steps = [line["step"] for line in read_lines(folder / names.METRICS) if "loss" in line]
    assert steps == list(range(1, 21))
    assert plan in str(plan_from_toml((folder / names.PLAN).read_text()))


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
def test_a_plan_that_needs_all_devices_ends_with_a_sentence(tmp_path: Path) -> None:
    run, folder = trained(tmp_path, "--set", "tensor=2", "--fault", "lost:rank=1,step=4")
    assert run.process.returncode == 85, run.output
    assert "tensor=2 needs at least 2 devices, but the run now has 1." in run.output
    assert names.read_run(folder)["status"] == "failed"

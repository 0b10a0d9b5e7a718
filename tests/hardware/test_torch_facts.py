"""What torch says is joined with what was found: numbers, slices, peers, and a torch that cannot use what is here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwise.hardware.discovery import torch_facts
from meshwise.hardware.discovery.discover import discover
from meshwise.hardware.discovery.topology import Accelerator, Between, Found
from meshwise.hardware.discovery.torch_facts import read_torch
from meshwise.spec.machine import Machine, link_between
from tests.hardware.simulated.fake_nvml import FakeNvml, NVMLError_DriverNotLoaded
from tests.hardware.simulated.machines import MACHINES

CUDA = {"torch": "2.13.0", "cuda": "13.0", "nccl": "2.29.7"}
GIB = 2**30


Discover = Callable[..., Machine]


@pytest.fixture
def a100(tmp_path: Path) -> Discover:
    """`a100(torch)`: eight devices, and what torch says of them."""
    it = MACHINES["a100_pcie"](tmp_path)
    return lambda torch=None: discover(
        it.nvml, it.sys, it.proc, torch=torch, affinity=range(256), limits={}, environ={}
    )


def told(index: int, bus: str, memory: int = 79 * GIB, model: str = "NVIDIA A100 80GB PCIe") -> Accelerator:
    return Accelerator(model, f"0000:{bus}:00.0", memory=memory, label=f"cuda:{index}")


def peers(can: bool) -> dict[tuple[int, int], Between]:
    return {(0, 1): Between(peer=can), (1, 0): Between(peer=can)}


def test_torchs_numbers_are_kept(a100: Discover) -> None:
    machine = a100(Found((told(0, "d1"), told(1, "4e")), peers(True), CUDA))
    assert [(d.name, d.part, d.pci, d.numa) for d in machine.devices] == [
        ("cuda:0", "A100-PCIe-80GB", "0000:d1:00.0", 1),
        ("cuda:1", "A100-PCIe-80GB", "0000:4e:00.0", 0),
    ]
    assert machine.devices[0].memory == 80 * GIB  # the driver's
    link = link_between(machine, "cuda:0", "cuda:1")
    assert link is not None and (link.crosses, link.peer) == ("socket", True)
    assert len(machine.links) == 2 + 4
    assert machine.versions == {"driver": "550.54.15", **CUDA}
    assert machine.name == "2xA100-PCIe-80GB"
    assert any("2 of the 8" in warning for warning in machine.warnings)


def test_the_runtime_goes_before_the_driver_about_peers(a100: Discover) -> None:
    machine = a100(Found((told(0, "4e"), told(1, "4f")), peers(False), CUDA))
    link = link_between(machine, "cuda:1", "cuda:0")
    assert link is not None and link.peer is False
    assert any("torch cannot use it" in warning for warning in machine.warnings)


def test_what_torch_does_not_say_of_peers_is_the_drivers(a100: Discover) -> None:
    link = link_between(a100(Found((told(0, "4e"), told(1, "4f")), {}, CUDA)), "cuda:1", "cuda:0")
    assert link is not None and link.peer is True


def test_a_slice_is_no_whole_part(a100: Discover) -> None:
    machine = a100(Found((told(0, "4f", 10 * GIB, "NVIDIA A100 80GB PCIe MIG 1g.10gb"),), {}, CUDA))
    (device,) = machine.devices
    assert (device.part, device.memory, device.peak) == ("NVIDIA A100 80GB PCIe MIG 1g.10gb", 10 * GIB, {})
    assert device.origins == {"memory": "torch"}
    assert any("MIG 1g.10gb is not in the catalog" in warning for warning in machine.warnings)


def test_devices_that_only_torch_sees_are_added(tmp_path: Path) -> None:
    facts = Found((told(0, "4e"), told(1, "4f")), peers(True), CUDA)
    machine = discover(FakeNvml([], error=NVMLError_DriverNotLoaded), tmp_path, tmp_path, torch=facts, environ={})
    assert [(d.name, d.part, d.memory) for d in machine.devices] == [
        (f"cuda:{at}", "A100-PCIe-80GB", 79 * GIB) for at in (0, 1)
    ]
    assert machine.devices[0].peak["bf16"] == 312e12
    link = link_between(machine, "cuda:0", "cuda:1")
    assert link is not None and (link.kind, link.peer, link.bandwidth) == ("", True, None)
    assert len(machine.links) == 2 and machine.warnings == ()


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"torch": "2.13.0+cpu"}, "8 devices are here, but torch 2.13.0+cpu is a build for CPUs only"),
        (CUDA, "too old for torch's CUDA 13.0"),
    ],
)
def test_a_torch_that_cannot_use_what_is_here_is_told(a100: Discover, versions: dict[str, str], says: str) -> None:
    machine = a100(Found(versions=versions))
    assert machine.devices == a100().devices
    assert any(says in warning and "https://pytorch.org" in warning for warning in machine.warnings)


def test_warnings_name_devices_as_torch_does(tmp_path: Path) -> None:
    it = MACHINES["dgx1_v100"](tmp_path)

    def found(torch: Found | None) -> Machine:
        return discover(it.nvml, it.sys, it.proc, torch=torch, affinity=range(80), limits={}, environ={})

    machine = found(None)
    assert any("cuda:0 and cuda:5" in warning for warning in machine.warnings)
    pair = [machine.devices[at].pci[5:7] for at in (5, 0)]
    names = tuple(told(at, bus, 31 * GIB, "Tesla V100-SXM2-32GB") for at, bus in enumerate(pair))
    assert any("cuda:0 and cuda:1: there is no peer access" in w for w in found(Found(names, {}, CUDA)).warnings)


def test_this_torch_is_read() -> None:
    facts = read_torch()
    assert facts.versions["torch"] == torch.__version__
    # A rehearsal that ran before in this process leaves a device registered that is not there.
    assert len(facts.accelerators) == (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)
    machine = discover(torch=facts)
    assert machine.versions["torch"] == torch.__version__ and machine.devices


class OfCuda(SimpleNamespace):
    """As torch.cuda is."""

    properties: Any = SimpleNamespace(
        name="Some GPU", total_memory=80 * GIB, pci_domain_id=0, pci_bus_id=0x4E, pci_device_id=0, major=9, minor=0
    )

    def get_device_properties(self, index: int) -> Any:
        return self.properties

    def can_device_access_peer(self, one: str, other: str) -> bool:
        return one < other


class OfXpu(OfCuda):
    """As torch.xpu is: what a device computes has no such number, and older drivers tell no address."""

    properties = SimpleNamespace(name="Some GPU", total_memory=80 * GIB)


@pytest.mark.parametrize(
    ("kind", "module", "count", "expected"),
    [
        ("cuda", OfCuda(), 2, ("Some GPU", 80 * GIB, "0000:4e:00.0", "9.0")),
        ("xpu", OfXpu(), 2, ("Some GPU", 80 * GIB, "", "")),
    ],
)
def test_devices_of_every_kind_are_read_by_what_their_module_tells(
    kind: str, module: Any, count: int, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_facts, "accelerators", lambda: (kind, count))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    facts = read_torch()
    told = [(d.name, d.memory, d.pci, facts.versions.get("compute capability", "")) for d in facts.accelerators]
    assert told == [expected] * count
    assert [device.label for device in facts.accelerators] == [f"{kind}:{index}" for index in range(count)]
    both = {(0, 1): Between(peer=True), (1, 0): Between(peer=False)}
    assert facts.between == (both if count == 2 else {})

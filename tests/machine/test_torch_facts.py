"""What torch says is joined with what was found: numbers, slices, peers, and a torch that cannot use what is here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwise.machine.discovery import torch_facts
from meshwise.machine.discovery.discover import discover
from meshwise.machine.discovery.torch_facts import TorchDevice, TorchFacts, joined, read_torch, with_torch_facts
from meshwise.spec.machine import Device, Machine, link_between
from tests.machine.simulated.machines import MACHINES

CUDA = {"torch": "2.13.0", "cuda": "13.0", "nccl": "2.29.7"}
GIB = 2**30


@pytest.fixture
def a100(tmp_path: Path) -> Machine:
    simulated = MACHINES["a100_pcie"](tmp_path)
    return discover(simulated.nvml, simulated.sys, simulated.proc, affinity=range(256), limits={}, environ={})


def told(index: int, bus: str, memory: int = 79 * GIB, model: str = "NVIDIA A100 80GB PCIe") -> TorchDevice:
    return TorchDevice(f"cuda:{index}", model, memory, f"0000:{bus}:00.0", "8.0")


def test_torchs_numbers_are_kept(a100: Machine) -> None:
    facts = TorchFacts(CUDA, (told(0, "d1"), told(1, "4e")), {("cuda:0", "cuda:1"): True, ("cuda:1", "cuda:0"): True})
    machine = joined(a100, facts)
    assert [(d.name, d.part, d.pci, d.numa) for d in machine.devices] == [
        ("cuda:0", "A100-PCIe-80GB", "0000:d1:00.0", 1),
        ("cuda:1", "A100-PCIe-80GB", "0000:4e:00.0", 0),
    ]
    assert machine.devices[0].memory == 80 * GIB  # the driver's
    link = link_between(machine, "cuda:0", "cuda:1")
    assert link is not None and (link.crosses, link.peer) == ("socket", True)
    assert len(machine.links) == 2 + 4
    assert machine.versions == {"driver": "550.54.15", **CUDA, "compute capability": "8.0"}
    assert machine.name == "2xA100-PCIe-80GB"
    assert any("2 of the 8" in warning for warning in machine.warnings)


def test_the_runtime_goes_before_the_driver_about_peers(a100: Machine) -> None:
    pairs = {("cuda:0", "cuda:1"): False, ("cuda:1", "cuda:0"): False}
    machine = joined(a100, TorchFacts(CUDA, (told(0, "4e"), told(1, "4f")), pairs))
    link = link_between(machine, "cuda:1", "cuda:0")
    assert link is not None and link.peer is False
    assert any("torch cannot use it" in warning for warning in machine.warnings)


def test_a_slice_is_no_whole_part(a100: Machine) -> None:
    machine = joined(a100, TorchFacts(CUDA, (told(0, "4f", 10 * GIB, "NVIDIA A100 80GB PCIe MIG 1g.10gb"),)))
    (device,) = machine.devices
    assert (device.part, device.memory, device.peak) == ("NVIDIA A100 80GB PCIe MIG 1g.10gb", 10 * GIB, {})
    assert device.origins == {"memory": "torch"}
    assert any("MIG 1g.10gb is not in the catalog" in warning for warning in machine.warnings)


def test_devices_that_only_torch_sees_are_added() -> None:
    nothing = Machine("1xcpu", (Device("cpu:0", "some processor"),), warnings=("some processor is unknown",))
    pairs = {("cuda:0", "cuda:1"): True, ("cuda:1", "cuda:0"): True}
    facts = TorchFacts(CUDA, (told(0, "4e"), told(1, "4f")), pairs)
    machine = joined(nothing, facts)
    assert [(d.name, d.part, d.memory) for d in machine.devices] == [
        (f"cuda:{at}", "A100-PCIe-80GB", 79 * GIB) for at in (0, 1)
    ]
    assert machine.devices[0].peak["bf16"] == 312e12
    link = link_between(machine, "cuda:0", "cuda:1")
    assert link is not None and (link.kind, link.peer, link.bandwidth) == ("", True, None)
    assert machine.warnings == ()


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"torch": "2.13.0+cpu"}, "8 devices are here, but torch 2.13.0+cpu is a build for CPUs only"),
        (CUDA, "too old for torch's CUDA 13.0"),
    ],
)
def test_a_torch_that_cannot_use_what_is_here_is_told(a100: Machine, versions: dict[str, str], says: str) -> None:
    machine = joined(a100, TorchFacts(versions))
    assert machine.devices == a100.devices
    assert any(says in warning and "https://pytorch.org" in warning for warning in machine.warnings)


def test_warnings_name_devices_as_torch_does(tmp_path: Path) -> None:
    simulated = MACHINES["dgx1_v100"](tmp_path)
    machine = discover(simulated.nvml, simulated.sys, simulated.proc, affinity=range(80), limits={}, environ={})
    assert any("cuda:0 and cuda:5" in warning for warning in machine.warnings)
    facts = TorchFacts(
        CUDA, tuple(told(7 - at, d.pci[5:7], 31 * GIB, "Tesla V100-SXM2-32GB") for at, d in enumerate(machine.devices))
    )
    assert any("cuda:7 and cuda:2" in warning for warning in joined(machine, facts).warnings)


def test_this_torch_is_read() -> None:
    facts = read_torch()
    assert facts.versions["torch"] == torch.__version__
    # A rehearsal that ran before in this process leaves a device registered that is not there.
    assert len(facts.devices) == (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)
    machine = with_torch_facts(discover())
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


class OfMps(SimpleNamespace):
    """As torch.mps is: it has no properties."""

    def recommended_max_memory(self) -> int:
        return 12 * GIB


@pytest.mark.parametrize(
    ("kind", "module", "count", "expected"),
    [
        ("cuda", OfCuda(), 2, ("Some GPU", 80 * GIB, "0000:4e:00.0", "9.0")),
        ("xpu", OfXpu(), 2, ("Some GPU", 80 * GIB, "", "")),
        ("mps", OfMps(), 1, ("Apple GPU", 12 * GIB, "", "")),
    ],
)
def test_devices_of_every_kind_are_read_by_what_their_module_tells(
    kind: str, module: Any, count: int, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_facts, "accelerators", lambda: (kind, count))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    facts = read_torch()
    assert [(d.model, d.memory, d.pci, d.capability) for d in facts.devices] == [expected] * count
    assert [device.name for device in facts.devices] == [f"{kind}:{index}" for index in range(count)]
    both = {(f"{kind}:0", f"{kind}:1"): True, (f"{kind}:1", f"{kind}:0"): False}
    assert facts.peers == (both if count == 2 else {})

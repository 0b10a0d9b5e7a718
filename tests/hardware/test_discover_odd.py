"""Discovery on machines that lack something, hide something or are set up badly: unknown stays unknown, and is said.

Tests hardware/discovery/nvml.py, hardware/discovery/sysfs.py, hardware/discovery/topology.py,
hardware/discovery/topology.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwise.hardware.discovery.discover import discover
from meshwise.spec.machine import Machine, link_between
from tests.hardware.simulated.fake_nvml import FakeNvml, Gpu, NVMLError_DriverNotLoaded, NVMLError_NotSupported
from tests.hardware.simulated.machines import MACHINES, RTX4090_TOPOLOGY, Simulated
from tests.hardware.simulated.tree import write


def machine_of(simulated: Simulated, environ: dict[str, str] | None = None, **more: Any) -> Machine:
    more = {"affinity": range(256), "limits": {}, **more}
    return discover(simulated.nvml, simulated.sys, simulated.proc, environ=environ or {}, **more)


def parts_of(machine: Machine) -> list[str]:
    return [device.part for device in machine.devices]


def said(machine: Machine, *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in machine.warnings)


def test_nothing_at_all_is_one_cpu_worker(tmp_path: Path) -> None:
    machine = discover(FakeNvml([], error=NVMLError_DriverNotLoaded), tmp_path / "sys", tmp_path / "proc", environ={})
    assert [device.name for device in machine.devices] == ["cpu:0"]
    assert machine.hosts[0].sockets is None and machine.hosts[0].numa_nodes is None
    assert machine.links == ()


@pytest.mark.usefixtures("processes")
def test_discovery_never_imports_torch() -> None:
    code = "import sys, meshwise.hardware.discovery.discover as it; it.discover(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("missing", ["not installed", "does not start", "fails while asked"])
def test_without_nvml_devices_have_their_links_to_the_host_and_the_rest_is_unknown(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = MACHINES["a100_pcie"](tmp_path)
    if missing == "not installed":
        monkeypatch.setitem(sys.modules, "pynvml", None)
        simulated = replace(simulated, nvml=None)  # type: ignore[arg-type]
    elif missing == "does not start":
        simulated.nvml.error = NVMLError_DriverNotLoaded
    else:
        monkeypatch.setattr(FakeNvml, "nvmlDeviceGetCount", lambda self: 1 / 0)
    machine = machine_of(simulated)
    assert parts_of(machine) == ["NVIDIA device"] * 8
    assert machine.devices[1].pci == "0000:4f:00.0" and machine.devices[1].numa == 0
    link = link_between(machine, "host", "cuda:1")
    assert link is not None and (link.generation, link.width) == (4, 16)
    assert link_between(machine, "cuda:0", "cuda:1") is None
    assert said(machine, "unknown", "pip install nvidia-ml-py" if missing == "not installed" else "NVML")


def test_a_driver_that_tells_only_names_is_believed_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise NVMLError_NotSupported

    optional = ("MemoryInfo", "CurrPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkGeneration", "P2PStatus")
    for name in (*optional, "MaxPcieLinkWidth", "GpuMaxPcieLinkGeneration", "TopologyCommonAncestor", "UUID"):
        monkeypatch.setattr(FakeNvml, f"nvmlDeviceGet{name}", refuse)
    simulated = MACHINES["rtx4090"](tmp_path)
    machine = discover(simulated.nvml, tmp_path / "no", tmp_path / "no", environ={}, limits={})
    assert parts_of(machine) == ["RTX-4090"] * 4
    link = link_between(machine, "cuda:0", "cuda:1")
    assert link is not None and (link.generation, link.width, link.peer) == (None, None, None)


def test_names_that_look_alike_are_other_parts(tmp_path: Path) -> None:
    names = {
        ("NVIDIA H100 PCIe", 81559): "H100-PCIe",
        ("NVIDIA H100 NVL", 95830): "H100-NVL",
        ("NVIDIA A100-PCIE-40GB", 40960): "A100-PCIe-40GB",
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376): "NVIDIA GeForce RTX 4090 Laptop GPU",
        ("NVIDIA GeForce RTX 4090 D", 24564): "NVIDIA GeForce RTX 4090 D",
    }
    for (name, memory), part in names.items():
        fake = FakeNvml([Gpu(name, "0000:01:00.0", memory)], "GPU0 X")
        assert parts_of(discover(fake, tmp_path, tmp_path, environ={})) == [part]


def test_twelve_of_eighteen_nvlinks_are_told(tmp_path: Path) -> None:
    simulated = MACHINES["dgx_h100"](tmp_path)
    simulated.nvml.matrix = [[word.replace("NV18", "NV12") for word in row] for row in simulated.nvml.matrix]
    machine = machine_of(simulated)
    link = link_between(machine, "cuda:2", "cuda:5")
    assert link is not None and (link.width, link.full_width, link.bandwidth) == (12, 18, 450e9)
    assert said(machine, "cuda:0 and cuda:1 and 27 more pairs", "12 of 18 NVLinks")


def test_parts_with_nvlink_and_none_up_are_told(tmp_path: Path) -> None:
    simulated = MACHINES["dgx_h100"](tmp_path)
    simulated.nvml.gpus = [replace(gpu, nvlink=None) for gpu in simulated.nvml.gpus]
    simulated.nvml.matrix = [["SYS"] * 8 for _ in range(8)]
    machine = machine_of(simulated)
    assert all(link.kind == "pcie" for link in machine.links)
    assert said(machine, "nvidia-fabricmanager")


def test_two_numa_nodes_of_one_socket_are_not_two_sockets(tmp_path: Path) -> None:
    """EPYC with four NUMA nodes a socket: `SYS` in the listing, and no other socket in between."""
    simulated = MACHINES["a100_pcie"](tmp_path)
    write(tmp_path, "proc/cpuinfo", "\n\n".join(f"processor\t: {core}\nphysical id\t: 0" for core in range(256)))
    link = link_between(machine_of(simulated), "cuda:0", "cuda:4")
    assert link is not None and link.crosses == "bridge"


def test_devices_of_a_socket_that_this_process_may_not_use_are_told(tmp_path: Path) -> None:
    machine = machine_of(MACHINES["a100_pcie"](tmp_path), affinity=range(8))
    near, far = (link_between(machine, "host", name) for name in ("cuda:3", "cuda:4"))
    assert near is not None and far is not None
    assert (near.crosses, far.crosses) == ("", "socket")
    assert said(machine, "cuda:4 and 3 more", "socket")


def test_a_card_of_generation_4_in_a_slot_of_generation_3_is_told(tmp_path: Path) -> None:
    simulated = MACHINES["a100_pcie"](tmp_path)
    simulated.nvml.gpus = [replace(gpu, pcie=(3, 16), system=(3, 16)) for gpu in simulated.nvml.gpus]
    assert said(machine_of(simulated), "cuda:0 and 7 more devices", "generation 3 now", "supports generation 4")


def test_without_torch_the_environment_hides_nothing_and_that_is_said(tmp_path: Path) -> None:
    machine = machine_of(MACHINES["a100_pcie"](tmp_path), {"CUDA_VISIBLE_DEVICES": "6,1"})
    assert len(machine.devices) == 8 and said(machine, "CUDA_VISIBLE_DEVICES", "are ignored")


def test_parts_that_differ_may_be_numbered_otherwise_by_cuda() -> None:
    gpus = [Gpu("NVIDIA L4", "0000:01:00.0", 23034), Gpu("NVIDIA GeForce RTX 4090", "0000:21:00.0", 24564)]
    fake = FakeNvml(gpus, "GPU0 X PHB\nGPU1 PHB X")
    nowhere = Path("/nonexistent")
    machine = discover(fake, nowhere, nowhere, environ={})
    assert said(machine, "the order of CUDA") and machine.name == "1xL4 + 1xRTX-4090"
    alike = discover(FakeNvml(gpus[:1] * 2, "GPU0 X PHB\nGPU1 PHB X"), nowhere, nowhere, environ={})
    assert not said(alike, "the order of CUDA")


def test_a_pair_of_which_one_way_is_blocked_has_no_peer_access() -> None:
    gpus = [Gpu("NVIDIA GeForce RTX 4090", f"0000:{at}1:00.0", 24564) for at in range(4)]
    peers = "GPU0 X OK OK OK\nGPU1 CNS X OK OK\nGPU2 OK OK X OK\nGPU3 OK OK OK X"
    nowhere = Path("/nonexistent")
    machine = discover(FakeNvml(gpus, RTX4090_TOPOLOGY, peers), nowhere, nowhere, environ={})
    found = {
        (link.source, link.target): link.peer for link in machine.links if "host" not in (link.source, link.target)
    }
    assert found.pop(("cuda:1", "cuda:0")) is False
    assert set(found.values()) == {True}

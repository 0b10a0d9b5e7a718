"""The host: what is here and what this process may use of it, from planted files; and the limits that will hurt.

workers/control_groups.py is tested here too.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwise.hardware import memory
from meshwise.hardware.allowance import cpu_quota, memory_left, memory_limit
from meshwise.hardware.discovery.host_facts import host_facts, own_limits
from meshwise.spec.machine import Host
from tests.hardware.simulated.tree import Computer, plant_computer, write

GIB = 2**30
SERVER = Computer("AMD EPYC 7763 64-Core Processor", ("0-31", "32-63"), (0, 1), 256 * GIB)


def host_of(root: Path, cores: int = 64) -> Host:
    return host_facts(root / "sys", root / "proc", range(cores), {})


def test_a_container_with_2_of_64_cores_has_2(tmp_path: Path) -> None:
    plant_computer(tmp_path, SERVER)
    write(tmp_path, "sys/fs/cgroup/cpu.max", "200000 100000")
    write(tmp_path, "sys/fs/cgroup/memory.max", str(16 * GIB))
    host = host_of(tmp_path)
    assert (host.cores, host.cores_present) == (2, 64)
    assert (host.memory, host.memory_present) == (16 * GIB, 256 * GIB)
    assert (host.sockets, host.numa_nodes) == (2, 2)


def test_a_process_bound_to_fewer_cores_than_its_quota_has_those(tmp_path: Path) -> None:
    plant_computer(tmp_path, SERVER)
    write(tmp_path, "sys/fs/cgroup/cpu.max", "800000 100000")
    assert host_of(tmp_path, cores=3).cores == 3


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("10000 100000", 1), ("max 100000", 64)])
def test_part_of_a_core_is_a_core(tmp_path: Path, quota: str, cores: int) -> None:
    plant_computer(tmp_path, SERVER)
    write(tmp_path, "sys/fs/cgroup/cpu.max", quota)
    assert host_of(tmp_path).cores == cores


def test_the_tightest_group_from_the_own_up_to_the_root_holds_in_version_2(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/jobs/one")
    for group, cores, limit in [("", "max", "max"), ("jobs", "400000", str(8 * GIB)), ("jobs/one", "600000", "max")]:
        write(tmp_path, f"cgroup/{group}/cpu.max", f"{cores} 100000")
        write(tmp_path, f"cgroup/{group}/memory.max", limit)
    own = tmp_path / "proc/self/cgroup"
    assert cpu_quota(tmp_path / "cgroup", own) == 4.0
    assert memory_limit(tmp_path / "cgroup", own) == 8 * GIB


def test_groups_of_version_1_are_found_by_their_controller(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:cpu,cpuacct:/box\n4:memory:/box/inner\n0::/")
    write(tmp_path, "cgroup/memory/memory.limit_in_bytes", "9223372036854771712")  # none
    write(tmp_path, "cgroup/memory/box/inner/memory.limit_in_bytes", str(3 * GIB))
    write(tmp_path, "cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(tmp_path, "cgroup/cpu/cpu.cfs_period_us", "100000")
    write(tmp_path, "cgroup/cpu/box/cpu.cfs_quota_us", "50000")
    write(tmp_path, "cgroup/cpu/box/cpu.cfs_period_us", "25000")
    own = tmp_path / "proc/self/cgroup"
    assert cpu_quota(tmp_path / "cgroup", own) == 2.0
    assert memory_limit(tmp_path / "cgroup", own) == 3 * GIB


def test_a_path_of_the_host_is_not_there_in_a_container(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/system.slice/docker-4f2a.scope")
    write(tmp_path, "cgroup/memory.max", str(GIB))
    assert memory_limit(tmp_path / "cgroup", tmp_path / "proc/self/cgroup") == GIB


@pytest.mark.parametrize("text", ["", "max", "-1", "many", "1.5", "many 100000"])
def test_a_limit_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    write(tmp_path, "cgroup/memory.max", text)
    write(tmp_path, "cgroup/cpu.max", text)
    assert memory_limit(tmp_path / "cgroup", tmp_path / "nowhere") is None
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "nowhere") is None


def test_an_arm_processor_has_a_name_and_no_socket(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "processor\t: 0\nBogoMIPS\t: 243\n\nprocessor\t: 1\n\nModel\t: Raspberry Pi 5")
    host = host_of(tmp_path, cores=2)
    assert (host.processor, host.cores_present, host.sockets) == ("Raspberry Pi 5", 2, None)


def test_a_node_without_cores_is_a_devices_memory_and_not_counted(tmp_path: Path) -> None:
    plant_computer(tmp_path, SERVER)
    write(tmp_path, "sys/devices/system/node/node2/cpulist", "")  # GH200: the device's memory is a node
    assert host_of(tmp_path).numa_nodes == 2


def test_limits_of_this_process_are_finite_numbers() -> None:
    limits = own_limits()
    assert "shared memory" in limits or not Path("/dev/shm").exists()
    assert all(0 <= limit < 2**63 for limit in limits.values())


def test_what_a_containers_limit_leaves_free_counts_without_files_that_nobody_reads(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/box\n")
    write(tmp_path, "cgroup/box/memory.max", str(4 * GIB))
    write(tmp_path, "cgroup/box/memory.current", str(3 * GIB))
    write(tmp_path, "cgroup/box/memory.stat", f"anon {GIB}\ninactive_file {GIB}\n")
    write(tmp_path, "cgroup/memory.max", str(8 * GIB))
    assert memory_left(tmp_path / "cgroup", own) == 2 * GIB
    write(tmp_path, "cgroup/memory.current", str(9 * GIB))  # the group above has none left
    assert memory_left(tmp_path / "cgroup", own) == 0


def test_version_1_has_the_same_under_other_names(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/box\n")
    write(tmp_path, "cgroup/memory/box/memory.limit_in_bytes", str(4 * GIB))
    write(tmp_path, "cgroup/memory/box/memory.usage_in_bytes", str(3 * GIB))
    write(tmp_path, "cgroup/memory/box/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert memory_left(tmp_path / "cgroup", own) == 2 * GIB
    assert memory_left(tmp_path / "nowhere", own) is None


def test_free_memory_is_at_most_what_the_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_left", lambda: 12345)
    assert memory.free_bytes(torch.device("cpu")) == 12345
    monkeypatch.setattr(memory, "memory_left", lambda: None)
    assert memory.free_bytes(torch.device("cpu")) > 12345

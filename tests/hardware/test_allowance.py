"""Cores: what a container allows, who gets which, and which lie near a device; all from planted files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.hardware import allowance
from meshwise.hardware.allowance import allowed_cores, cores_near, cpu_quota, split_cores


def plant_v2(root: Path, text: str) -> None:
    (root / "cpu.max").write_text(text + "\n")


def plant_v1(root: Path, quota: str, period: str = "100000") -> None:
    (root / "cpu").mkdir()
    (root / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (root / "cpu" / "cpu.cfs_period_us").write_text(period + "\n")


@pytest.mark.parametrize(("text", "quota"), [("200000 100000", 2.0), ("50000 100000", 0.5), ("max 100000", None)])
def test_the_quota_of_cgroup_v2_is_read(tmp_path: Path, text: str, quota: float | None) -> None:
    plant_v2(tmp_path, text)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("quota", "period", "share"), [("300000", "100000", 3.0), ("25000", "50000", 0.5), ("-1", "100000", None)]
)
def test_the_quota_of_cgroup_v1_is_read(tmp_path: Path, quota: str, period: str, share: float | None) -> None:
    plant_v1(tmp_path, quota, period)
    assert cpu_quota(tmp_path) == share


def test_v2_goes_before_v1(tmp_path: Path) -> None:
    plant_v1(tmp_path, "100000")
    plant_v2(tmp_path, "max 100000")
    assert cpu_quota(tmp_path) is None


@pytest.mark.parametrize(("quota", "left"), [(None, 64), (2.0, 2), (2.5, 3), (0.1, 1), (1000.0, 64)])
def test_a_container_gets_the_cores_that_its_quota_pays_for(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, left: int
) -> None:
    monkeypatch.setattr(allowance.os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    monkeypatch.setattr(allowance, "cpu_quota", lambda: quota)
    assert allowed_cores() == tuple(range(left))


def test_affinity_is_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance.os, "sched_getaffinity", lambda process: {7, 3, 5}, raising=False)
    monkeypatch.setattr(allowance, "cpu_quota", lambda: None)
    assert allowed_cores() == (3, 5, 7)


@pytest.mark.usefixtures("processes")
@given(st.sets(st.integers(0, 200), min_size=1, max_size=40), st.integers(1, 50))
def test_workers_share_all_cores_evenly_and_none_twice(names: set[int], workers: int) -> None:
    parts = split_cores(sorted(names), workers)
    assert len(parts) == workers
    if workers > len(names):
        assert parts == [()] * workers
    else:
        assert [core for part in parts for core in part] == sorted(names)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_device_gets_the_cores_of_its_node(tmp_path: Path) -> None:
    for address, near in [("0000:3b:00.0", "0-3,8"), ("0000:af:00.0", "4-7")]:
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(near + "\n")
    assert cores_near("0000:3B:00.0", range(2, 10), tmp_path) == (2, 3, 8)
    assert cores_near("0000:af:00.0", range(2, 10), tmp_path) == (4, 5, 6, 7)


@pytest.mark.parametrize("near", ["", "none", "100-120"])
def test_a_device_whose_node_is_not_told_or_not_ours_gets_all_cores(tmp_path: Path, near: str) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(near + "\n")
    assert cores_near("0000:3b:00.0", (0, 1, 2), tmp_path) == (0, 1, 2)
    assert cores_near("", (0, 1, 2), tmp_path) == (0, 1, 2)

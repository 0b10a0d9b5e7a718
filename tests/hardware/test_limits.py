"""Limits that will hurt, each with the line that mends it where the process runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwise.hardware.discovery.limits import (
    CONTAINER,
    POD,
    SHELL,
    SLURM,
    Finding,
    limits_that_hurt,
    surroundings,
)
from meshwise.spec.machine import Device, Host, Machine

MIB, GIB = 2**20, 2**30


def machine_with(devices: int, kind: str = "cuda", cores: int = 64, **limits: float) -> Machine:
    memory = limits.pop("memory", None)
    host = Host(
        cores=cores,
        memory=None if memory is None else int(memory),
        limits={name.replace("_", " "): limit for name, limit in limits.items()},
    )
    return Machine("here", tuple(Device(f"{kind}:{at}", "part") for at in range(devices)), hosts=(host,))


def found(machine: Machine, inside: str, root: Path) -> list[Finding]:
    return limits_that_hurt(machine, root, inside)


def test_only_limits_that_hurt_are_told(tmp_path: Path) -> None:
    fine = machine_with(8, shared_memory=64 * GIB, open_files=65536, cores=16, memory=64 * GIB, locked_memory=8 * MIB)
    assert found(fine, SHELL, tmp_path) == []
    assert found(machine_with(8), SHELL, tmp_path) == []  # unknown is not small
    assert found(machine_with(8, kind="cpu", cores=2), SHELL, tmp_path) == []


@pytest.mark.parametrize(
    ("limits", "what", "figure", "mends"),
    [
        (
            {"shared_memory": 64 * MIB},
            "/dev/shm",
            "64.0 MiB",
            {CONTAINER: "docker run --shm-size=8g", POD: "medium: Memory", SLURM: "mount -o remount,size=8g"},
        ),
        (
            {"open_files": 1024},
            "nofile",
            "1,024",
            {SHELL: "ulimit -n 4096", SLURM: "ulimit -n 4096", CONTAINER: "docker run --ulimit nofile=4096"},
        ),
        (
            {"cores": 2},
            "cores",
            "2",
            {SLURM: "#SBATCH --cpus-per-task=8", CONTAINER: "docker run --cpus=8", POD: "cpu: 8", SHELL: "taskset"},
        ),
        (
            {"memory": 4 * GIB},
            "memory",
            "4.0 GiB",
            {SLURM: "#SBATCH --mem=32G", CONTAINER: "docker run --memory=32g", POD: "memory: 32Gi"},
        ),
    ],
)
def test_what_hurts_is_told_with_the_line_that_mends_it(
    limits: dict[str, int], what: str, figure: str, mends: dict[str, str], tmp_path: Path
) -> None:
    for inside, mend in mends.items():
        (told,) = found(machine_with(8, **limits), inside, tmp_path)  # type: ignore[arg-type]
        assert (told.what, told.figure) == (what, figure)
        assert mend in told.mend and str(told).endswith(f". Use {told.mend}")


def test_infiniband_needs_locked_memory(tmp_path: Path) -> None:
    few = machine_with(8, locked_memory=8 * MIB)
    port = tmp_path / "class/infiniband/mlx5_0"
    port.mkdir(parents=True)
    assert {inside: found(few, inside, tmp_path)[0].mend.split()[0] for inside in (SHELL, CONTAINER, SLURM)} == {
        SHELL: "ulimit",
        CONTAINER: "docker",
        SLURM: "LimitMEMLOCK=infinity",
    }
    assert found(machine_with(8), SHELL, tmp_path) == []


def test_where_a_process_runs_is_told_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwise.hardware.discovery.limits.MARKS", ())
    assert surroundings({}) == SHELL
    assert surroundings({"container": "podman"}) == CONTAINER
    assert surroundings({"SLURM_JOB_ID": "7"}) == SLURM
    assert surroundings({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == POD

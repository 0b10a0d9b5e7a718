"""`meshwise doctor`: what it prints, and its exit codes. Of launcher/commands/doctor.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwise.hardware.discovery.limits import Finding
from meshwise.launcher import doctor
from meshwise.spec.machine import Device, Host, Machine

Command = Callable[..., tuple[int, str, str]]


def health_of(*findings: Finding) -> doctor.Health:
    host = Host("gpu01", "AMD EPYC", 2, 2, memory=2**34)
    machine = Machine("1xcpu", (Device("cpu:0", "AMD EPYC"),), hosts=(host,), versions={"torch": "2.13.0"})
    return doctor.Health(machine, {"launcher": "none", "/dev/shm": "64.0 MiB"}, findings, "127.0.0.1", Path("/runs"))


LONG = "data loaders and NCCL need more, " * 5  # longer than a pipe is taken to be wide
SHARED = Finding("/dev/shm", "64.0 MiB", LONG.strip(), "docker run --shm-size=8g")


def test_a_problem_stands_below_its_figure_with_what_mends_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda out, place: health_of(SHARED))
    code, out, _ = command("doctor")
    assert code == 1
    assert out.endswith(
        "launcher  none\n"
        "/dev/shm  64.0 MiB\n"
        f"       !  {LONG.strip()}\n"
        "     use  docker run --shm-size=8g\n"
        "\n"
        "verdict   1 problem: /dev/shm\n"
    )
    assert "versions  torch 2.13.0" in out and "limit " not in out


def test_a_healthy_machine_ends_with_0(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda out, place: health_of())
    code, out, _ = command("doctor")
    assert code == 0 and out.rstrip().endswith("verdict   nothing found that would stop or slow a run")


def test_json_has_facts_findings_and_the_machine(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda out, place: health_of(SHARED))
    code, out, _ = command("doctor", "--json")
    told = json.loads(out)
    assert (code, told["exit_code"]) == (1, 1)
    assert told["findings"] == [vars(SHARED)]
    assert told["facts"]["launcher"] == "none" and told["machine"]["versions"] == {"torch": "2.13.0"}

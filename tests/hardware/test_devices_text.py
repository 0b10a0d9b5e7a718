"""A machine on one screen: what must stand there, at 80 and 120 columns, in a terminal and in a pipe; and as JSON."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from meshwise.hardware.discovery.discover import discover
from meshwise.hardware.views.devices import devices_dict, devices_text
from meshwise.hardware.words import machine_from_words
from meshwise.spec.machine import Device, Link, Machine
from meshwise.spec.timings import fitted
from tests.hardware.simulated.expected import EXPECTED
from tests.hardware.simulated.machines import MACHINES

SMALL = {"shared memory": 2.0**26, "open files": 1024.0}
WORDS = ("8xH100", "2x8xA100-80GB@200Gb", "128x8xMI300X", "4xcpu")
SCREEN = 24


def printed(machine: Machine, width: int, terminal: bool = True, encoding: str = "utf-8") -> list[str]:
    """As the command prints it."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=file, width=width, height=SCREEN, force_terminal=terminal, color_system=None, legacy_windows=False
    )
    console.print(devices_text(machine), soft_wrap=True)
    file.seek(0)
    return file.read().splitlines()


def simulated(name: str, root: Path, limits: dict[str, float] | None = None) -> Machine:
    made = MACHINES[name](root)
    cores = range(EXPECTED[name].cores)
    return discover(made.nvml, made.sys, made.proc, affinity=cores, limits=limits or {}, environ={})


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", MACHINES)
def test_a_found_machine_fits_one_screen(name: str, width: int, tmp_path: Path) -> None:
    lines = printed(simulated(name, tmp_path, SMALL), width)
    assert len(lines) < SCREEN
    assert max(map(cell_len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("words", WORDS)
def test_a_described_machine_fits_one_screen(words: str, width: int) -> None:
    lines = printed(machine_from_words(words), width)
    assert len(lines) < SCREEN and max(map(cell_len, lines)) <= width


def test_every_figure_of_a_server_stands_there(tmp_path: Path) -> None:
    text = "\n".join(printed(simulated("dgx_h100", tmp_path), 80))
    for words in (
        "2 sockets, 2 NUMA nodes · 224 cores · 2.0 TiB",
        "cuda:0-3  H100-SXM  79.6 GiB     0  PCIe5 x16  990 TFLOP/s  3.35 TB/s",
        "cuda:4-7  H100-SXM  79.6 GiB     1",
        "every pair: NVLink4 x18, 450 GB/s, peer",
        "driver 550.54.15",
    ):
        assert words in text
    assert "note" not in text and "limit" not in text


def test_the_matrix_has_letters_that_are_explained_below(tmp_path: Path) -> None:
    machine = simulated("dgx1_v100", tmp_path)
    narrow = printed(machine, 80)
    assert "cuda:0       -       A       A       B       B       C       C       C" in narrow
    assert "C  PCIe3 x16, 15.8 GB/s, over the other socket, staged through the host" in narrow
    narrowest = printed(machine, 40)
    assert "cuda:0  -  A  A  B  B  C  C  C" in narrowest


def test_what_is_less_than_it_could_be_stands_beside_what_it_could_be(tmp_path: Path) -> None:
    assert any("PCIe3 x8 of 16" in line for line in printed(simulated("v100_x8", tmp_path / "a"), 80))
    assert any("PCIe1 of 4 x16" in line for line in printed(simulated("rtx4090", tmp_path / "b"), 80))


def test_what_is_unknown_says_so_and_no_figure_is_cut(tmp_path: Path) -> None:
    lines = printed(simulated("laptop_gpu", tmp_path), 80)
    row = next(line for line in lines if line.startswith("cuda:0"))
    assert row.split()[-2:] == ["unknown", "unknown"] and "…" in row and "8.0 GiB" in row


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_told_of_a_host_is_never_cut(terminal: bool) -> None:
    lines = printed(machine_from_words("2x8xA100-80GB@200Gb"), 40, terminal=terminal)
    assert "host 2 hosts, without known details network" in " ".join(" ".join([*lines[:2], "network"]).split())


def test_sentences_stay_whole_in_a_pipe(tmp_path: Path) -> None:
    machine = simulated("v100_x8", tmp_path)
    assert any(machine.warnings[0] in line for line in printed(machine, 80, terminal=False))
    assert not any(machine.warnings[0] in line for line in printed(machine, 80))


def test_a_terminal_that_knows_ascii_alone_gets_ascii(tmp_path: Path) -> None:
    text = "\n".join(printed(simulated("laptop_gpu", tmp_path), 80, encoding="ascii"))
    assert text.isascii() and "?" not in text


def test_many_notes_are_counted_in_a_terminal_and_all_told_in_a_pipe(tmp_path: Path) -> None:
    machine = replace(simulated("laptop", tmp_path), warnings=tuple(f"Sentence {at}." for at in range(9)))
    assert any("and 3 more" in line for line in printed(machine, 80))
    assert sum("Sentence" in line for line in printed(machine, 80, terminal=False)) == 9


def test_hosts_that_differ_are_told_apart(tmp_path: Path) -> None:
    machine = machine_from_words("2x2xA100-80GB@200Gb")
    devices = (*machine.devices[:3], replace(machine.devices[3], part="other", peak={}))
    text = "\n".join(printed(replace(machine, devices=devices), 80))
    assert "node0 cuda:0" in text and "node1 cuda:1" in text and "any two hosts" in text


def test_sixteen_devices_get_kinds_of_pairs_and_no_matrix() -> None:
    names = [f"cuda:{at}" for at in range(16)]
    links = tuple(
        Link(
            one, other, "pcie", 31.5e9, generation=4, width=16, peer=True, crosses="" if i // 8 == j // 8 else "socket"
        )
        for i, one in enumerate(names)
        for j, other in enumerate(names)
        if i != j
    )
    lines = printed(Machine("16", tuple(Device(name, "L4", memory=2**34) for name in names), links), 80)
    assert any("112 of 240, such as cuda:0 to cuda:1" in line for line in lines)
    assert any("128 of 240, such as cuda:0 to cuda:8" in line for line in lines)
    assert len(lines) < SCREEN


@pytest.mark.parametrize("name", MACHINES)
def test_json_has_every_field_and_no_infinity(name: str, tmp_path: Path) -> None:
    machine = simulated(name, tmp_path, SMALL)
    timings = replace(fitted([1024, 2048], [1e-6, 1e-6]), bandwidth=math.inf)
    machine = replace(machine, links=tuple(replace(link, timings={"pinned": timings}) for link in machine.links))
    plain = devices_dict(machine)
    text = json.dumps(plain, allow_nan=False)
    assert json.loads(text) == plain
    assert set(plain) >= set(Machine.__dataclass_fields__)
    assert plain["devices"][0].keys() == Device.__dataclass_fields__.keys()
    assert plain["limits_that_hurt"][0].startswith("/dev/shm ")
    if machine.links:
        assert plain["links"][0]["timings"]["pinned"]["bandwidth"] is None

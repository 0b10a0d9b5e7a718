"""A machine file says the machine that was written, and answers every other text with one sentence."""

from __future__ import annotations

import json
import sys
import tomllib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hardware.machines import machines
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from meshwise.hardware.catalog import part
from meshwise.hardware.machine_file import FROM_FILE, machine_from_toml, machine_to_toml
from meshwise.hardware.words import machine_from_words
from meshwise.spec.errors import UsageError
from meshwise.spec.json_values import json_value
from meshwise.spec.machine import DEVICE, HOST, Device, Host, Link, Machine
from meshwise.spec.timings import fitted

slow_to_draw = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow_to_draw
@given(machines())
@example(Machine("", (Device("cuda:0", "cpu", origins={"": ""}),), hosts=(Host(),)))
@example(Machine("", (Device("cuda:0", "cpu"),), hosts=(Host(),), warnings=("a line\x85broken",)))
def test_reading_gives_the_machine_that_was_written(machine: Machine) -> None:
    text = machine_to_toml(machine)
    assert machine_from_toml(text, "m.toml") == machine
    assert machine_to_toml(machine_from_toml(text, "m.toml")) == text


@pytest.mark.parametrize("words", ["8xH100", "2x8xA100-80GB@200Gb", "4xRTX4090", "4xcpu", "H100", "3x2xMI300X"])
def test_a_machine_in_words_comes_back(words: str) -> None:
    machine = machine_from_words(words)
    assert machine_from_toml(machine_to_toml(machine), "m.toml") == machine


def test_a_device_has_a_table_and_so_have_links_that_differ_only_in_their_ends_in_their_order() -> None:
    names = [f"cuda:{at}" for at in range(8)]
    devices = tuple(
        Device(name, "H100-SXM", memory=85 * 10**9, numa=at // 4, pci=f"0000:{at:02x}:00.0")
        for at, name in enumerate(names)
    )
    pairs = [(a, b) for a in names for b in names if a != b]
    links = [Link(a, b, "nvlink", 450e9, full_generation=4, crosses="" if a < b else "socket") for a, b in pairs]
    machine = Machine("8 found", devices, tuple(links))
    text = machine_to_toml(machine)
    assert text.count('name = "cuda:') == 8 and text.count("ends = [") == 14  # to lower, to higher numbers
    assert text.count("[part.H100-SXM]") == 1 and text.count('memory = "85 GB"') == 1
    assert machine_from_toml(text, "m.toml") == machine
    back = replace(machine, links=machine.links[::-1])
    assert machine_from_toml(machine_to_toml(back), "m.toml") == back


def test_a_table_stands_for_many_devices_hosts_and_links_where_it_says_so() -> None:
    text = """
    [[host]]
    count = 2
    cores = 4
    [[device]]
    part = "L4"
    count = 3
    hosts = 2
    numa = [0, 0, 1]
    pci = ["a", "b", "c"]
    [[link]]
    ends = ["cuda:0 <-> cuda:1", "cuda:2 -> cuda:0", "node0 <-> node0"]
    kind = "pcie"
    """
    machine = machine_from_toml(text, "m.toml")
    assert [(d.host, d.name, d.numa, d.pci) for d in machine.devices] == [
        (host, f"cuda:{at}", (0, 0, 1)[at], "abc"[at]) for host in (0, 1) for at in range(3)
    ]
    assert machine.hosts == (Host(cores=4),) * 2
    assert [(link.source, link.target) for link in machine.links] == [
        *(("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:2", "cuda:0"), ("node0", "node0"))
    ]


OLD = Path(__file__).parents[1] / "old"


def _without_in_step(table: dict[str, Any]) -> dict[str, Any]:
    """The same without times that were not measured then."""
    return {name: value for name, value in table.items() if name != "in_step" or value}


@pytest.mark.parametrize("name", ["in_words", "measured", "odd"])
def test_a_file_of_an_older_version_describes_the_machine_that_it_described_then(name: str) -> None:
    """Written by b03c2b2, which wrote equal devices and links once; the JSON is what it read from its own file."""
    machine = machine_from_toml((OLD / f"machine_{name}.toml").read_text(encoding="utf-8"), "old.toml")
    then = json.loads((OLD / f"machine_{name}.json").read_text(encoding="utf-8"))
    now = json.loads(json.dumps(json_value(machine)), object_hook=_without_in_step)
    for told in (then, now):  # links in the order of the file; each pair of ends has one
        told["links"].sort(key=lambda link: (link["source"], link["target"]))
    assert now == then
    assert machine_from_toml(machine_to_toml(machine), "m.toml") == machine


def test_without_its_library_a_machine_file_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tomli_w", None)
    with pytest.raises(UsageError, match=r"Use pip install meshwise\[machine\]\."):
        machine_to_toml(machine_from_words("H100"))


def test_quantities_are_written_as_people_write_them() -> None:
    text = machine_to_toml(machine_from_words("8xH100"))
    for line in ('memory = "80 GiB"', 'memory_bandwidth = "3.35 TB/s"', 'bandwidth = "450 GB/s"'):
        assert line in text
    assert text.startswith("# A machine") and "May be edited" in text


def test_lists_of_numbers_stand_on_one_line() -> None:
    timings = fitted([1024, 4096], [1e-5, 2e-5])
    text = machine_to_toml(Machine("m", (), (Link("host", "device", "pcie", timings={"pinned": timings}),)))
    assert "bytes = [1024, 4096]\nseconds = [1e-05, 2e-05]\n" in text and 'ends = ["host -> device"]' in text


def test_two_lines_are_a_whole_file() -> None:
    machine = machine_from_toml('[[device]]\npart = "H100-SXM"\ncount = 8', "m.toml")
    described = machine_from_words("8xH100-SXM")
    assert machine.devices == described.devices
    assert machine.links == described.links
    assert machine.hosts == (Host(),)
    assert machine.name == "8xH100-SXM"


def test_a_figure_of_the_file_stands_before_the_catalogs_and_says_so() -> None:
    text = '[[device]]\npart = "H100-SXM"\nmemory = "64 GiB"\n[[device]]\npart = "H100-SXM"'
    first, second = machine_from_toml(text, "m.toml").devices
    assert (first.name, second.name) == ("cuda:0", "cuda:1")
    assert (first.memory, second.memory) == (64 * 2**30, 80 * 2**30)
    assert first.origins["memory"] == FROM_FILE and "ml-engineering" in second.origins["memory"]
    assert first.memory_bandwidth == second.memory_bandwidth == 3.35e12
    assert first.origins["memory_bandwidth"] == second.origins["memory_bandwidth"]


def test_a_part_of_ones_own() -> None:
    text = (
        '[part."My chip"]\nmemory = "32 GB"\npeak = { bf16 = "100 TFLOP/s" }\n[[device]]\npart = "My chip"\ncount = 2'
    )
    machine = machine_from_toml(text, "m.toml")
    assert [device.memory for device in machine.devices] == [32 * 10**9] * 2
    assert machine.devices[0].peak == {"bf16": 1e14} and machine.devices[0].memory_bandwidth is None
    assert machine.links == ()


def test_unknown_stays_unknown() -> None:
    text = '[[device]]\npart = "H100-SXM"\nmemory = "unknown"'
    device = machine_from_toml(text, "m.toml").devices[0]
    assert device.memory is None and "memory" not in device.origins
    assert part("H100-SXM").memory is not None  # type: ignore[union-attr]


def test_times_without_a_fit_are_fitted() -> None:
    text = """
    [[device]]
    part = "cpu"
    [[link]]
    ends = ["host -> cpu:0"]
    [link.timings.pinned]
    bytes = [1000, 1000000]
    seconds = ["2 µs", 0.001001]
    """
    link = machine_from_toml(text, "m.toml").links[0]
    assert link.timings["pinned"] == fitted([1000, 1000000], [2e-6, 0.001001])
    assert link.timings["pinned"].bandwidth == pytest.approx(1e9)


DEVICE_LINES = '[[device]]\npart = "H100-SXM"\ncount = 2\n'
LINK = DEVICE_LINES + '[[link]]\nends = ["host -> cuda:0"]\n'
WRONG = {
    "no TOML": ("[[device]", "m.toml is not a valid TOML file"),
    "nothing": ("", "no device"),
    "a unit of time for bytes": (
        DEVICE_LINES + 'memory = "80 s"',
        "[[device]] 1: memory = '80 s': 's' is a unit of seconds",
    ),
    "a number without a unit": (DEVICE_LINES + "memory = 80", "not a number with a unit"),
    "an unknown unit": (DEVICE_LINES + 'memory = "80 Gb"', "not a unit of bytes. Did you mean 'GB'?"),
    "a slip in a key": (DEVICE_LINES + 'memmory = "80 GB"', "key='memmory' is not known. Did you mean 'memory'?"),
    "a slip in a table": ("[[devices]]", "key='devices' is not known. Did you mean 'device'?"),
    "no part": ("[[device]]\ncount = 8", "part is missing"),
    "a slip in a part": ('[[device]]\npart = "H100-SMX"', "Did you mean 'H100-SXM'?"),
    "no devices": ('[[device]]\npart = "H100-SXM"\ncount = 0', "count = 0 must be from 1"),
    "too many devices": ('[[device]]\npart = "H100-SXM"\ncount = 100000000', "must be from 1 to 131,072"),
    "too many in all": ('[[device]]\npart = "H100-SXM"\ncount = 1000\nhosts = 1000', "The limit is 131,072"),
    "a count in quotes": ('[[device]]\npart = "H100-SXM"\ncount = "8"', "must be a whole number"),
    "a count of true": ('[[device]]\npart = "H100-SXM"\ncount = true', "must be a whole number"),
    "a device twice": (DEVICE_LINES + '[[device]]\nname = "cuda:1"\npart = "L4"', "has two devices named cuda:1"),
    "a name that cannot count": ('[[device]]\nname = "left"\npart = "L4"\ncount = 2', "must end in a number"),
    "a host that is not there": (
        '[[host]]\ncores = 4\n[[device]]\nhost = 1\npart = "L4"',
        "on host 1, but there are only 1",
    ),
    "ends that are no link": (DEVICE_LINES + '[[link]]\nends = ["host cuda:0"]', "does not name two ends of a link"),
    "no ends": (DEVICE_LINES + '[[link]]\nkind = "pcie"', "ends is missing"),
    "a device that is not there": (
        DEVICE_LINES + '[[link]]\nends = ["host -> cuda:2"]',
        "'cuda:2' is not a device of this machine.",
    ),
    "a link twice": (DEVICE_LINES + '[[link]]\nends = ["host -> cuda:0", "host -> cuda:0"]', "is given twice"),
    "an unknown kind of link": (LINK + 'kind = "nvlnk"', "Did you mean 'nvlink'?"),
    "an unknown crossing": (LINK + 'crosses = "river"', "Use one of bridge, socket"),
    "a negative bandwidth": (LINK + 'bandwidth = "-4 GB/s"', "not a number with a unit"),
    "a bandwidth of nothing": (LINK + 'bandwidth = "0 GB/s"', "must be above zero"),
    "a width of nothing": (LINK + "width = 0", "width = 0 must be from 1"),
    "peer in quotes": (LINK + 'peer = "yes"', "must be true or false"),
    "sizes that fall": (LINK + "[link.timings.pinned]\nbytes = [2, 1]\nseconds = [1.0, 1.0]", "bytes must increase"),
    "no sizes": (LINK + "[link.timings.pinned]\nseconds = [1.0]", "bytes is missing"),
    "times too few": (LINK + "[link.timings.pinned]\nbytes = [1, 2]\nseconds = [1.0]", "1 values for 2 sizes"),
    "a time of nothing": (LINK + "[link.timings.pinned]\nbytes = [1]\nseconds = [0.0]", "must be from 1e-12 to 1e+09"),
    "a time that is no number": (LINK + "[link.timings.pinned]\nbytes = [1]\nseconds = [nan]", "must be from"),
    "a fit with a slip": (
        LINK + "[link.timings.pinned]\nbytes = [1]\nseconds = [1.0]\nfit = { latncy = '1 s' }",
        "Did you mean 'latency'?",
    ),
    "numa for one of two": (DEVICE_LINES + "numa = [0]", "1 values for 2 devices"),
    "pci as a number": (DEVICE_LINES + "pci = 7", "pci = 7 must be a text, in quotes"),
    "a collective without a kind": (DEVICE_LINES + "[[collective]]\nranks = 2", "kind is missing"),
    "a collective of no ranks": (
        DEVICE_LINES + '[[collective]]\nkind = "all-reduce"',
        "ranks is missing. Write ranks = 8.",
    ),
    "a matmul without a shape": (DEVICE_LINES + 'matmuls = [{ dtype = "bf16" }]', "m is missing. Write m = 4096."),
    "a table as a text": ('device = "H100"', "must be a list of tables"),
    "a text as a number": ("name = 7\n" + DEVICE_LINES, "must be a text"),
    "a share above any": (DEVICE_LINES + "achievable = { bf16 = 80 }", "achievable.bf16 = 80 must be from 0 to 2"),
    "lists in lists": ("x = " + "[" * 3000, "nested too deep"),
    "a number of thousands of digits": ("x = " + "9" * 5000, "not a valid TOML file"),
    "a hexadecimal number of thousands of digits": (
        '[[device]]\npart = "L4"\nmemory = 0x' + "f" * 9000,
        "not a number with a unit",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_in_one_sentence(name: str) -> None:
    text, message = WRONG[name]
    with pytest.raises(UsageError) as caught:
        machine_from_toml(text, "m.toml")
    said = str(caught.value)
    assert message in said and said.startswith("m.toml") and len(said) < 800


WORDS = st.sampled_from(
    [
        "device",
        "link",
        "host",
        "part",
        "name",
        "count",
        "pcie",
        "ends",
        "[[",
        "]]",
        "[",
        "]",
        "{",
        "}",
        "=",
        "\n",
        '"',
        "'",
        ",",
        "->",
        "host",
        "cuda:0",
        "H100-SXM",
        "8",
        "-1",
        "1e999",
        "nan",
        "inf",
        "true",
        "bytes",
        "seconds",
        "timings",
        "memory",
        "GB/s",
        "80",
        "fit",
        "latency",
        "0x_",
        "1979-05-27",
        "\\u0000",
        "\x00",
        "hosts",
        "numa",
        "pci",
        "matmuls",
        "origins",
    ]
)


@settings(deadline=None)
@given(st.text() | st.lists(WORDS).map(" ".join) | st.lists(WORDS).map("".join))
@example("device = [[[")
def test_no_text_gives_anything_but_a_machine_or_a_sentence(text: str) -> None:
    try:
        machine_from_toml(text, "m.toml")
    except UsageError as error:
        assert len(str(error)) < 2000


VALUES = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.sampled_from(["80 GB", "host -> cuda:0", "L4", "unknown", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["bytes", "fit", "seconds", "bf16"]), inner)
    ),
    max_leaves=5,
)


@slow_to_draw
@given(machines(), st.data())
def test_a_file_with_one_value_changed_gives_a_machine_or_a_sentence(machine: Machine, data: st.DataObject) -> None:
    inner: Any = tomllib.loads(machine_to_toml(machine))
    file, value = inner, data.draw(VALUES)
    while True:
        key = data.draw(st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner))))
        if not inner[key] or not isinstance(inner[key], dict | list) or data.draw(st.booleans()):
            break
        inner = inner[key]
    inner[key] = value
    with suppress(UsageError):
        machine_from_toml(tomli_w.dumps(file), "m.toml")


def test_a_file_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    machine = machine_from_words("8xMI300X")
    path.write_text(machine_to_toml(machine), encoding="utf-8")
    assert machine_from_toml(path.read_text(encoding="utf-8"), str(path)) == machine
    assert {(link.source, link.target) for link in machine.links} == {(HOST, DEVICE), (DEVICE, HOST), (DEVICE, DEVICE)}

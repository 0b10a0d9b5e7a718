"""A machine file says the machine that was written, and answers every other text with one sentence."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from machine.machines import machines

from meshwise.machine.catalog import part
from meshwise.machine.file.read import FROM_FILE, machine_from_toml, machine_to_toml
from meshwise.machine.file.toml_text import value_text
from meshwise.machine.words import machine_from_words
from meshwise.spec.errors import UsageError
from meshwise.spec.machine import DEVICE, HOST, Device, Host, Link, Machine
from meshwise.spec.timings import fitted

slow_to_draw = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@slow_to_draw
@given(machines())
@example(Machine("", (Device("cuda:0", "cpu", origins={"": ""}),), hosts=(Host(),)))
def test_reading_gives_the_machine_that_was_written(machine: Machine) -> None:
    text = machine_to_toml(machine)
    assert machine_from_toml(text, "m.toml") == machine
    assert machine_to_toml(machine_from_toml(text, "m.toml")) == text


@pytest.mark.parametrize("words", ["8xH100", "2x8xA100-80GB@200Gb", "4xRTX4090", "4xcpu", "H100", "3x2xMI300X"])
def test_a_machine_in_words_comes_back(words: str) -> None:
    machine = machine_from_words(words)
    assert machine_from_toml(machine_to_toml(machine), "m.toml") == machine


def test_equal_devices_and_links_are_written_once() -> None:
    assert len(machine_to_toml(machine_from_words("2x8xA100-80GB@200Gb")).splitlines()) < 60
    names = [f"cuda:{at}" for at in range(8)]
    devices = tuple(
        Device(name, "H100-SXM", memory=85 * 10**9, numa=at // 4, pci=f"0000:{at:02x}:00.0")
        for at, name in enumerate(names)
    )
    pairs = [(a, b) for a in names for b in names if a != b]
    links = [Link(a, b, "nvlink", 450e9, full_generation=4, crosses="" if a < b else "socket") for a, b in pairs]
    machine = Machine("8 found", devices, tuple(links))
    text = machine_to_toml(machine)
    assert text.count("[[device]]") == 1 and text.count("[[link]]") == 2 and "count = 8" in text
    assert machine_from_toml(text, "m.toml") == machine
    back = replace(machine, links=machine.links[::-1])
    assert machine_from_toml(machine_to_toml(back), "m.toml") == back


def test_quantities_are_written_as_people_write_them() -> None:
    text = machine_to_toml(machine_from_words("8xH100"))
    for line in ('memory = "80 GiB"', 'memory_bandwidth = "3.35 TB/s"', 'bandwidth = "450 GB/s"', "count = 8"):
        assert line in text
    assert text.startswith("# A machine") and "May be edited" in text


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
    "no TOML": ("[[device]", "m.toml: no TOML"),
    "nothing": ("", "no device"),
    "a unit of time for bytes": (
        DEVICE_LINES + 'memory = "80 s"',
        "[[device]] 1: memory = '80 s': 's' is a unit of seconds",
    ),
    "a number without a unit": (DEVICE_LINES + "memory = 80", "not a number with a unit"),
    "an unknown unit": (DEVICE_LINES + 'memory = "80 Gb"', "no unit of bytes. Did you mean 'GB'?"),
    "a slip in a key": (DEVICE_LINES + 'memmory = "80 GB"', "unknown key 'memmory'. Did you mean 'memory'?"),
    "a slip in a table": ("[[devices]]", "unknown key 'devices'. Did you mean 'device'?"),
    "no part": ("[[device]]\ncount = 8", "part is missing"),
    "a slip in a part": ('[[device]]\npart = "H100-SMX"', "Did you mean 'H100-SXM'?"),
    "no devices": ('[[device]]\npart = "H100-SXM"\ncount = 0', "count = 0: must be from 1"),
    "too many devices": ('[[device]]\npart = "H100-SXM"\ncount = 100000000', "must be from 1 to 131,072"),
    "too many in all": ('[[device]]\npart = "H100-SXM"\ncount = 1000\nhosts = 1000', "at most 131,072"),
    "a count in quotes": ('[[device]]\npart = "H100-SXM"\ncount = "8"', "must be a whole number"),
    "a count of true": ('[[device]]\npart = "H100-SXM"\ncount = true', "must be a whole number"),
    "a device twice": (DEVICE_LINES + '[[device]]\nname = "cuda:1"\npart = "L4"', "cuda:1 is on host 0 already"),
    "a name that cannot count": ('[[device]]\nname = "left"\npart = "L4"\ncount = 2', "cannot count up"),
    "a host that is not there": (
        '[[host]]\ncores = 4\n[[device]]\nhost = 1\npart = "L4"',
        "on host 1, and there are 1",
    ),
    "ends that are no link": (DEVICE_LINES + '[[link]]\nends = ["host cuda:0"]', "no ends of a link"),
    "no ends": (DEVICE_LINES + '[[link]]\nkind = "pcie"', "ends is missing"),
    "a device that is not there": (
        DEVICE_LINES + '[[link]]\nends = ["host -> cuda:2"]',
        "'cuda:2' is no device of this machine.",
    ),
    "a link twice": (DEVICE_LINES + '[[link]]\nends = ["host -> cuda:0", "host -> cuda:0"]', "has a link already"),
    "an unknown kind of link": (LINK + 'kind = "nvlnk"', "Did you mean 'nvlink'?"),
    "an unknown crossing": (LINK + 'crosses = "river"', "Known are bridge, socket"),
    "a negative bandwidth": (LINK + 'bandwidth = "-4 GB/s"', "not a number with a unit"),
    "a bandwidth of nothing": (LINK + 'bandwidth = "0 GB/s"', "must be above zero"),
    "a width of nothing": (LINK + "width = 0", "width = 0: must be from 1"),
    "peer in quotes": (LINK + 'peer = "yes"', "must be true or false"),
    "sizes that fall": (LINK + "[link.timings.pinned]\nbytes = [2, 1]\nseconds = [1.0, 1.0]", "sizes must rise"),
    "no sizes": (LINK + "[link.timings.pinned]\nseconds = [1.0]", "bytes is missing"),
    "times too few": (LINK + "[link.timings.pinned]\nbytes = [1, 2]\nseconds = [1.0]", "1 values for 2 sizes"),
    "a time of nothing": (LINK + "[link.timings.pinned]\nbytes = [1]\nseconds = [0.0]", "must be from 1e-12 to 1e+09"),
    "a time that is no number": (LINK + "[link.timings.pinned]\nbytes = [1]\nseconds = [nan]", "must be from"),
    "a fit with a slip": (
        LINK + "[link.timings.pinned]\nbytes = [1]\nseconds = [1.0]\nfit = { latncy = '1 s' }",
        "Did you mean 'latency'?",
    ),
    "numa for one of two": (DEVICE_LINES + "numa = [0]", "1 values for 2 devices"),
    "pci as a number": (DEVICE_LINES + "pci = 7", "must be an address as a text"),
    "a collective without a kind": (DEVICE_LINES + "[[collective]]\nranks = 2", "kind is missing"),
    "a collective of no ranks": (DEVICE_LINES + '[[collective]]\nkind = "all-reduce"', "ranks = None"),
    "a matmul without a shape": (DEVICE_LINES + 'matmuls = [{ dtype = "bf16" }]', "m = None: must be a whole number"),
    "a table as a text": ('device = "H100"', "must be a list of tables"),
    "a text as a number": ("name = 7\n" + DEVICE_LINES, "must be a text"),
    "a share above any": (DEVICE_LINES + "achievable = { bf16 = 80 }", "achievable.bf16 = 80: must be from 0 to 2"),
    "lists in lists": ("x = " + "[" * 3000, "within too many others"),
    "a number of thousands of digits": ("x = " + "9" * 5000, "no TOML"),
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


@settings(max_examples=400, deadline=None)
@given(st.text() | st.lists(WORDS).map(" ".join) | st.lists(WORDS).map("".join))
@example("device = [[[")
def test_no_text_gives_anything_but_a_machine_or_a_sentence(text: str) -> None:
    try:
        machine_from_toml(text, "m.toml")
    except UsageError as error:
        assert len(str(error)) < 2000


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["80 GB", "host -> cuda:0", "L4", "unknown", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["bytes", "fit", "seconds", "bf16"]), inner)
    ),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(machines(), st.data())
def test_a_file_with_one_value_changed_gives_a_machine_or_a_sentence(machine: Machine, data: st.DataObject) -> None:
    lines = machine_to_toml(machine).splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    key = lines[at].partition(" = ")[0]
    value = data.draw(VALUES.filter(lambda value: "None" not in repr(value)))
    lines[at] = f"{key} = {value_text(value)}"
    with suppress(UsageError):
        machine_from_toml("\n".join(lines), "m.toml")


def test_a_file_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    machine = machine_from_words("8xMI300X")
    path.write_text(machine_to_toml(machine), encoding="utf-8")
    assert machine_from_toml(path.read_text(encoding="utf-8"), str(path)) == machine
    assert {(link.source, link.target) for link in machine.links} == {(HOST, DEVICE), (DEVICE, HOST), (DEVICE, DEVICE)}

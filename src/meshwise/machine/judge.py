"""Is what was measured good for these parts, and if not, why: one verdict a path, collective, memory and dtype.

At least 85 % of what the parts should reach is good, at least 60 % low, less is far below. Causes are read from the
facts of the link; they explain what is low, and a few are worth knowing where all is well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.machine.catalog import pcie
from meshwise.machine.expected import (
    BOTH_WAYS,
    Expected,
    expected_collective,
    expected_copy,
    expected_matmul,
    expected_memory,
    part_at,
)
from meshwise.spec.bandwidth import bus_bandwidth
from meshwise.spec.machine import DEVICE, HOST, Collective, Device, Link, Machine
from meshwise.spec.timings import Timings
from meshwise.spec.units import bandwidth_text, bytes_text, flops_text, percent_text

LEAST_BYTES = 4 << 20
"""Smaller messages show the latency of a path, not its rate."""
GOOD, LOW = 0.85, 0.6
"""Shares of the expected rate: at least GOOD is good, at least LOW is low, less is far below."""
CAUSES = {
    "narrow-pcie": "the PCIe link has {width} of {full_width} lanes: look at the slot, the riser and the manual",
    "old-pcie-generation": "the PCIe link runs at generation {generation} of {full_generation}: look at the slot and "
    "at the firmware's settings",
    "idle-link": "the PCIe link was seen at generation {generation} of {full_generation}, where links rest when they "
    "are idle; if it stays there under load, look at power management (ASPM) in the firmware",
    "fewer-links": "{width} of {full_width} links between the devices are up: `nvidia-smi nvlink -s` shows which",
    "peer-off": "peer access is off, so that every byte goes through the host's memory",
    "other-socket": "the path crosses to the other processor socket",
    "through-bridge": "the path goes through the host's PCIe bridge, which other traffic shares",
    "pageable": "pageable memory: the processor copies every byte into pinned memory first; use pin_memory()",
    "in-network": "above the speed of the link: the switch adds up (NVLS, SHARP), and bus bandwidth is then no speed "
    "of a link",
    "power-or-clocks": "a power or heat limit may hold the clocks down: `nvidia-smi -q -d PERFORMANCE` tells",
}
"""What a cause means, with the numbers of the link."""


@dataclass(frozen=True)
class Verdict:
    """what: `host -> cuda:0, pinned`. level: `good`, `low`, `far below`, `unknown` or `corrupt`. measured and expected:
    bytes/s, of a matmul FLOP/s; expected None where nothing is known. causes: keys of CAUSES. origin: where expected
    comes from, or why there is none. why: the causes in words, with numbers.
    """

    what: str
    level: str
    measured: float
    expected: float | None
    causes: tuple[str, ...]
    origin: str
    why: tuple[str, ...] = ()


def judge(machine: Machine) -> list[Verdict]:
    """A verdict on every measured path, collective, memory rate and matmul rate of the machine."""
    verdicts = [_copy(machine, link, path, timings) for link in machine.links for path, timings in link.timings.items()]
    verdicts += [_collective(machine, collective) for collective in machine.collectives]
    for device in machine.devices:
        name = _device_name(machine, device)
        if device.memory_rate is not None:
            verdicts.append(_verdict(f"{name}, memory", device.memory_rate, expected_memory(device)))
        for dtype in dict.fromkeys(product.dtype for product in device.matmuls):
            best = max(product.rate for product in device.matmuls if product.dtype == dtype)
            causes = {} if device.kind == "cpu" else _told("power-or-clocks")
            verdicts.append(_verdict(f"{name}, {dtype} matmul", best, expected_matmul(device, dtype), causes))
    return verdicts


def exit_code(verdicts: Sequence[Verdict], corrupt: bool) -> int:
    """1 when a path corrupts data, 3 when one is far below its part, 0 otherwise."""
    if corrupt or any(verdict.level == "corrupt" for verdict in verdicts):
        return 1
    return 3 if any(verdict.level == "far below" for verdict in verdicts) else 0


def sentence(verdict: Verdict) -> str:
    """`host -> cuda:0, pinned: 12.9 GB/s, 27 % of the 48.2 GB/s expected: the PCIe link has 4 of 16 lanes: …`."""
    text = flops_text if verdict.what.endswith(" matmul") else bandwidth_text
    told = f"{verdict.what}: {text(verdict.measured)}"
    if verdict.expected is not None:
        told += f", {percent_text(verdict.measured / verdict.expected)} of the {text(verdict.expected)} expected"
    return "; ".join([told, *verdict.why])


def _verdict(
    what: str,
    measured: float,
    expected: Expected,
    causes: dict[str, str] | None = None,
    always: tuple[str, ...] = (),
) -> Verdict:
    """causes: why it may be slow, told where it is slow; those in `always` are told in any case."""
    causes = causes or {}
    rate = expected.rate or None  # a share of nothing, as a file may have it, is no expectation
    if rate is None:
        level = "unknown"
    else:
        share = measured / rate
        level = "good" if share >= GOOD else "low" if share >= LOW else "far below"
    told = [key for key in causes if key in always or level in ("low", "far below")]
    return Verdict(what, level, measured, rate, tuple(told), expected.origin, tuple(causes[key] for key in told))


def _copy(machine: Machine, link: Link, path: str, timings: Timings) -> Verdict:
    measured = best_rate(timings)
    expected = _if_large(expected_copy(machine, link, path), timings)
    way = path.removesuffix(BOTH_WAYS)
    if HOST in (link.source, link.target):
        causes = _lane_causes(machine, link, measured)
        if link.crosses == "socket":
            causes |= _told("other-socket")
    else:
        causes = _between_causes(machine, link, way, measured)
    always: tuple[str, ...] = ()
    if way == "pageable":
        causes, always = _told("pageable"), ("pageable",)
    if way == "staged" and _vendor_has_no_peer(machine, link):
        always = ("peer-off",)
    return _verdict(f"{link.source} -> {link.target}, {path}", measured, expected, causes, always)


def _if_large(expected: Expected, timings: Timings) -> Expected:
    """`expected`, or none where only small messages were measured."""
    if timings.sizes[-1] >= LEAST_BYTES:
        return expected
    return Expected(None, expected.nominal, f"measured up to {bytes_text(timings.sizes[-1])}, too small for a rate")


def best_rate(timings: Timings) -> float:
    """The best rate over the sizes, in bytes/s."""
    return max(size / seconds for size, seconds in zip(timings.sizes, timings.seconds, strict=True))


def _between_causes(machine: Machine, link: Link, way: str, measured: float) -> dict[str, str]:
    causes: dict[str, str] = {}
    if way == "staged":
        for end in (link.source, link.target):
            for leg in machine.links:
                if HOST in (leg.source, leg.target) and (
                    end in (leg.source, leg.target) or DEVICE in (leg.source, leg.target)
                ):
                    causes = _lane_causes(machine, leg, measured) | causes
        if link.peer is not True:
            causes |= _told("peer-off")
    else:
        causes |= _lane_causes(machine, link, measured)
        if link.peer is False:
            causes |= _told("peer-off")
    if link.crosses == "socket":
        causes |= _told("other-socket")
    if link.crosses == "bridge":
        causes |= _told("through-bridge")
    return causes


def _lane_causes(machine: Machine, link: Link, measured: float) -> dict[str, str]:
    """What generation and width say: of PCIe lanes, and of links between devices."""
    generation, width = _full(machine, link)
    facts = {
        "generation": link.generation,
        "width": link.width,
        "full_generation": generation,
        "full_width": width,
    }
    causes = {}
    fewer = link.width is not None and width is not None and link.width < width
    if link.kind == "pcie":
        if fewer:
            causes["narrow-pcie"] = CAUSES["narrow-pcie"].format(**facts)
        if link.generation is not None and generation is not None and link.generation < generation:
            seen = pcie(link.generation, link.width or width or 16)
            resting = link.generation == 1 or (seen is not None and measured > seen)
            key = "idle-link" if resting else "old-pcie-generation"
            causes[key] = CAUSES[key].format(**facts)
    elif link.kind == "nvlink" and fewer and not _spread(machine, link):
        causes["fewer-links"] = CAUSES["fewer-links"].format(**facts)
    return causes


def _full(machine: Machine, link: Link) -> tuple[int | None, int | None]:
    """(generation, width) that the parts at the ends could have: the catalog's, else what the devices say."""
    generations, widths = [link.full_generation], [link.full_width]
    for end in (link.source, link.target):
        device = part_at(machine, end) if end != HOST else None
        for own in () if device is None else (device.link, device.bridge, device.host_link):
            if own is not None and own.kind == link.kind:
                generations.append(own.generation)
                widths.append(None if own.mesh else own.width)
                break
    known = [[value for value in values if value is not None] for values in (generations, widths)]
    return max(known[0], default=None), max(known[1], default=None)


def _spread(machine: Machine, link: Link) -> bool:
    """Whether a device's links go to several others, so that a pair has only some of them."""
    device = part_at(machine, link.source)
    return device is not None and device.link is not None and device.link.mesh


def _vendor_has_no_peer(machine: Machine, link: Link) -> bool:
    return any(
        (device := part_at(machine, end)) is not None and device.peer is False for end in (link.source, link.target)
    )


def _told(key: str) -> dict[str, str]:
    return {key: CAUSES[key]}


def _collective(machine: Machine, collective: Collective) -> Verdict:
    timings = collective.timings
    measured = bus_bandwidth(collective.kind, collective.ranks, timings.sizes[-1], timings.seconds[-1])
    expected = _if_large(expected_collective(machine, collective), timings)
    what = f"{collective.kind}, {collective.ranks} ranks, {collective.backend}"
    causes: dict[str, str] = {}
    always: tuple[str, ...] = ()
    switched = any(link.kind in ("nvlink", "network") for link in machine.links) and collective.backend == "nccl"
    if switched and expected.rate is not None and measured > (expected.nominal or 0.0):
        causes, always = _told("in-network"), ("in-network",)
    else:
        for link in machine.links:
            if HOST not in (link.source, link.target) and link.kind in ("pcie", "nvlink", "xgmi"):
                causes = _between_causes(machine, link, collective.backend, measured) | causes
    return _verdict(what, measured, expected, causes, always)


def _device_name(machine: Machine, device: Device) -> str:
    """The device's name; with several hosts, its host's number in front."""
    return device.name if len(machine.hosts) < 2 else f"node{device.host} {device.name}"

"""Judge whether measured figures are good, and if not, why.

There is one verdict for each path, collective, memory and dtype.

At least 85 % of what the parts should reach is good, at least 60 % low, less is far below. Causes are read from the
facts of the link; they explain what is low, and a few are worth knowing where all is well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwise.machine.catalog import nominal_rate
from meshwise.machine.expected import (
    BOTH_WAYS,
    Expected,
    expected_collective,
    expected_copy,
    expected_matmul,
    expected_memory,
    never_peer,
    part_at,
)
from meshwise.spec.bandwidth import bus_bandwidth
from meshwise.spec.machine import DEVICE, HOST, Collective, Link, Machine, device_label
from meshwise.spec.timings import Timings
from meshwise.spec.units import bandwidth_text, bytes_text, flops_text, percent_text

LEAST_BYTES = 4 << 20
"""The smallest message in bytes whose rate is compared with the expected rate. Smaller messages show latency."""
GOOD, LOW = 0.85, 0.6
"""Shares of the expected rate. A rate is good from GOOD on, low from LOW up to GOOD, and far below under LOW."""
SLOW_CAUSES = {
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
    "in-network": "above the speed of the link: the switch computes the sum (NVLS, SHARP), so the bus bandwidth is not "
    "the speed of the link",
    "power-or-clocks": "a power or heat limit may hold the clocks down: `nvidia-smi -q -d PERFORMANCE` shows it",
}
"""A description of each cause, with placeholders for the numbers of the link."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one measured rate.

    what: what was measured, such as `host -> cuda:0, pinned`.
    level: `good`, `low`, `far below`, `unknown` or `corrupt`.
    measured, expected: bytes/s, or FLOP/s of a matmul. The expected rate is None if unknown.
    causes: keys of SLOW_CAUSES.
    origin: the source of the expected rate, or the reason why there is none.
    why: the descriptions of the causes, with numbers.
    """

    what: str
    level: str
    measured: float
    expected: float | None
    causes: tuple[str, ...]
    origin: str
    why: tuple[str, ...] = ()


def judge(machine: Machine) -> list[Verdict]:
    """Compare every measured rate of the machine with the rate that the hardware should reach. The measured rates are
    those of copies, collectives, memory and matmuls. Returns a `Verdict` for each measured rate."""
    verdicts = [_copy(machine, link, path, timings) for link in machine.links for path, timings in link.timings.items()]
    verdicts += [_collective(machine, collective) for collective in machine.collectives]
    for device in machine.devices:
        name = device_label(machine, device)
        if device.memory_rate is not None:
            verdicts.append(_verdict(f"{name}, memory", device.memory_rate, expected_memory(device)))
        causes = {} if device.kind == "cpu" else _causes("power-or-clocks")
        for dtype, best in device.best_rates.items():
            verdicts.append(_verdict(f"{name}, {dtype} matmul", best, expected_matmul(device, dtype), causes))
    return verdicts


def exit_code(verdicts: Sequence[Verdict], corrupt: bool) -> int:
    """Return the exit code: 1 if a path corrupts data, else 3 if a rate is far below the expected rate, else 0."""
    if corrupt or any(verdict.level == "corrupt" for verdict in verdicts):
        return 1
    return 3 if any(verdict.level == "far below" for verdict in verdicts) else 0


def sentence(verdict: Verdict) -> str:
    """Write a verdict as a sentence: `host -> cuda:0, pinned: 12.9 GB/s, 27 % of the 48.2 GB/s expected; the PCIe link
    has …`."""
    text = flops_text if verdict.what.endswith(" matmul") else bandwidth_text
    found = f"{verdict.what}: {text(verdict.measured)}"
    if verdict.expected is not None:
        found += f", {percent_text(verdict.measured / verdict.expected)} of the {text(verdict.expected)} expected"
    return "; ".join([found, *verdict.why])


def _verdict(
    what: str,
    measured: float,
    expected: Expected,
    causes: dict[str, str] | None = None,
    always: tuple[str, ...] = (),
) -> Verdict:
    """Return the `Verdict` on a measured rate, by comparing it with the expected rate.

    what: what was measured, such as `host -> cuda:0, pinned`.
    causes: texts that explain why the rate may be low, by key. The verdict includes them only if the rate is low.
    always: keys of `causes` that the verdict includes even if the rate is good.
    """
    causes = causes or {}
    rate = expected.rate or None  # a share of nothing, as a file may have it, is no expectation
    if rate is None:
        level = "unknown"
    else:
        share = measured / rate
        level = "good" if share >= GOOD else "low" if share >= LOW else "far below"
    given = [key for key in causes if key in always or level in ("low", "far below")]
    return Verdict(what, level, measured, rate, tuple(given), expected.origin, tuple(causes[key] for key in given))


def _copy(machine: Machine, link: Link, path: str, timings: Timings) -> Verdict:
    measured = best_rate(timings)
    expected = _if_large(expected_copy(machine, link, path), timings)
    way = path.removesuffix(BOTH_WAYS)
    always = ("peer-off",) if way == "staged" and never_peer(machine, link) else ()
    if way == "pageable":
        causes, always = _causes("pageable"), ("pageable",)
    elif HOST in (link.source, link.target):
        causes = _lane_causes(machine, link, measured)
        causes |= _causes("other-socket") if link.crosses == "socket" else {}
    else:
        causes = _between_causes(machine, link, way, measured)
    return _verdict(f"{link.source} -> {link.target}, {path}", measured, expected, causes, always)


def _if_large(expected: Expected, timings: Timings) -> Expected:
    """Return the expected rate, or an unknown rate if only small messages were measured."""
    if timings.sizes[-1] >= LEAST_BYTES:
        return expected
    return Expected(None, expected.nominal, f"sizes up to {bytes_text(timings.sizes[-1])} are too small for a rate")


def best_rate(timings: Timings) -> float:
    """Return the highest rate over all sizes, in bytes/s."""
    return max(size / seconds for size, seconds in zip(timings.sizes, timings.seconds, strict=True))


def _between_causes(machine: Machine, link: Link, way: str, measured: float) -> dict[str, str]:
    """Return what may slow a path between two devices. For a path through the host's memory, this includes what may
    slow the links of both devices to the host."""
    legs, no_peer = [link], link.peer is False
    if way == "staged":
        hosts = [leg for leg in machine.links if HOST in (leg.source, leg.target)]
        ends = ({link.source, DEVICE}, {link.target, DEVICE})
        legs = [leg for end in ends for leg in hosts if end & {leg.source, leg.target}]
        no_peer = link.peer is not True
    causes: dict[str, str] = {}
    for leg in legs:
        causes = _lane_causes(machine, leg, measured) | causes
    crossing = {"socket": "other-socket", "bridge": "through-bridge"}.get(link.crosses)
    return causes | _causes(*(["peer-off"] if no_peer else []), *([crossing] if crossing else []))


def _lane_causes(machine: Machine, link: Link, measured: float) -> dict[str, str]:
    """Return possible causes of a link's low rate, as texts by key. They are that the PCIe link runs with fewer lanes
    or at a lower generation than its devices support, or that fewer NVLinks are up.

    measured: the measured bytes/s.
    """
    full_generation, full_width = _full(machine, link)
    generation, width = link.generation, link.width
    keys = []
    fewer = width is not None and full_width is not None and width < full_width
    if link.kind == "pcie":
        if fewer:
            keys.append("narrow-pcie")
        if generation is not None and full_generation is not None and generation < full_generation:
            seen = nominal_rate("pcie", generation, width or full_width or 16)
            idle = generation == 1 or (seen is not None and measured > seen)
            keys.append("idle-link" if idle else "old-pcie-generation")
    elif link.kind == "nvlink" and fewer and not _spread(machine, link):
        keys.append("fewer-links")
    return _causes(*keys, generation=generation, width=width, full_generation=full_generation, full_width=full_width)


def _full(machine: Machine, link: Link) -> tuple[int | None, int | None]:
    """Return the highest generation and the largest number of lanes or links that this link could have. These are the
    largest values that the drivers report, or that the catalog has for the devices at both ends. A value is None if
    unknown."""
    parts = [part for end in (link.source, link.target) if (part := part_at(machine, end)) is not None]
    links = [own for part in parts if (own := part.link_of(link.kind)) is not None]
    generations = [link.full_generation, *(own.generation for own in links)]
    widths = [link.full_width, *(own.width for own in links if not own.mesh)]
    return max(filter(None, generations), default=None), max(filter(None, widths), default=None)


def _spread(machine: Machine, link: Link) -> bool:
    """Return whether the device at the start of this link has direct links to several other devices. A given device is
    then reached by only some of the links, so the caller does not report missing links."""
    part = part_at(machine, link.source)
    return part is not None and part.link is not None and part.link.mesh


def _causes(*keys: str, **facts: int | None) -> dict[str, str]:
    """Return the texts of SLOW_CAUSES for these keys, with numbers filled in. facts: the numbers, such as `width=8`."""
    return {key: SLOW_CAUSES[key].format(**facts) for key in keys}


def _collective(machine: Machine, collective: Collective) -> Verdict:
    timings = collective.timings
    measured = bus_bandwidth(collective.kind, collective.ranks, timings.sizes[-1], timings.seconds[-1])
    expected = _if_large(expected_collective(machine, collective), timings)
    what = f"{collective.kind}, {collective.ranks} ranks, {collective.backend}"
    causes: dict[str, str] = {}
    always: tuple[str, ...] = ()
    switched = any(link.kind in ("nvlink", "network") for link in machine.links) and collective.backend == "nccl"
    if switched and expected.rate is not None and measured > (expected.nominal or 0.0):
        causes, always = _causes("in-network"), ("in-network",)
    else:
        for link in machine.links:
            if HOST not in (link.source, link.target) and link.kind in ("pcie", "nvlink", "xgmi"):
                causes = _between_causes(machine, link, collective.backend, measured) | causes
    return _verdict(what, measured, expected, causes, always)

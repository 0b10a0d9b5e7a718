"""Machines of every kind for hypothesis: described and measured, with odd names and figures."""

from __future__ import annotations

from hypothesis import strategies as st

from meshwise.hardware.catalog import parts
from meshwise.spec.machine import DEVICE, HOST, NODE, Collective, Device, Host, Link, Machine, Matmul
from meshwise.spec.timings import Timings, fitted

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
positive = st.floats(1e-6, 1e18, allow_nan=False)
seconds = st.floats(1e-9, 1e6, allow_nan=False)
whole = st.integers(1, 2**50)
dtypes = st.sampled_from(["bf16", "fp16", "fp32", "tf32", "fp8", "odd dtype"])
maybe_positive = st.none() | positive


@st.composite
def timings(draw: st.DrawFn) -> Timings:
    sizes = sorted(draw(st.sets(st.integers(1, 2**40), min_size=1, max_size=6)))
    column = st.lists(seconds, min_size=len(sizes), max_size=len(sizes))
    others = [tuple(draw(column)) if draw(st.booleans()) else () for _ in range(3)]
    if draw(st.booleans()):
        return fitted(sizes, draw(column), *others)
    latency = draw(st.just(0.0) | st.floats(1e-12, 10.0))
    bandwidth = draw(st.just(float("inf")) | positive)
    return Timings(tuple(sizes), tuple(draw(column)), latency, bandwidth, draw(st.floats(0, 100)), *others)


@st.composite
def devices(draw: st.DrawFn, name: str, host: int) -> Device:
    part = draw(st.sampled_from([part.name for part in parts()]) | names)
    known = {known.name: known for known in parts()}.get(part)
    plain = known is not None and draw(st.booleans())
    figures = st.dictionaries(dtypes, positive, max_size=3)
    return Device(
        name,
        part,
        host,
        known.memory if plain else draw(st.none() | whole),
        known.memory_bandwidth if plain else draw(maybe_positive),
        known.peak if plain else draw(figures),
        known.achievable if plain else draw(st.dictionaries(dtypes, st.floats(0, 2), max_size=3)),
        draw(maybe_positive),
        tuple(draw(st.lists(st.builds(Matmul, dtypes, whole, whole, whole, seconds), max_size=3))),
        draw(st.none() | st.just(0.0) | seconds),
        draw(st.none() | st.integers(-1, 7)),
        draw(words),
        draw(st.dictionaries(words, words, max_size=3)),
    )


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    count = st.none() | st.integers(0, 1000)
    limits = st.dictionaries(words, st.floats(0, 2**52) | st.integers(0, 2**52) | st.just(float("inf")), max_size=3)
    counts = [draw(count) for _ in range(4)]
    return Host(draw(words), draw(words), *counts, draw(st.none() | whole), draw(st.none() | whole), draw(limits))


@st.composite
def links(draw: st.DrawFn, ends: tuple[str, str]) -> Link:
    lanes = st.none() | st.integers(1, 32)
    return Link(
        *ends,
        draw(st.sampled_from(["pcie", "nvlink", "xgmi", "c2c", "memory", "network", "process", ""])),
        draw(maybe_positive),
        draw(st.none() | st.just(0.0) | seconds),
        *(draw(lanes) for _ in range(4)),
        draw(st.none() | st.booleans()),
        draw(st.sampled_from(["", "bridge", "socket"])),
        draw(st.dictionaries(st.sampled_from(["pinned", "pageable", "peer both ways", "é\n"]), timings(), max_size=2)),
        draw(words),
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    count = draw(st.integers(1, 3))
    some_hosts = tuple(draw(hosts()) if draw(st.booleans()) else Host() for _ in range(count))
    found: list[Device] = []
    for host in range(draw(st.integers(0, count))):
        first = draw(devices(draw(st.sampled_from(["cuda:0", "cpu:0", "cuda:7"])), host))
        found.append(first)
        kind, number = first.name.split(":")
        for step in range(1, draw(st.integers(1, 3))):
            same = draw(st.booleans())
            name = f"{kind}:{int(number) + step}"
            found.append(Device(**{**vars(first), "name": name, "numa": step}) if same else draw(devices(name, host)))
    ends = [HOST, DEVICE, NODE, *dict.fromkeys(device.name for device in found), *(f"node{at}" for at in range(count))]
    pairs = draw(st.lists(st.tuples(st.sampled_from(ends), st.sampled_from(ends)), unique=True, max_size=6))
    if draw(st.booleans()) and pairs:
        facts = vars(draw(links(pairs[0])))
        some_links = tuple(Link(**{**facts, "source": source, "target": target}) for source, target in pairs)
    else:
        some_links = tuple(draw(links(pair)) for pair in pairs)
    collective = st.builds(Collective, names, st.integers(1, 100), words, timings())
    return Machine(
        draw(words),
        tuple(found),
        some_links,
        some_hosts,
        tuple(draw(st.lists(collective, max_size=2))),
        draw(st.dictionaries(words, words, max_size=2)),
        tuple(draw(st.lists(words, max_size=2))),
        draw(words),
    )

"""Judge the nodes of a run by what each tells of itself and of the others."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwise.hardware.discovery.limits import Finding
from meshwise.launcher.node_seat import Seat
from meshwise.spec.units import plural, seconds_text
from meshwise.spec.words import printable, some

MOST_AHEAD = 1.0
"""Seconds by which a clock may differ from the others."""
ALIKE = "one environment on all nodes: the same image, or a folder that they share"
OTHERS = ("python", "driver", "cuda", "rocm", "nccl", "compute capability")
"""Versions that pip does not change alone."""
Reports = Mapping[int, Mapping[str, Any]]


def judge(seat: Seat, reports: Reports, came: Sequence[int]) -> tuple[dict[str, str], list[Finding]]:
    """Return what the nodes are like, and what would stop or slow a run on them.

    reports: what each node tells: its `name`, `versions`, hashes of `files`, `findings` on itself, whether it sees the
        `shared` token, and how it has `reached` the others (see `probe`).
    came: the nodes that came to the store. One without a report fell silent.
    """
    names = {node: f"node {node}" for node in range(seat.nodes)}
    names |= dict(enumerate(seat.hosts[: seat.nodes]))
    names |= {node: printable(str(told["name"])) for node, told in reports.items()}
    if len(set(names.values())) < len(names):  # nodes of one name
        names = {node: f"{name}#{node}" for node, name in names.items()}
    silent = [node for node in range(seat.nodes) if node not in reports]
    facts = {"nodes": f"{len(reports)} of {seat.nodes}: {some([names[node] for node in reports], 8)}"}
    found: list[Finding] = []
    for node in silent:
        why = "fell silent" if node in came else f"did not come within {seconds_text(seat.wait)}"
        found.append(Finding("nodes", names[node], why, seat.without(names[node])))
    for what, judged in (("links", _links), ("clocks", _clocks), ("folder", _folder)):
        facts[what], more = judged(seat, reports, names)
        found += more
    facts["versions"], more = _alike("versions", _of(reports, "versions"), names)
    found += more
    if any(told["files"] for told in reports.values()):
        facts["program"], more = _alike("program", _of(reports, "files"), names)
        found += more
    return facts, [*found, *_own(reports, names)]


def _of(reports: Reports, what: str) -> dict[int, Mapping[str, str]]:
    return {node: told[what] for node, told in reports.items()}


def _links(seat: Seat, reports: Reports, names: Mapping[int, str]) -> tuple[str, list[Finding]]:
    ways = {(a, int(b)): way for a, told in reports.items() for b, way in told["reached"].items()}
    open_ways = [way["seconds"] for way in ways.values() if "error" not in way]
    text = f"{len(open_ways)} of {len(ways)} ways"
    if open_ways:
        text += f", a round trip takes {seconds_text(statistics.median(open_ways))}"
    shut = {way: told["error"] for way, told in ways.items() if "error" in told and way[1] in reports}
    found = []
    while shut:  # name the node that most of them lead from or to, then what is left without it
        node = Counter(end for way in shut for end in way).most_common(1)[0][0]
        own = [way for way in shut if node in way]
        why = some([f"{names[a]} → {names[b]} ({printable(shut[a, b])})" for a, b in own])
        mend = f"{seat.without(names[node])}, or open all TCP ports between the nodes"
        found.append(Finding("links", names[node], f"no connection {why}", mend))
        shut = {way: error for way, error in shut.items() if way not in own}
    return text, found


def _clocks(seat: Seat, reports: Reports, names: Mapping[int, str]) -> tuple[str, list[Finding]]:
    ahead = {0: 0.0}
    for node, told in reports.items():
        there = reports[0]["reached"].get(str(node), {}) if 0 in reports else {}
        back = told["reached"].get("0", {})
        if "ahead" in there or "ahead" in back:
            ahead[node] = there["ahead"] if "ahead" in there else -back["ahead"]
    middle = statistics.median_low(ahead.values())
    off = {node: seconds - middle for node, seconds in ahead.items()}
    found = [
        Finding(
            *(
                "clocks",
                names[node],
                f"{seconds_text(abs(seconds))} {'ahead of' if seconds > 0 else 'behind'} the others",
            ),
            f"chronyc makestep on {names[node]}",
        )
        for node, seconds in off.items()
        if abs(seconds) > MOST_AHEAD
    ]
    return f"within {seconds_text(max(off.values()) - min(off.values()))}", found


def _folder(seat: Seat, reports: Reports, names: Mapping[int, str]) -> tuple[str, list[Finding]]:
    blind = [names[node] for node, told in reports.items() if not told["shared"]]
    folder = next((printable(str(told["folder"])) for told in reports.values()), "")
    if not blind:
        return f"{folder}: seen by all", []
    why = f"{folder} is not the folder of {names[0]}"
    return f"{folder}: not seen by all", [
        Finding("folder", some(blind, 8), why, "--out FOLDER on a disk that all nodes share")
    ]


def _alike(what: str, told: Mapping[int, Mapping[str, str]], names: Mapping[int, str]) -> tuple[str, list[Finding]]:
    """Compare what the nodes have under each name with what most of them have."""
    most = {
        printable(name): printable(Counter(each.get(name, "none") for each in told.values()).most_common(1)[0][0])
        for name in sorted({name for each in told.values() for name in each})
    }
    found = []
    for node, each in told.items():
        other = {name: value for name, value in most.items() if each.get(name, "none") != value}
        if not other:
            continue
        if what == "program":
            why, mend = f"{some([*other])}: not as on the other nodes", "a folder that all nodes share"
        else:
            why = some([f"{name} {printable(each.get(name, 'none'))}, not {value}" for name, value in other.items()])
            wheels = [f"{name}=={value}" for name, value in other.items() if name not in OTHERS and value != "none"]
            mend = f"pip install {' '.join(wheels)}" if len(wheels) == len(other) else ALIKE
        found.append(Finding(what, names[node], why, mend))
    count = plural(len(most), "file" if what == "program" else "version")
    return f"{count}, alike on {len(told) - len(found)} of {len(told)} nodes", found


def _own(reports: Reports, names: Mapping[int, str]) -> Iterator[Finding]:
    """Join what nodes found on themselves, where it is the same."""
    where: dict[Finding, list[str]] = {}
    for node, told in reports.items():
        for each in told["findings"]:
            where.setdefault(Finding(*map(printable, each)), []).append(names[node])
    for finding, nodes in where.items():
        yield Finding(finding.what, f"{finding.figure} on {some(nodes, 8)}", finding.why, finding.mend)

"""Judge the nodes of a run by what each tells."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwise.hardware.discovery.limits import SLURM, Finding
from meshwise.spec.units import seconds_text
from meshwise.spec.words import printable, some
from meshwise.workers.places.place import Place

MOST_AHEAD = 1.0
"""Seconds by which a clock may differ from the others."""
NOT_OF_PIP = ("python", "driver", "cuda", "rocm", "nccl", "compute capability")
SAME_DISK = "a folder that all nodes share"
Reports = Mapping[int, Mapping[str, Any]]
Names = Mapping[int, str]


def judge(place: Place, reports: Reports, came: Sequence[int]) -> tuple[dict[str, str], list[Finding]]:
    """Return what the nodes are like, and what would stop or slow a run on them.

    reports: what each node tells: its `name`, `versions`, hashes of `files`, `findings` on itself, whether it sees the
        `shared` token, and how it has `reached` the others (see `probe`).
    came: the nodes that came to the store. One without a report fell silent.
    """
    names = {node: f"node {node}" for node in range(place.nodes)}
    names |= {node: printable(told["name"]) for node, told in reports.items()}
    names |= dict(enumerate(place.hosts[: place.nodes]))
    ways = {(a, int(b)): way for a, told in reports.items() for b, way in told["reached"].items()}
    good = {pair: way for pair, way in ways.items() if "error" not in way}
    shut = {pair: way["error"] for pair, way in ways.items() if pair not in good and pair[1] in reports}
    ahead, folder = _ahead(good), printable(reports[0]["folder"])
    shared = [node for node, told in reports.items() if told["shared"]]
    facts = {
        "nodes": f"{len(reports)} of {place.nodes}: {some([names[node] for node in reports], 8)}",
        "links": f"{len(good)} of {len(ways)} ways",
        "clocks": f"within {seconds_text(max(ahead.values()) - min(ahead.values()))}",
        "folder": f"{folder}, seen by {len(shared)} of {len(reports)}",
    }
    found = [*_links(place, shut, names)]
    for node, name in names.items():
        if node not in reports:
            why = "fell silent" if node in came else "did not come in time"
            found.append(Finding("nodes", name, why, _without(place, name)))
        elif node not in shared:
            why = f"{folder} is not the folder of {names[0]}"
            found.append(Finding("folder", name, why, f"--out FOLDER, {SAME_DISK}"))
        if abs(off := ahead.get(node, 0.0)) > MOST_AHEAD:
            why = f"{seconds_text(abs(off))} {'ahead of' if off > 0 else 'behind'} the others"
            found.append(Finding("clocks", name, why, f"chronyc makestep on {name}"))
    for what in ("versions", "files"):
        count, more = _alike(what, {node: told[what] for node, told in reports.items()}, names)
        facts[what] = f"{count} compared, alike on {len(reports) - len(more)} of {len(reports)} nodes"
        found += more
    for node, told in reports.items():
        for kind, figure, why, mend in (map(printable, each) for each in told["findings"]):
            found.append(Finding(kind, names[node], f"{figure}: {why}", mend))
    return facts, _joined(found)


def _without(place: Place, name: str) -> str:
    """Return the line that leaves a node out."""
    return f"#SBATCH --exclude={name}" if place.launcher == SLURM else f"the other nodes, without {name}"


def _links(place: Place, shut: Mapping[tuple[int, int], str], names: Names) -> Iterator[Finding]:
    """Name the node that most ways lead from or to, then what is left without it."""
    while shut:
        node = Counter(end for way in shut for end in way).most_common(1)[0][0]
        own = [f"{names[a]} → {names[b]} ({printable(shut[a, b])})" for a, b in shut if node in (a, b)]
        mend = f"{_without(place, names[node])}, or open all TCP ports between the nodes"
        yield Finding("links", names[node], f"no connection {some(own)}", mend)
        shut = {way: error for way, error in shut.items() if node not in way}


def _ahead(good: Mapping[tuple[int, int], Mapping[str, float]]) -> dict[int, float]:
    """Return the seconds by which each node's clock is ahead of most others, as far as node 0 or that node measured."""
    ahead = {0: 0.0} | {a: -way["ahead"] for (a, b), way in good.items() if b == 0}
    ahead |= {b: way["ahead"] for (a, b), way in good.items() if a == 0}
    middle = statistics.median_low(ahead.values())
    return {node: seconds - middle for node, seconds in ahead.items()}


def _alike(what: str, told: Mapping[int, Mapping[str, str]], names: Names) -> tuple[int, list[Finding]]:
    """Compare what the nodes have under each name with what most of them have. Return how many names there are, and
    who differs."""
    keys = sorted({name for each in told.values() for name in each})
    most = {name: Counter(each.get(name, "none") for each in told.values()).most_common(1)[0][0] for name in keys}
    found = []
    for node, each in told.items():
        other = [name for name in keys if each.get(name, "none") != most[name]]
        why, mend = f"{some(other)}: not as on the other nodes", SAME_DISK
        if what == "versions":
            why = some([f"{name} {each.get(name, 'none')}, not {most[name]}" for name in other])
            if not {*other} & {*NOT_OF_PIP}:
                mend = f"pip install {' '.join(f'{name}=={most[name]}' for name in other)}"
        if other:
            found.append(Finding(what, names[node], printable(why), printable(mend)))
    return len(keys), found


def _joined(found: Iterable[Finding]) -> list[Finding]:
    """Join what is the same on several nodes. `figure` is the name of each."""
    names: dict[Finding, list[str]] = {}
    for each in found:
        names.setdefault(replace(each, figure=""), []).append(each.figure)
    return [replace(each, figure=some(own, 8)) for each, own in names.items()]

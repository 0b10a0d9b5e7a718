"""Compare the nodes of an allocation.

They exchange what each tells of itself as the launchers of a run do (workers/meeting.py). Who calls `compare` must end
by `os._exit`, since a call of the store may hang on a cut network.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from meshwise.hardware.discovery.limits import SLURM, Finding
from meshwise.launcher.doctor import Health
from meshwise.spec.units import seconds_text
from meshwise.spec.words import printable, some
from meshwise.workers.clock import ClockProbe, ClockServer
from meshwise.workers.join import source_of
from meshwise.workers.meeting import Meeting
from meshwise.workers.places.place import Place

MOST_AHEAD = 1.0  # seconds by which a clock may differ from the others
APPEARS = 3.0  # seconds after which a file that node 0 has made must be seen by the others
OPEN = "open all TCP ports between the nodes"
ALIKE = "the same folder and environment on all nodes"
Compared = tuple[Mapping[str, str], Sequence[Finding]]


def compare(place: Place, health: Health, program: str, wait: float) -> Compared:
    """Exchange reports with the other nodes. Return what all nodes are like, and what would stop or slow a run on them.

    place: this node, and in `address` where node 0 serves the store.
    program: a script or job whose files are compared. It may be empty.
    wait: the seconds to wait until all nodes have come.

    Raises WorkerFailed if a node does not come, or falls silent.
    """
    meeting, mark = Meeting(place, 1), health.folder / f".meshwise-doctor-{uuid.uuid4().hex}"
    clock, nodes = ClockServer("", time.time_ns), range(place.nodes)
    try:
        meeting.meet(wait)
        if place.node == 0:
            with contextlib.suppress(OSError):  # then no node sees it
                mark.touch()
        host = place.address[0] if place.address else ""
        meeting.set("at", [source_of(host) if place.node else host, clock.port, mark.name])
        every = [meeting.get(node, "at") for node in nodes]
        with ThreadPoolExecutor(32) as pool:
            ahead = list(pool.map(_ahead, every))
        seen = _appears(health.folder / every[0][2])
        meeting.set("report", {**health.report(program), "ahead": ahead, "seen": seen})
        if place.node == 0:
            facts, found = judge(place, [meeting.get(node, "report") for node in nodes])
            meeting.set("verdict", [facts, [astuple(each) for each in found]])
        facts, told = meeting.get(0, "verdict")
        return facts, [Finding(*each) for each in told]
    finally:
        mark.unlink(missing_ok=True)
        clock.close()
        meeting.leave()


def _ahead(at: Sequence[Any]) -> float | None:
    """Return the seconds by which a node's clock is ahead of this node's. None if that node is not reached."""
    probe = ClockProbe((at[0], at[1]), time.time_ns)
    rounds = probe.sample(3)
    sent, there, received = min(rounds, key=lambda each: each[2] - each[0], default=(0, 0, 0))
    return (there - (sent + received) / 2) / 1e9 if rounds else None


def _appears(path: Path) -> bool:
    """Return whether a file is there. A network disk may show it late."""
    until = time.monotonic() + APPEARS
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.1)
    return path.exists()


def judge(place: Place, reports: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[Finding]]:
    """Return what the nodes are like, and what would stop or slow a run on them.

    reports: what each node tells (see `Health.report`), how far each node's clock is `ahead` of its own, and whether it
        has `seen` the file of node 0.
    """
    names = [printable(told["name"]) for told in reports]
    ways = {(a, b): ahead for a, told in enumerate(reports) for b, ahead in enumerate(told["ahead"]) if a != b}
    shut = [way for way, ahead in ways.items() if ahead is None]
    clocks = [seconds or 0.0 for seconds in reports[0]["ahead"]]
    middle, folder = statistics.median_low(clocks), printable(reports[0]["folder"])
    facts = {
        "nodes": f"{place.nodes}: {some(names, 8)}",
        "links": f"{len(ways) - len(shut)} of {len(ways)} ways",
        "clocks": f"within {seconds_text(max(clocks) - min(clocks))}",
        "folder": f"{folder}, seen by {sum(told['seen'] for told in reports)} of {place.nodes}",
        "alike": f"{len(reports[0]['alike'])} versions and files",
    }
    found = [*_links(place, shut, names)]
    keys = dict.fromkeys(key for told in reports for key in told["alike"])
    most = {key: Counter(told["alike"].get(key, "none") for told in reports).most_common(1)[0][0] for key in keys}
    for name, told, clock in zip(names, reports, clocks, strict=True):
        if abs(off := clock - middle) > MOST_AHEAD:
            why = f"{seconds_text(abs(off))} {'ahead of' if off > 0 else 'behind'} the others"
            found.append(Finding("clocks", name, why, f"chronyc makestep on {name}"))
        if not told["seen"]:
            why = f"{folder} is not the folder of {names[0]}"
            found.append(Finding("folder", name, why, "--out FOLDER, a folder that all nodes share"))
        own = {key: told["alike"].get(key, "none") for key in keys}
        if own != most:
            why = printable(some([f"{key} {own[key]}, not {most[key]}" for key in keys if own[key] != most[key]]))
            found.append(Finding("alike", name, why, ALIKE))
        for kind, figure, why, mend in (map(printable, each) for each in told["findings"]):
            found.append(Finding(kind, name, f"{figure}: {why}", mend))
    return facts, _joined(found)


def _links(place: Place, shut: Sequence[tuple[int, int]], names: Sequence[str]) -> Iterator[Finding]:
    """Name the node that most ways lead from or to, then what is left without it."""
    while shut:
        node = Counter(end for way in shut for end in way).most_common(1)[0][0]
        own = [f"{names[a]} → {names[b]}" for a, b in shut if node in (a, b)]
        yield Finding("links", names[node], f"no connection {some(own)}", f"{_without(place, names[node])}, or {OPEN}")
        shut = [way for way in shut if node not in way]


def _without(place: Place, name: str) -> str:
    """Return the line that leaves a node out."""
    return f"#SBATCH --exclude={name}" if place.launcher == SLURM else f"the other nodes, without {name}"


def _joined(found: Iterable[Finding]) -> list[Finding]:
    """Join what is the same on several nodes. `figure` is the name of each."""
    names: dict[Finding, list[str]] = {}
    for each in found:
        names.setdefault(replace(each, figure=""), []).append(each.figure)
    return [replace(each, figure=some(own, 8)) for each, own in names.items()]

"""Measure between processes: the links of each pair of ranks, and the collectives of all of them.

`measure_processes` starts a worker a device and hears of each path as it is done, so that a Ctrl-C or a rank that dies
leaves what was measured before. `measure_ranks` is for ranks that are in a process group already, such as one a host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from meshwise.compat.collectives import backend_of
from meshwise.machine.measure import cases
from meshwise.machine.measure.alone import device_names
from meshwise.machine.measure.cases import Maker, Place
from meshwise.machine.measure.result import PathResult
from meshwise.machine.measure.together import Path, measure_path
from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import UsageError, nearest
from meshwise.spec.timings import Timings
from meshwise.transfer.collectives import Group, broadcast_object, gather_objects, get_rank, group_of, world_size
from meshwise.workers.channel import Message, WorkerChannel
from meshwise.workers.join import join
from meshwise.workers.launch import Listeners, launch

WHAT = ("links", "collectives")
"""What is measured unless something else is asked; `direct` adds our own sends and receives in place of gloo's."""
MORE = ("direct",)
DIRECT = " direct"
"""Behind the backend's name: composed of sends and receives, where gloo's own does not reach the link's rate."""
_COMPOSED: dict[str, tuple[Callable[[bool], Maker], Callable[[int], bool]]] = {
    "broadcast": (lambda direct: cases.broadcast(0, direct), lambda ranks: ranks > 2),
    "all-gather": (cases.all_gather, lambda ranks: ranks == 2),
    "reduce-scatter": (cases.reduce_scatter, lambda ranks: True),
    "all-to-all": (cases.all_to_all, lambda ranks: True),
}
"""How each collective is made that may be composed, and from how many ranks it is (compat/collectives.py)."""


def measure_processes(
    slots: Sequence[WorkerSlot],
    sizes: Sequence[int],
    budget: float,
    what: Sequence[str] = WHAT,
    report: Callable[[PathResult], None] = lambda result: None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[PathResult]:
    """Start one worker a slot and measure between them for about `budget` seconds.

    report hears of each path as soon as it is done, tell hears what comes next. Raises UsageError for an unknown
    `what`, and WorkerFailed when a worker dies; report has then heard of all that was done before.
    """
    _check(sizes, what)

    if len(slots) < 2:
        return []
    arguments = (device_names(slots), tuple(sizes), budget, tuple(what))
    results: list[list[PathResult]] = launch(
        _be_a_rank, arguments, slots, listeners=Listeners(message=heard_by(report, tell))
    )
    return results[0]


def measure_ranks(
    names: Sequence[str],
    sizes: Sequence[int],
    budget: float,
    what: Sequence[str] = WHAT,
    report: Callable[[PathResult], None] = lambda result: None,
    tell: Callable[[str], None] = lambda text: None,
    *,
    device: torch.device | None = None,
    group: Group = None,
) -> list[PathResult]:
    """Measure between the ranks of a group that exists, for about `budget` seconds. Collective over that group.

    names: of the ranks, `cpu:0` or `node0`. report and tell are called on rank 0. Every rank gets the results.
    """
    _check(sizes, what)
    device = device or torch.device("cpu")
    place = Place(get_rank(group), world_size(group), group, device)
    if place.ranks < 2:
        return []
    first = place.rank == 0
    results = []
    end = time.perf_counter() + budget
    paths = paths_between(names, backend_of(device), what)
    for number, path in enumerate(paths):
        left = max(end - time.perf_counter(), 0.0) / (len(paths) - number)
        share = gather_objects(left, group)[0]  # rank 0's clock decides
        result = measure_path(path, place, sizes, share, tell if first else _silent)
        results.append(result)
        if first:
            report(result)
    return results


def measure_hosts(
    sizes: Sequence[int],
    budget: float,
    what: Sequence[str] = WHAT,
    report: Callable[[PathResult], None] = lambda result: None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[PathResult]:
    """Measure between hosts, under a launcher that started this on all of them: one rank a host, its local rank 0.

    Results are on the ranks that measure, report and tell are called on rank 0 alone. Raises UsageError outside such a
    launcher and on one host.
    """
    _check(sizes, what)
    world = join().world
    if world.size == 1:
        raise UsageError(
            "--hosts measures between hosts, and this process is alone. Start it on each of them, for instance with "
            "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 -m meshwise bench --hosts."
        )
    chosen = [rank for rank, local in enumerate(gather_objects(world.local_rank)) if local == 0]
    if len(chosen) < 2:
        raise UsageError(
            f"--hosts measures between hosts, and all {world.size} ranks are on one. Start it on a second host too, or "
            "write meshwise bench without --hosts."
        )
    group = group_of(chosen) if len(chosen) < world.size else None
    results: list[PathResult] = []
    if world.rank in chosen:
        names = [f"node{number}" for number in range(len(chosen))]
        device = torch.device(world.device)
        results = measure_ranks(names, sizes, budget, what, report, tell, device=device, group=group)
    broadcast_object(None)  # nobody leaves before the others are done
    return results


def paths_between(names: Sequence[str], backend: str, what: Sequence[str]) -> list[Path]:
    """What is measured between these ranks, in that order."""
    ranks = range(len(names))
    paths: list[Path] = []
    if "links" in what:
        paths += [
            Path("copy", names[a], names[b], backend, cases.copy(a, b), 2, (a, b))
            for a in ranks
            for b in ranks
            if a != b
        ]
        paths += [
            Path("copy both ways", names[a], names[b], backend, cases.both_ways(a, b), 2)
            for a in ranks
            for b in ranks
            if a < b
        ]
        if len(names) > 2:
            paths.append(Path("one-to-all", names[0], "all", backend, cases.one_to_all(0, back=False)))
            paths.append(Path("all-to-one", "all", names[0], backend, cases.one_to_all(0, back=True)))
    if "collectives" in what:
        paths.append(Path("all-reduce", "", "", backend, cases.all_reduce))
        paths.append(Path("send-receive", "", "", backend, cases.send_receive))
    for operation, (make, composed) in _COMPOSED.items():
        if "collectives" in what:
            paths.append(Path(operation, "", "", backend, make(False)))
        if "direct" in what and backend == "gloo" and composed(len(names)):
            paths.append(Path(operation, "", "", backend + DIRECT, make(True)))
    return paths


def result_to(result: PathResult) -> dict[str, Any]:
    """A result as plain values, for a message or a file."""
    return asdict(result)


def result_from(values: dict[str, Any]) -> PathResult:
    """The result that `result_to` made these values of, lists for tuples allowed."""
    timings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values["timings"].items()}
    return replace(PathResult(**values), timings=Timings(**timings))


def told_to(channel: WorkerChannel) -> tuple[Callable[[PathResult], None], Callable[[str], None]]:
    """report and tell of a worker, which its launcher hears by `heard_by`."""
    return (
        lambda result: channel.send("measured", result=result_to(result)),
        lambda text: channel.send("measuring", text=text),
    )


def heard_by(report: Callable[[PathResult], None], tell: Callable[[str], None]) -> Callable[[int, Message], None]:
    """A launcher's listener that passes on what its workers report and tell."""

    def heard(rank: int, message: Message) -> None:
        if message["kind"] == "measuring":
            tell(message["text"])
        elif message["kind"] == "measured":
            report(result_from(message["result"]))

    return heard


def _be_a_rank(names: Sequence[str], sizes: Sequence[int], budget: float, what: Sequence[str]) -> list[PathResult]:
    session = join()
    assert session.channel is not None  # workers of `launch` always have one
    report, tell = told_to(session.channel)
    return measure_ranks(names, sizes, budget, what, report, tell, device=torch.device(session.world.device))


def _check(sizes: Sequence[int], what: Sequence[str]) -> None:
    for one in what:
        if one not in WHAT + MORE:
            known = WHAT + MORE
            raise UsageError(f"measure {one!r}: there is no such part.{nearest(one, known)} Write {', '.join(known)}.")
    if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
        raise UsageError(f"sizes {list(sizes)}: give one or more sizes in bytes, each larger than the one before.")


def _silent(text: str) -> None:
    return None

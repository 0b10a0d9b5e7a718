"""Measure links between pairs of ranks, and their collectives.

`measure_processes` starts a worker a device and gets each path as it is done, so that a Ctrl-C or a rank that dies
leaves what was measured before. `measure_ranks` is for ranks that are in a process group already, such as one a host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import permutations

import torch

from meshwise.compat.collectives import Group, backend_of
from meshwise.machine.measure import cases
from meshwise.machine.measure.alone import device_names
from meshwise.machine.measure.cases import Maker, Member
from meshwise.machine.measure.progress import SILENT, Progress, listeners, sent_over
from meshwise.machine.measure.result import PathResult
from meshwise.machine.measure.together import RanksSpec, measure_path
from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import UsageError, nearest
from meshwise.transfer.collectives import broadcast_object, gather_objects
from meshwise.transfer.groups import get_rank, group_of, world_size
from meshwise.workers.join import join
from meshwise.workers.launch import launch

WHAT = ("links", "collectives")
"""What is measured by default. The user can add `direct`: gloo's collectives, composed of sends and receives."""
MORE = ("direct",)
DIRECT = " direct"
"""Suffix of the backend's name (`gloo direct`) for collectives that are composed of sends and receives."""
_COMPOSED: dict[str, tuple[Callable[[bool], Maker], Callable[[int], bool]]] = {
    "broadcast": (lambda direct: cases.broadcast(0, direct), lambda ranks: ranks > 2),
    "all-gather": (cases.all_gather, lambda ranks: ranks == 2),
    "reduce-scatter": (cases.reduce_scatter, lambda ranks: True),
    "all-to-all": (cases.all_to_all, lambda ranks: True),
}
"""By collective: (function that returns its `Maker`, whether sends and receives can replace it on n ranks)."""


def measure_processes(
    slots: Sequence[WorkerSlot],
    sizes: Sequence[int],
    budget: float,
    what: Sequence[str] = WHAT,
    progress: Progress = SILENT,
) -> list[PathResult]:
    """Start one worker per slot, and measure paths and collectives between the workers for about `budget` seconds.

    Raises UsageError for an unknown word in `what`, and WorkerFailed if a worker dies.

    progress: receives each path as soon as it is measured, also before an error.
    """
    _check(sizes, what)
    if len(slots) < 2:
        return []
    arguments = (device_names(slots), tuple(sizes), budget, tuple(what))
    results: list[list[PathResult]] = launch(_measure_as_rank, arguments, slots, listeners=listeners(progress))
    return results[0]


def measure_ranks(
    names: Sequence[str],
    sizes: Sequence[int],
    budget: float,
    what: Sequence[str] = WHAT,
    progress: Progress = SILENT,
    *,
    device: torch.device | None = None,
    group: Group = None,
) -> list[PathResult]:
    """Measure paths and collectives between the ranks of an existing group for about `budget` seconds. All ranks of the
    group must call it, and all get the results.

    names: the names of the ranks, such as `cpu:0` or `node0`.
    progress: is called on rank 0 only.
    """
    _check(sizes, what)
    member = Member(get_rank(group), world_size(group), group, device or torch.device("cpu"))
    if member.ranks < 2:
        return []
    if member.rank:
        progress = SILENT
    results = []
    end = time.perf_counter() + budget
    paths = paths_between(names, backend_of(member.device), what)
    for number, path in enumerate(paths):
        left = max(end - time.perf_counter(), 0.0) / (len(paths) - number)
        left = gather_objects(left, group)[0]  # rank 0's clock decides
        results.append(measure_path(path, member, sizes, left, progress.starts))
        progress.done(results[-1])
    return results


def measure_hosts(
    sizes: Sequence[int], budget: float, what: Sequence[str] = WHAT, progress: Progress = SILENT
) -> list[PathResult]:
    """Measure the links and collectives between hosts. On each host, the rank with local rank 0 takes part. All ranks
    must make this call, and a launcher such as torchrun must have started them.

    Returns the results on the ranks that take part, and an empty list on the other ranks. Raises UsageError if only one
    process was started, or if all ranks are on the same host.

    progress: called on rank 0 only.
    """
    _check(sizes, what)
    world = join().world
    if world.size == 1:
        raise UsageError(
            "--hosts measures between hosts, but only this process takes part. Start the command on each host, for "
            "example with torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 -m meshwise bench --hosts."
        )
    chosen = [rank for rank, local in enumerate(gather_objects(world.local_rank)) if local == 0]
    if len(chosen) < 2:
        raise UsageError(
            f"--hosts measures between hosts, but all {world.size} ranks are on one host. Start the command on a "
            "second host too, or leave --hosts out."
        )
    group = group_of(chosen) if len(chosen) < world.size else None
    results: list[PathResult] = []
    if world.rank in chosen:
        names = [f"node{number}" for number in range(len(chosen))]
        device = torch.device(world.device)
        results = measure_ranks(names, sizes, budget, what, progress, device=device, group=group)
    broadcast_object(None)  # nobody leaves before the others are done
    return results


def paths_between(names: Sequence[str], backend: str, what: Sequence[str]) -> list[RanksSpec]:
    """Return the paths and collectives to measure between ranks, in order.

    names: the name of each rank, such as `cpu:0` or `node0`.
    what: the groups to measure, such as `links`, `collectives` or `direct`.
    """
    ranks = len(names)
    paths: list[RanksSpec] = []
    if "links" in what:
        for a, b in permutations(range(ranks), 2):
            paths.append(RanksSpec("copy", names[a], names[b], backend, 2, cases.copy(a, b), (a, b)))
        if ranks > 2:
            paths.append(RanksSpec("one-to-all", names[0], "all", backend, ranks, cases.one_to_all(0, back=False)))
            paths.append(RanksSpec("all-to-one", "all", names[0], backend, ranks, cases.one_to_all(0, back=True)))
    makers: list[tuple[str, str, Maker]] = []
    if "collectives" in what:
        makers += [("all-reduce", backend, cases.all_reduce), ("send-receive", backend, cases.send_receive)]
    for operation, (make, composed) in _COMPOSED.items():
        if "collectives" in what:
            makers.append((operation, backend, make(False)))
        if "direct" in what and backend == "gloo" and composed(ranks):
            makers.append((operation, backend + DIRECT, make(True)))
    return paths + [RanksSpec(operation, "", "", path, ranks, maker) for operation, path, maker in makers]


def _measure_as_rank(
    names: Sequence[str], sizes: Sequence[int], budget: float, what: Sequence[str]
) -> list[PathResult]:
    session = join()
    device = torch.device(session.world.device)
    return measure_ranks(names, sizes, budget, what, sent_over(session.channel), device=device)


def _check(sizes: Sequence[int], what: Sequence[str]) -> None:
    known = WHAT + MORE
    for one in what:
        if one not in known:
            raise UsageError(f"{one!r} cannot be measured.{nearest(one, known)} Use {', '.join(known)}.")
    if not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes)):
        raise UsageError(f"sizes={list(sizes)} must be one or more sizes in bytes, each larger than the last.")

"""Measure devices alone, links between pairs of ranks, and collectives.

`measure_alone` and `measure_processes` start a worker per device and get each result as it is done, so that earlier
results survive a Ctrl-C or a rank that dies. `measure_ranks` is for ranks that are in a process group already, such
as one per host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import permutations

import torch

from meshwise.hardware.measure import cases
from meshwise.hardware.measure.cases import Member
from meshwise.hardware.measure.compute import launch_seconds, matmuls, memory_rate
from meshwise.hardware.measure.result import SILENT, DeviceResult, PathResult, Progress, listeners, sent_over
from meshwise.hardware.measure.together import RanksSpec, measure_path
from meshwise.spec.devices import WorkerSlot
from meshwise.spec.errors import UsageError, check_known
from meshwise.torch_compat.collectives import Group, backend_of
from meshwise.transfer.collectives import barrier, broadcast_object, gather_objects
from meshwise.transfer.groups import get_rank, group_of, world_size
from meshwise.workers.join import join
from meshwise.workers.launch import launch

WHAT = ("links", "collectives")
COLLECTIVES = {
    "all-reduce": cases.all_reduce,
    "send-receive": cases.send_receive,
    "broadcast": cases.broadcast,
    "all-gather": cases.all_gather,
    "reduce-scatter": cases.reduce_scatter,
    "all-to-all": cases.all_to_all,
}
MEMORY_SHARE = 0.15
"""The share of a device's measuring time that goes to its memory rate. The rest is for matrix products."""


def device_names(slots: Sequence[WorkerSlot]) -> list[str]:
    """Return the name of each slot's device, such as `cuda:2` for an accelerator, or `cpu:1` for the second CPU
    worker."""
    return [f"cpu:{rank}" if slot.index is None else slot.name for rank, slot in enumerate(slots)]


def measure_alone(slots: Sequence[WorkerSlot], budget: float, progress: Progress) -> None:
    """Measure each device separately, in its own worker, for about `budget` seconds in total."""
    turns = len(slots) if slots[0].device == "cpu" else 1
    arguments = (device_names(slots), budget / turns, turns > 1)
    launch(_measure_device, arguments, slots, listeners=listeners(progress))


def measure_here(name: str, device: torch.device, budget: float) -> DeviceResult:
    """Measure one device in this process for about `budget` seconds."""
    rate = memory_rate(device, budget * MEMORY_SHARE)
    products = tuple(matmuls(device, budget * (1 - MEMORY_SHARE)))
    return DeviceResult(name, rate, products, launch_seconds(device))


def measure_processes(
    slots: Sequence[WorkerSlot],
    sizes: Sequence[int],
    budget: float,
    what: Sequence[str] = WHAT,
    progress: Progress = SILENT,
) -> list[PathResult]:
    """Start one worker per slot, and measure paths and collectives between the workers for about `budget` seconds."""
    for one in what:
        check_known("what", one, WHAT)
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
    """Measure paths and collectives between the ranks of an existing group for about `budget` seconds."""
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
        left = gather_objects(left, group)[0]  # the time left on rank 0's clock
        results.append(measure_path(path, member, sizes, left, progress.starts))
        progress.done(results[-1])
    return results


def measure_hosts(
    sizes: Sequence[int], budget: float, what: Sequence[str] = WHAT, progress: Progress = SILENT
) -> list[PathResult]:
    """Measure the links and collectives between hosts."""
    world = join().world
    local_ranks = gather_objects(world.local_rank) if world.size > 1 else [0]
    chosen = [rank for rank, local in enumerate(local_ranks) if local == 0]
    if len(chosen) < 2:
        raise UsageError(
            "--hosts measures between hosts, but only this one takes part. Start the command on each host, for "
            "example with torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 -m meshwise bench --hosts."
        )
    group = group_of(chosen) if len(chosen) < world.size else None
    results: list[PathResult] = []
    if world.rank in chosen:
        names = [f"node{number}" for number in range(len(chosen))]
        device = torch.device(world.device)
        results = measure_ranks(names, sizes, budget, what, progress, device=device, group=group)
    broadcast_object(None)  # no rank leaves before the others are done
    return results


def paths_between(names: Sequence[str], backend: str, what: Sequence[str]) -> list[RanksSpec]:
    """Return the paths and collectives to measure between ranks, in order."""
    for one in what:
        check_known("what", one, WHAT)
    paths: list[RanksSpec] = []
    if "links" in what:
        pairs = permutations(range(len(names)), 2)
        paths += [RanksSpec("copy", names[a], names[b], backend, 2, cases.copy(a, b)) for a, b in pairs]
    if "collectives" in what:
        paths += [RanksSpec(kind, "", "", backend, len(names), make) for kind, make in COLLECTIVES.items()]
    return paths


def _measure_device(names: Sequence[str], budget: float, in_turn: bool) -> None:
    session = join()
    rank, size = session.world.rank, session.world.size
    progress = sent_over(session.channel)
    for turn in range(size if in_turn else 1):
        if turn == rank or not in_turn:
            progress.done(measure_here(names[rank], torch.device(session.world.device), budget))
        barrier()


def _measure_as_rank(
    names: Sequence[str], sizes: Sequence[int], budget: float, what: Sequence[str]
) -> list[PathResult]:
    session = join()
    device = torch.device(session.world.device)
    return measure_ranks(names, sizes, budget, what, sent_over(session.channel), device=device)

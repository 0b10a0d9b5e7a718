"""Time a path at growing sizes, with all ranks in agreement.

All ranks make every decision from the same numbers.

After each timed call, one small all-reduce tells all ranks the slowest rank's seconds and the time spent so far; it is
also the barrier before the next call. So a rank that is slow, or whose clock differs, cannot continue alone and wait
forever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from meshwise.hardware.measure.cases import ACK, Case, Maker, Member
from meshwise.hardware.measure.result import PathResult, PathSpec, result_of
from meshwise.hardware.measure.timing import LEAST, MOST, host_seconds, repeat, stream_seconds
from meshwise.spec.devices import has_streams
from meshwise.spec.units import bytes_text, seconds_text
from meshwise.transfer.collectives import all_reduce, gather_objects

PING_SECONDS = 0.01
COMPUTING, WIDTH = (
    5e-3,
    192,
)  # seconds and width of the matrix products that run before a call, as in a training step


@dataclass(frozen=True)
class RanksSpec(PathSpec):
    """A path or a collective between ranks that is to be measured."""

    make: Maker


def measure_path(
    path: RanksSpec, member: Member, sizes: Sequence[int], budget: float, starts: Callable[[str], object]
) -> PathResult:
    """Time a path at growing sizes until `budget` seconds are spent, and check the bytes at each size."""
    began = time.perf_counter()
    agree = partial(_agree, member)
    latency = _latency(path, member) if path.source else 0.0
    samples: dict[int, list[float]] = {}
    in_step: list[float] = []
    wrong, note, cost = None, "", 0.0
    for number, size in enumerate(sizes):
        spent = agree(time.perf_counter() - began)[0]
        growth = size / sizes[number - 1] if number else 1.0
        if samples and spent + cost * growth > budget:
            note = (
                f"{path}: stopped after {bytes_text(sizes[number - 1])}; {bytes_text(size)} would take more than the "
                f"{seconds_text(budget)} of a path"
            )
            break
        starts(f"{path}, {bytes_text(size)}")
        at = time.perf_counter()
        case = path.make(member, size)
        wrong = check_path(path, member, case, 2 * number)
        on_cpu = not has_streams(member.device)
        share = max(budget - spent, 0.0) / (len(sizes) - number) / (1 + on_cpu)
        timed = partial(_timed, case, member, latency)
        samples[case.size], more = repeat(timed, share, single=bool(path.source), agree=agree)
        if on_cpu:
            before = time.perf_counter()
            in_step.append(_in_step(timed, case.counts, member, share, median(samples[case.size])))
            # Leave these calls out of `cost`, which is scaled by the size: a larger size may make fewer of them.
            at += time.perf_counter() - before
        wrong = wrong or check_path(path, member, case, 2 * number + 1)
        cost = agree(time.perf_counter() - at - more)[0]
        if wrong:
            break
    return result_of(path, samples, wrong, note, in_step)


def check_path(path: RanksSpec, member: Member, case: Case, number: int) -> str | None:
    """Communicate once with the data of round `number`. Return a sentence if wrong bytes arrived."""
    case.fill(number)
    case.call()
    found = case.wrong(number)
    if not _agree(member, float(found is not None))[0]:
        return None
    first = next(text for text in gather_objects(found, member.group) if text is not None)
    return f"{path}, {bytes_text(case.size)}: {first}"


def _latency(path: RanksSpec, member: Member) -> float:
    """Return how many seconds a few bytes take in one direction: half of a round trip. Collective."""
    ping = partial(_timed, path.make(member, ACK), member, 0.0)
    return median(repeat(ping, PING_SECONDS, single=True, agree=partial(_agree, member))[0]) / 2


def _in_step(timed: Callable[[int], float], computes: bool, member: Member, share: float, seconds: float) -> float:
    """Return the mean seconds of a call if ranks on CPUs compute before it, as in a training step. Collective."""
    # In a step, early ranks wait for the last one, and gloo's threads wait for a core. Back-to-back calls show neither,
    # and the median of a few calls hides rare delays, so the mean is taken. The target of a copy does not compute,
    # because it may wait for the copy.
    left, right = torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    product, call = _agree(member, host_seconds(lambda: left @ right, member.device, 50), seconds)
    products, count = round(COMPUTING / product), min(max(round(share / (COMPUTING + call)), LEAST), MOST)
    total = 0.0
    for _ in range(count):
        _agree(member, 0.0)  # keeps a broadcast's source from running a whole call ahead
        for _ in range(products if computes else 0):
            left @ right
        total += timed(1)
    return _agree(member, total / count)[0]


def _timed(case: Case, member: Member, latency: float, batch: int) -> float:
    """Return the mean seconds of `batch` calls, without the answer's latency; 0 if this rank's time does not count."""
    seconds = stream_seconds if has_streams(member.device) else host_seconds
    took = seconds(case.call, member.device, batch)
    return max(took - latency, took / 2) if case.counts else 0.0


def _agree(member: Member, *values: float) -> list[float]:
    """Return the maximum of each value over the ranks; this is also a barrier."""
    largest: list[float] = all_reduce(torch.tensor(values, dtype=torch.float64), "max", member.group).tolist()
    return largest

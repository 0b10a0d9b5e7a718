"""Time one path by size, in agreement among a group's ranks.

All ranks make every decision from the same numbers.

After each timed call, one small all-reduce tells all ranks the slowest rank's seconds and the time spent so far; it is
also the barrier before the next call. So a rank that is slow, or whose clock differs, cannot continue alone and wait
forever.

Tested in tests/machine/test_processes.py and test_shaped_links.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from meshwise.machine.measure.cases import Case, Maker, Member, checked
from meshwise.machine.measure.result import PathResult, PathSpec, result_of
from meshwise.machine.measure.timing import Sample, host_seconds, sample_of, stream_seconds
from meshwise.spec.devices import has_streams
from meshwise.spec.units import bytes_text, seconds_text
from meshwise.transfer.collectives import all_reduce, gather_objects, send_receive

LEAST, MOST = 3, 100  # timed repeats of a size
WARM_UP = 5  # calls at most; fewer when two in a row differ by less than STABLE
STABLE = 0.1
TIMED_SECONDS, MOST_CALLS = 2e-3, 20  # small messages are called in a row until this, as nccl-tests do
PING_PONGS = 20
_SMALL = 8  # bytes of a ping
COMPUTING, WIDTH = 5e-3, 192  # seconds of products of this width before a call, as between the collectives of a step


@dataclass(frozen=True)
class RanksSpec(PathSpec):
    """A path or a collective between ranks that is to be measured.

    make: the function that makes the `Case` that each rank runs for a message size.
    answered: (source, target) if this is a single copy, else None. The target confirms each copy with a few bytes,
        before the source begins the next copy. The measured time includes this answer.
    """

    make: Maker
    answered: tuple[int, int] | None = None


def measure_path(
    path: RanksSpec, member: Member, sizes: Sequence[int], budget: float, starts: Callable[[str], object]
) -> PathResult:
    """Time a path at growing sizes until `budget` seconds are spent, and check the bytes at each size. All ranks must
    call it.

    starts: called with the name of each measurement before it starts.
    """
    began = time.perf_counter()
    latency = _ping_pong(member, *path.answered) if path.answered else 0.0
    samples: dict[int, Sample] = {}
    wrong, note, cost = None, "", 0.0
    for number, size in enumerate(sizes):
        spent = _agree(member, time.perf_counter() - began)[0]
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
        share = max(budget - spent, 0.0) / (len(sizes) - number)
        in_step = not has_streams(member.device) and (path.answered is not None or not path.source)
        share = share / 2 if in_step else share
        sample, least = _repeat(case, member, share, latency, path.answered is not None)
        if in_step:
            before = time.perf_counter()
            sample = replace(sample, in_step=_in_step(case, member, share, latency, sample.seconds))
            at += time.perf_counter() - before  # a larger size may have fewer of these
        samples[case.size] = sample
        wrong = wrong or check_path(path, member, case, 2 * number + 1)
        cost = _agree(member, time.perf_counter() - at - least)[0]
        if wrong:
            break
    return result_of(path, samples, wrong, note)


def check_path(path: RanksSpec, member: Member, case: Case, number: int) -> str | None:
    """Communicate once with the data of round `number`, and check what arrived. All ranks must call it, and all get the
    same result.

    Returns None if every byte is right on every rank. Otherwise returns a text on the path and on the first wrong byte
    of the lowest rank that received wrong bytes.
    """
    found = checked(case, number)
    if not _agree(member, float(found is not None))[0]:
        return None
    first = next(text for text in gather_objects(found, member.group) if text is not None)
    return f"{path}, {bytes_text(case.size)}: {first}"


def _repeat(case: Case, member: Member, share: float, latency: float, single: bool) -> tuple[Sample, float]:
    """Measure the time of a call. Collective. The call is repeated for about `share` seconds, but at least LEAST and at
    most MOST times.

    latency: the seconds that the receiver of a copy needs to confirm it. They are subtracted from each measured time,
        up to half of that time.
    single: whether to time single calls. Otherwise, several short calls are timed together.

    Returns the percentiles of the times. Also returns the seconds that were spent after the first LEAST repeats.
    """
    began = time.perf_counter()
    last = 0.0
    for number in range(WARM_UP):
        once, spent = _agree(member, _timed(case, member, 1), time.perf_counter() - began)
        stable = abs(once - last) <= STABLE * once
        last = once
        if number and (stable or spent > share / 4):
            break
    batch = 1 if single else max(1, min(MOST_CALLS, int(TIMED_SECONDS / max(last, 1e-9))))
    seconds: list[float] = []
    at_least = 0.0
    while len(seconds) < LEAST or (len(seconds) < MOST and spent < share):
        took, spent = _agree(member, _timed(case, member, batch), time.perf_counter() - began)
        seconds.append(max(took - latency, took / 2))  # the answer of a copy takes one latency
        if len(seconds) == LEAST:
            at_least = spent
    return sample_of(seconds), spent - at_least


def _in_step(case: Case, member: Member, share: float, latency: float, seconds: float) -> float:
    """Return the mean seconds of a call on CPU workers if the ranks compute before the call, as in a training step. The
    call is repeated for about `share` seconds. Collective.

    The first ranks to arrive wait for the last one, and the scheduler lets the threads of gloo wait for a core. Calls
    in a row show neither, and the median of a few calls does not show what a step pays for many. The source of a
    broadcast does not wait, so the rank that waits longest counts.

    latency: see `_repeat`. The target of a copy does not compute, since it may wait for the copy.
    seconds: about how many seconds a call takes.
    """
    left, right = torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    product, call = _agree(member, host_seconds(lambda: left @ right, member.device, 50), seconds)
    products, count = round(COMPUTING / product), min(max(round(share / (COMPUTING + call)), LEAST), MOST)
    total = 0.0
    for _ in range(count):
        _agree(member, 0.0)  # the source of a broadcast is not ahead by a whole call
        for _ in range(products if case.counts else 0):
            left @ right
        took = _timed(case, member, 1)
        total += max(took - latency, took / 2)
    return _agree(member, total / count)[0]


def _timed(case: Case, member: Member, batch: int) -> float:
    """Return the mean duration of `batch` calls on this rank, in seconds. It is measured by events in the stream of an
    accelerator, or by the host's clock on a CPU. Returns 0 on a rank whose time is not used."""
    if has_streams(member.device):
        seconds = stream_seconds(case.call, member.device, batch)
    else:
        seconds = host_seconds(case.call, member.device, batch)
    return seconds if case.counts else 0.0


def _agree(member: Member, *values: float) -> list[float]:
    """Return the maximum of each value over the ranks. All ranks must call it, so it is also a barrier. The values are
    sent in a CPU tensor."""
    largest: list[float] = all_reduce(torch.tensor(values, dtype=torch.float64), "max", member.group).tolist()
    return largest


def _ping_pong(member: Member, one: int, other: int) -> float:
    """Return the seconds that a few bytes take in one direction, which is half of the median round trip. All ranks must
    call it."""
    halves = [0.0]
    if member.rank in (one, other):
        peer = other if member.rank == one else one
        sent, got = (torch.zeros(_SMALL, dtype=torch.uint8, device=member.device) for _ in range(2))
        for number in range(PING_PONGS):
            start = time.perf_counter()
            turns = [([(sent, peer)], []), ([], [(got, peer)])]
            for sends, receives in turns if member.rank == one else reversed(turns):
                send_receive(sends, receives, member.group)
            if has_streams(member.device):
                torch.get_device_module(member.device).synchronize(member.device)
            if number >= PING_PONGS // 4:
                halves.append((time.perf_counter() - start) / 2)
    return _agree(member, median(halves[1:]) if member.rank == one else 0.0)[0]

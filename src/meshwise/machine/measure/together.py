"""Time one path by size inside the ranks of a group: every decision is made by all of them from the same numbers.

After each timed call the ranks agree on the slowest rank's seconds and on how long they have been at it, in one small
all-reduce, which is also the barrier before the next call. So a rank that is slow, or whose clock differs, cannot go on
alone and wait for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from meshwise.machine.measure.cases import Case, Maker, Place, checked
from meshwise.machine.measure.result import PathResult
from meshwise.machine.measure.timing import Sample, sample_of
from meshwise.spec.timings import fitted
from meshwise.spec.units import bytes_text, seconds_text
from meshwise.transfer.collectives import all_reduce, gather_objects, send_receive

LEAST, MOST = 3, 100  # timed repeats of a size
WARM_UP = 5  # calls at most; fewer when two in a row differ by less than STABLE
STABLE = 0.1
TIMED_SECONDS, MOST_CALLS = 2e-3, 20  # small messages are called in a row until this, as nccl-tests do
PING_PONGS = 20
_SMALL = 8  # bytes of a ping


@dataclass(frozen=True)
class Path:
    """What is measured: operation, ends (names or empty), the backend in words, and how a rank makes its case.

    taking: ranks that take part, None for all. answered: the two ranks of a copy, which is timed by the first one's
    clock and answered by the second, so that no two of them are in a row.
    """

    operation: str
    source: str
    target: str
    path: str
    make: Maker
    taking: int | None = None
    answered: tuple[int, int] | None = None

    def __str__(self) -> str:
        ends = f" {self.source} -> {self.target}" if self.source else ""
        return f"{self.operation}{ends}, {self.path}"


def measure_path(
    path: Path, place: Place, sizes: Sequence[int], budget: float, tell: Callable[[str], None]
) -> PathResult:
    """Times of growing sizes until `budget` seconds are spent, each size checked before and after. Collective."""
    began = time.perf_counter()
    latency = _ping_pong(place, *path.answered) if path.answered else 0.0
    samples: dict[int, Sample] = {}
    wrong, note, cost = None, "", 0.0
    for number, size in enumerate(sizes):
        spent = _agree(place, time.perf_counter() - began)[0]
        growth = size / sizes[number - 1] if number else 1.0
        if samples and spent + cost * growth > budget:
            note = (
                f"{path}: stopped after {bytes_text(sizes[number - 1])}; {bytes_text(size)} would take more than the "
                f"{seconds_text(budget)} of a path"
            )
            break
        tell(f"{path}, {bytes_text(size)}")
        at = time.perf_counter()
        case = path.make(place, size)
        wrong = check_path(path, place, case, 2 * number)
        share = max(budget - spent, 0.0) / (len(sizes) - number)
        sample, least = _repeat(case, place, share, latency, path.answered is not None)
        samples[case.size] = sample
        wrong = wrong or check_path(path, place, case, 2 * number + 1)
        cost = _agree(place, time.perf_counter() - at - least)[0]
        if wrong:
            break
    timings = fitted(
        list(samples),
        [sample.seconds for sample in samples.values()],
        [sample.p95 for sample in samples.values()],
        [sample.p99 for sample in samples.values()],
    )
    return PathResult(
        path.operation, path.source, path.target, path.path, path.taking or place.ranks, timings, wrong, note
    )


def check_path(path: Path, place: Place, case: Case, number: int) -> str | None:
    """Communicate once with the data of round `number`. What differs, in words that name the path, as the first rank
    found it that found something; None when every byte is right everywhere. The same on every rank; collective."""
    found = checked(case, number)
    if not _agree(place, float(found is not None))[0]:
        return None
    first = next(text for text in gather_objects(found, place.group) if text is not None)
    return f"{path}, {bytes_text(case.size)}: {first}"


def _repeat(case: Case, place: Place, share: float, latency: float, single: bool) -> tuple[Sample, float]:
    """Seconds of one call, and the seconds that were spent beyond the least number of repeats."""
    began = time.perf_counter()
    last = 0.0
    for number in range(WARM_UP):
        once, spent = _agree(place, _timed(case, place, 1), time.perf_counter() - began)
        stable = abs(once - last) <= STABLE * once
        last = once
        if number and (stable or spent > share / 4):
            break
    batch = 1 if single else max(1, min(MOST_CALLS, int(TIMED_SECONDS / max(last, 1e-9))))
    seconds: list[float] = []
    at_least = 0.0
    while len(seconds) < LEAST or (len(seconds) < MOST and spent < share):
        took, spent = _agree(place, _timed(case, place, batch), time.perf_counter() - began)
        seconds.append(max(took - latency, took / 2))  # the answer of a copy takes one latency
        if len(seconds) == LEAST:
            at_least = spent
    return sample_of(seconds), spent - at_least


def _timed(case: Case, place: Place, batch: int) -> float:
    """This rank's seconds of one call: by the stream's events on CUDA, by the host's clock elsewhere."""
    if place.device.type == "cuda":
        return _timed_on_cuda(case, batch)
    start = time.perf_counter()
    for _ in range(batch):
        case.call()
    return (time.perf_counter() - start) / batch if case.counts else 0.0


def _timed_on_cuda(case: Case, batch: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(batch):
        case.call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / batch if case.counts else 0.0


def _agree(place: Place, *values: float) -> list[float]:
    """The largest of each value over the ranks. Also a barrier; always on the host."""
    largest: list[float] = all_reduce(torch.tensor(values, dtype=torch.float64), "max", place.group).tolist()
    return largest


def _ping_pong(place: Place, one: int, other: int) -> float:
    """Seconds of a few bytes one way: half of what they take there and back, the median of some. Collective."""
    halves = [0.0]
    if place.rank in (one, other):
        peer = other if place.rank == one else one
        sent, got = (torch.zeros(_SMALL, dtype=torch.uint8, device=place.device) for _ in range(2))
        for number in range(PING_PONGS):
            start = time.perf_counter()
            turns = [([(sent, peer)], []), ([], [(got, peer)])]
            for sends, receives in turns if place.rank == one else reversed(turns):
                send_receive(sends, receives, place.group)
            if place.device.type == "cuda":
                torch.cuda.synchronize(place.device)
            if number >= PING_PONGS // 4:
                halves.append((time.perf_counter() - start) / 2)
    return _agree(place, median(halves[1:]) if place.rank == one else 0.0)[0]

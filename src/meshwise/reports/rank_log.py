"""Read a rank's log, and align its clock with rank 0's.

The clocks are aligned by round trips, and by the order that collectives impose. A round trip (sent, theirs, received)
shows that rank 0's clock is ahead by `theirs - (sent + received) / 2`, to within half the round trip's duration; of one
burst of round trips, only the shortest counts. A line fitted through the bursts gives the drift. If the clocks wander
more than the samples' errors allow, offsets are interpolated between bursts.

After that, no all-reduce may end on any rank before the last rank has arrived at it. If an all-reduce does, the clocks
must be wrong, and they are shifted by the smallest amounts that correct this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwise.records import folder as names
from meshwise.records.files import read_lines
from meshwise.reports.spans import VERSION, Clock, Column, unpack
from meshwise.spec.words import printable

Times = NDArray[np.int64]
CLEAR = 3.0
"""A burst of clock round trips is congested if even its shortest trip takes this many times as long as the shortest
trip of all bursts. `fit_clock` first leaves out such bursts: congestion in one direction looks like clock drift."""
DRIFT = 1e-4
"""Assumed upper bound of the drift between two clocks: 100 µs per second, as for a bad quartz oscillator."""
BURST = 1_000_000_000  # ns: samples closer than this belong to one burst


@dataclass(frozen=True)
class ClockFit:
    """Conversion from the clock of one rank to the clock of rank 0."""

    clock: Clock
    at: NDArray[np.float64]
    offset: NDArray[np.float64]

    def to_reference(self, times: Times) -> Times:
        """Convert times in ns from the rank's own clock to the clock of rank 0."""
        if len(self.at) == 1:
            return times + round(float(self.offset[0]))
        origin = int(self.at[0])
        # Differences to `origin` are small enough for float64 to keep nanoseconds.
        offset = np.interp((times - origin).astype(np.float64), self.at - origin, self.offset)
        return times + np.rint(offset).astype(np.int64)


def fit_clock(rank: int, samples: Sequence[tuple[int, int, int]]) -> ClockFit:
    """Fit the clock of a rank to the clock of rank 0."""
    if not samples:
        return ClockFit(Clock(rank), np.zeros(1), np.zeros(1))
    at, offset, half = _bursts(np.asarray(samples, dtype=np.int64))
    for use in (half <= CLEAR * half.min(), np.full(len(at), True)):
        slope, level = _line(at[use], offset[use], half[use])
        level -= slope * float(at[use][0] - at[0])
        misfit = np.abs(offset - (level + slope * (at - at[0])))
        if (misfit <= half).all():
            apart = (DRIFT + abs(slope)) * np.abs(at[:, None] - at)
            error = float((half + misfit + apart).min(axis=1).max())
            ends = np.array([at[0] - 3.6e12, at[-1] + 3.6e12])  # `np.interp` is constant outside: extend by an hour
            return ClockFit(Clock(rank, level, slope, error, len(samples)), ends, level + slope * (ends - at[0]))
    drift = float((offset[-1] - offset[0]) / (at[-1] - at[0]))
    return ClockFit(Clock(rank, float(offset[0]), drift, float(half.max()), len(samples)), at, offset)


def _bursts(samples: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the time, offset and error of each burst's shortest round trip, which is the most exact."""
    sent, theirs, received = samples[np.argsort(samples[:, 0], kind="stable")].T
    burst = np.concatenate([[0], np.cumsum(np.diff(sent) > BURST)])
    order = np.lexsort((received - sent, burst))
    best = order[np.unique(burst[order], return_index=True)[1]]
    middle = sent[best] + (received[best] - sent[best]) // 2
    half = (received[best] - sent[best]) / 2
    return middle.astype(np.float64), (theirs[best] - middle).astype(np.float64), half


def _line(at: NDArray[np.float64], offset: NDArray[np.float64], half: NDArray[np.float64]) -> tuple[float, float]:
    """Fit a line to the clock offset over time. Return its slope, and its value at `at[0]`."""
    if len(at) < 2 or (len(at) == 2 and abs(offset[1] - offset[0]) <= half.sum()):
        return 0.0, float(offset[np.argmin(half)])
    slope, level = np.polyfit(at - at[0], offset - offset[0], 1, w=1 / np.maximum(half, 1.0))
    return float(slope), float(level + offset[0])


def causal_shifts(arrivals: Times, ends: Times) -> NDArray[np.int64] | None:
    """Return by how many ns to shift the ranks' clocks so that no collective ends before its last rank has arrived.
    None if no shifts achieve this."""
    ranks = arrivals.shape[1]
    if not len(arrivals):
        return np.zeros(ranks, np.int64)
    # lag[i, j]: how far rank i's clock must be advanced relative to rank j's.
    lag = np.stack([(arrivals - ends[:, i : i + 1]).max(axis=0) for i in range(ranks)])
    np.fill_diagonal(lag, 0)
    shift = np.zeros(ranks, np.int64)
    for _ in range(ranks + 1):  # Bellman-Ford for longest paths; it converges within `ranks` rounds, if at all
        moved = np.maximum(shift, (shift[None, :] + lag).max(axis=1))
        if (moved == shift).all():
            result: NDArray[np.int64] = shift - shift[0]
            return result
        shift = moved
    return None


MOST = 1 << 60
"""The largest number of ns, steps or bytes that is accepted in a log, so that sums fit in 64 bits."""
MOST_PACKED = 200
"""A log with more spans per character of its compressed text is damaged, because zlib cannot compress better."""
ALIKE = fit_clock(0, ())
Kind = tuple[str, str, str]
"""The kind, lane and name of a span."""


@dataclass
class RankLog:
    """The log of one rank in one session."""

    rank: int
    world: int
    device: str
    host: str
    unix: float
    """When the log began, in seconds since 1970."""
    clock: int
    program: str = ""
    """`plain`: the program never calls meshwise. `trainer`, `lightning`: it uses that Trainer. Empty: none of them."""
    divided: str = ""
    """How far the whole view divided the work on a batch, in words. Empty if the log does not say."""
    session: int = 0
    attempt: int = 0
    """Number of the attempt of the run that wrote this log, from 1. It is 0 if the log does not say."""
    packed: list[tuple[int, str]] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    counters: list[tuple[int, int, int, str, float]] = field(default_factory=list)
    round_trips: list[tuple[int, int, int]] = field(default_factory=list)
    dtypes: dict[tuple[str, int], str] = field(default_factory=dict)
    """The dtype of the data that a collective sent. The key is the collective's name and its number of bytes."""
    end: int | None = None
    overhead_seconds: float = 0.0
    dropped: int = 0
    damaged: int = 0
    fit: ClockFit = ALIKE
    """Converts the rank's clock to the clock of rank 0."""
    origin: int = 0
    """What the clock of rank 0 shows at time 0 of the timeline (ns)."""

    def moments(self, times: Column) -> Column:
        """Convert times of the rank's clock to the time of the timeline."""
        return self.fit.to_reference(times) - self.origin

    @property
    def spans(self) -> int:
        """The number of spans that the log claims to have, including spans that turn out to be damaged."""
        return sum(count for count, _ in self.packed)

    def blocks(self) -> Iterator[tuple[Column, ...]]:
        """Yield the spans of the log, in the blocks in which they were written."""
        while self.packed:
            count, text = self.packed.pop(0)
            try:
                block = unpack(text, count)
            except ValueError:
                self.damaged += 1
                continue
            if count and int(block[0].min()) >= 0 and int(block[0].max()) < len(self.kinds):
                yield block
            elif count:
                self.damaged += 1

    def last_known(self) -> int:
        """Return the latest time that is known without unpacking the spans, in ns of the rank's clock."""
        return max([self.clock, *(counter[0] for counter in self.counters[-1:]), *([self.end] if self.end else [])])


def read_rank_log(path: Path, last_blocks: int | None) -> tuple[list[RankLog], str]:
    """Read the log file of a rank. Return the log of each session, and a sentence on what is unreadable."""
    logs: list[RankLog] = []
    other = ""
    headless = True  # True while lines belong to a session whose first line is unreadable
    for line in read_lines(path):
        try:
            if "log" in line:
                other, headless = "" if line["log"] == VERSION else str(line["log"]), True
                if not other:
                    logs.append(_begun(line))
                    headless = False
            elif "kind" in line and not logs:
                other = "1"
            elif logs and not other:
                if headless or logs[-1].end is not None:
                    raise ValueError("a line has spans, but no open session to which they belong")
                _take(logs[-1], line)
        except (TypeError, ValueError, LookupError, OverflowError, AttributeError):
            if logs:
                logs[-1].damaged += 1
    if last_blocks is not None and logs:
        logs[-1].packed = logs[-1].packed[-last_blocks:]
        for log in logs[:-1]:
            log.packed = []
    return logs, _unread(path, other, logs)


def place_of(path: Path) -> tuple[int, int]:
    """Return the rank and the attempt in the name of a log file. Attempts are numbered from 1."""
    numbers = [int(number) for number in re.findall(r"\d+", path.name)] or [0]
    return numbers[0], numbers[1] if len(numbers) > 1 else 1


def _whole(value: Any, most: int = MOST) -> int:
    """Parse a count or a time in ns. Raises ValueError if it is out of range."""
    return int(_in_range(int(value), most))


def _in_range(number: float, most: float) -> float:
    if not 0 <= number <= most:
        raise ValueError(f"{number} is out of range")
    return number


def _unread(path: Path, other: str, logs: list[RankLog]) -> str:
    if other:
        return (
            f"{path.parent.name}/{path.name} is from another version of meshwise. Its log format is {other}, and "
            f"this version reads {VERSION}, so its spans are left out."
        )
    if not logs:
        return f"{path.parent.name}/{path.name} has no first line: rank {place_of(path)[0]} was cut off at its start."
    return ""


def _begun(line: dict[str, Any]) -> RankLog:
    return RankLog(
        rank=_whole(line["rank"], names.MOST_RANKS),
        world=_whole(line["world"], names.MOST_RANKS),
        device=printable(str(line.get("device", ""))),
        host=printable(str(line.get("host", ""))),
        unix=_in_range(float(line["unix"]), names.LATEST),
        clock=_whole(line["clock"]),
        program=str(line.get("program", "")),
        attempt=_whole(line.get("attempt", 0), names.MOST_RANKS),
    )


def _take(log: RankLog, line: dict[str, Any]) -> None:
    if "spans" in line:
        log.kinds += [(str(kind), str(lane), printable(str(name))) for kind, lane, name in line.get("names", [])]
        for code, size, dtype in line.get("dtypes", []):
            log.dtypes[log.kinds[code][2], _whole(size)] = str(dtype)
        log.dropped = _whole(line.get("dropped", log.dropped))
        log.program = str(line.get("program", log.program))
        text = str(line["data"])
        log.packed.append((_whole(line["spans"], MOST_PACKED * len(text)), text))
    elif "counters" in line:
        for time, step, phase, name, value in line["counters"]:
            if value is not None:
                where = _whole(time), _whole(step), max(_whole(int(phase) + 1, 1000) - 1, -1)
                log.counters.append((*where, printable(str(name)), float(value)))
    elif "divided" in line:
        log.divided = printable(str(line["divided"]))
    elif "clock" in line:
        log.round_trips += [(_whole(sent, back), _whole(theirs), _whole(back)) for sent, theirs, back in line["clock"]]
    elif "end" in line:
        log.end = _whole(line["end"])
        log.overhead_seconds = float(line.get("cost", {}).get("cpu_seconds", 0.0))

"""Simulate the launches of some ranks on one clock.

Hosts launch in order. A stream runs one launch after the other. A collective begins when all its ranks have reached it.
Activities that run at the same time slow each other.

Every activity has a remaining duration (in seconds when alone) and a rate. The rates of a rank's activities change when
another activity begins or ends on this rank. A send begins without its receiver. A receive ends when its send has
ended.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwise.planner.prices import Overlap
from meshwise.planner.work import CollectiveOperation, Copy, Launch, Operation, What

COMPUTING, INSIDE, ACROSS, TO_HOST, TO_DEVICE = range(5)
"""What a launch uses: compute units, links within a host, links between hosts, or the link to or from host memory."""


@dataclass(slots=True)
class Item:
    """A launch with its estimated time, or several consecutive operators joined into one."""

    place: int
    launch: Launch
    seconds: float
    host: float
    share: int
    blocks: bool
    number: int = 0
    lead: float = -1.0
    late: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """A finished launch. Times are in seconds from the start of the step."""

    rank: int
    place: int
    launch: Launch
    ready: float
    start: float
    end: float
    by_host: bool


_Member = tuple[int, Item, float, bool]
"""(rank, item, when its stream was ready for the item, whether its stream waited for the host's launch)."""


@dataclass(slots=True, eq=False)
class _Task:
    members: list[_Member]
    left: float
    start: float
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


@dataclass(slots=True)
class _Rank:
    items: list[Item]
    overlap: Overlap
    next: int = 0
    host: float = 0.0
    blocked: int = -1
    queues: dict[str, deque[tuple[Item, float]]] = field(default_factory=lambda: defaultdict(deque))
    busy: set[str] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    awaited: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    active: dict[_Task, None] = field(default_factory=dict)
    counts: list[int] = field(default_factory=lambda: [0] * 5)


class _Play:
    def __init__(self, ranks: Mapping[int, _Rank]) -> None:
        self.ranks = ranks
        self.done: list[Done] = []
        self.heap: list[tuple[float, int, _Task | None, int, int, str]] = []
        self.count = 0
        self.arrived: dict[tuple[str, tuple[int, ...], int], list[_Member]] = defaultdict(list)
        self.sent: set[tuple[tuple[int, ...], int]] = set()
        self.sends: dict[tuple[tuple[int, ...], int], float] = {}
        self.changed: set[int] = set()

    def run(self) -> None:
        for rank in self.ranks:
            self.launch(rank, 0.0)
        self.settle(0.0)
        while self.heap:
            now, _, task, version, rank, stream = heapq.heappop(self.heap)
            if task is None:
                self.begin_next(rank, stream, now)
            elif task.version == version:
                self.finish(task, now)
            else:
                continue
            self.settle(now)

    def launch(self, rank: int, now: float) -> None:
        """Let a rank's host launch its next items, up to the first whose end it must wait for."""
        of = self.ranks[rank]
        of.host = max(of.host, now)
        while of.next < len(of.items):
            item = of.items[of.next]
            of.next += 1
            stream = item.launch.stream
            of.queues[stream].append((item, of.host + (item.host if item.lead < 0 else item.lead)))
            of.host += item.host
            if item.blocks:
                of.blocked = item.place
            if len(of.queues[stream]) == 1 and stream not in of.busy:
                self.begin_next(rank, stream, now)
            if item.blocks:
                return

    def begin_next(self, rank: int, stream: str, now: float) -> None:
        """Begin the next item on a stream if it can begin now."""
        of = self.ranks[rank]
        queue = of.queues[stream]
        if stream in of.busy or not queue:
            return
        item, launched = queue[0]
        for place in item.launch.after:
            if place not in of.ended:
                of.awaited[place].append(stream)
                return
        if launched > now:
            self.push(launched, None, 0, rank, stream)
            return
        queue.popleft()
        of.busy.add(stream)
        seconds = max(item.seconds, launched - item.lead + item.late - now) if item.late else item.seconds
        self.begin((rank, item, now, launched >= now and launched > 0), seconds, now)

    def begin(self, member: _Member, seconds: float, now: float) -> None:
        item = member[1]
        what = item.launch.what
        if not isinstance(what, CollectiveOperation):
            self.start([member], now, seconds)
            return
        key = (what.kind, what.ranks, item.number)
        message = (what.ranks, item.number)
        if what.kind == "send":
            self.sends[message] = now
            self.start([member], now)
        elif what.kind == "receive":
            if what.ranks[0] not in self.ranks:
                self.start([member], now)
            elif message in self.sent:
                self.start([member], now, 0.0)
            else:
                self.arrived[key].append(member)
        else:
            self.arrived[key].append(member)
            if len(self.arrived[key]) >= sum(one in self.ranks for one in what.ranks):
                self.start(self.arrived.pop(key), now)

    def start(self, members: list[_Member], now: float, seconds: float | None = None) -> None:
        longest = max(item.seconds for _, item, _, _ in members) if seconds is None else seconds
        task = _Task(members, longest, now, since=now)
        for rank, item, _, _ in members:
            of = self.ranks[rank]
            of.active[task] = None
            of.counts[item.share] += 1
            self.changed.add(rank)

    def finish(self, task: _Task, now: float) -> None:
        task.version += 1
        for rank, item, ready, by_host in task.members:
            of = self.ranks[rank]
            del of.active[task]
            of.counts[item.share] -= 1
            self.changed.add(rank)
            self.ended(rank, item, Done(rank, item.place, item.launch, ready, task.start, now, by_host))
            what = item.launch.what
            if isinstance(what, CollectiveOperation) and what.kind == "send":
                self.deliver((what.ranks, item.number), now)

    def deliver(self, message: tuple[tuple[int, ...], int], now: float) -> None:
        """End the receive of a message that has been sent, or let it end as soon as it begins."""
        self.sent.add(message)
        for rank, item, ready, by_host in self.arrived.pop(("receive", *message), ()):
            began = max(ready, self.sends[message])
            self.ended(rank, item, Done(rank, item.place, item.launch, ready, began, now, by_host))

    def ended(self, rank: int, item: Item, done: Done) -> None:
        of, now = self.ranks[rank], done.end
        self.done.append(done)
        of.ended.add(item.place)
        stream = item.launch.stream
        of.busy.discard(stream)
        if of.blocked == item.place:
            of.blocked = -1
            self.launch(rank, now)
        self.begin_next(rank, stream, now)
        for waiting in of.awaited.pop(item.place, ()):
            self.begin_next(rank, waiting, now)

    def settle(self, now: float) -> None:
        """Update the speed and expected end of all activities on ranks where an activity has begun or ended."""
        if len(self.changed) == 1:
            tasks = list(self.ranks[self.changed.pop()].active)
        else:
            tasks = sorted({task for rank in self.changed for task in self.ranks[rank].active}, key=_first)
            self.changed.clear()
        for task in tasks:
            rate = min(self.rate(rank, item.share) for rank, item, _, _ in task.members)
            if rate == task.rate:
                continue
            task.left = max(task.left - (now - task.since) * task.rate, 0.0)
            task.rate, task.since = rate, now
            task.version += 1
            self.push(now + task.left / rate, task, task.version, 0, "")

    def rate(self, rank: int, share: int) -> float:
        """Return the speed of an activity now, as a fraction of its speed when nothing else runs."""
        of = self.ranks[rank]
        counts = of.counts
        rate = 1 / max(counts[share], 1)
        inside = of.overlap.inside or of.overlap
        if share == COMPUTING:
            return rate / (inside.compute if counts[INSIDE] else of.overlap.compute if counts[ACROSS] else 1.0)
        if share in (INSIDE, ACROSS) and counts[COMPUTING]:
            return rate / (inside if share == INSIDE else of.overlap).communication
        return rate

    def push(self, time: float, task: _Task | None, version: int, rank: int, stream: str) -> None:
        self.count += 1
        heapq.heappush(self.heap, (time, self.count, task, version, rank, stream))


def _first(task: _Task) -> tuple[int, int]:
    return task.members[0][0], task.members[0][1].place


def play(items: Mapping[int, Sequence[Item]], overlaps: Mapping[int, Overlap]) -> list[Done]:
    """Simulate a step of several ranks at once.
    Return the finished launches. Raises ValueError for a deadlock."""
    playing = _Play({rank: _Rank(list(own), overlaps[rank]) for rank, own in items.items()})
    playing.run()
    stuck = [_stuck(rank, of) for rank, of in playing.ranks.items() if len(of.ended) < len(of.items)]
    if stuck:
        raise ValueError("the ranks wait for each other forever: " + "; ".join(stuck))
    return playing.done


def _stuck(rank: int, of: _Rank) -> str:
    left = [item for item in of.items if item.place not in of.ended]
    waiting = next((item for item in left if item.launch.stream in of.busy), left[0])
    return f"rank {rank} waits in {name_of(waiting.launch.what)} (event {waiting.place})"


def name_of(what: What) -> str:
    """Return a name for a launch, such as `aten.mm`, `all-reduce of 8 ranks` or `copy to host`."""
    if isinstance(what, Operation):
        return what.name
    return f"copy to {what.to}" if isinstance(what, Copy) else f"{what.kind} of {len(what.ranks)} ranks"

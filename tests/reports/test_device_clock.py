"""The device's clock, on events of our own: read when passed, exact after hours, held within what is possible."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reports.device_clock import DeviceClock
from meshwise.reports.recorder import WIDTH, Recorder


@dataclass
class World:
    """A host and a device whose clock runs `drift` faster. Times in ns."""

    drift: float = 0.0
    now: int = 10**15
    lag: int = 5_000
    waits: int = 0

    def event(self) -> Event:
        return Event(self)


@dataclass
class Event:
    """Stands for torch.cuda.Event: elapsed times are float32 milliseconds, as CUDA gives them."""

    world: World
    at: int = 0
    passes: int = field(default=0)

    def record(self) -> None:
        self.passes = self.world.now + self.world.lag
        self.at = int(self.passes * (1 + self.world.drift))

    def query(self) -> bool:
        return self.world.now >= self.passes

    def elapsed_time(self, other: Event) -> float:
        return float(np.float32((other.at - self.at) / 1e6))

    def synchronize(self) -> None:
        self.world.waits += 1


@given(st.floats(-2e-5, 2e-5), st.integers(0, 50_000))
def test_six_hours_stay_within_a_tenth_of_a_millisecond(drift: float, lag: int) -> None:
    world = World(drift, lag=lag)
    clock = DeviceClock(lambda: world.now, world.event)
    for _ in range(1000):
        mark = clock.mark()
        world.now += 100_000  # the log looks soon after
        assert mark.event.query()
        told = clock.time(mark)
        assert mark.host <= told <= world.now
        world.now += 21_600_000_000


def test_work_that_still_runs_waits_for_a_later_drain_and_nothing_synchronises() -> None:
    world = World(lag=1_000_000)
    recorder = Recorder("cuda:0", clock=lambda: world.now)
    recorder.device = DeviceClock(lambda: world.now, world.event)
    since = recorder.clock()
    world.now += 1000
    recorder.add(recorder.code("data", lane="host"), since, recorder.clock())
    with recorder.span("forward"):
        world.now += 10
    (rows, _) = recorder.drain()
    assert len(rows) == WIDTH and recorder.names[rows[0]] == ("data", "host", "")
    world.now += 2_000_000
    (rows, _) = recorder.drain()
    assert len(rows) == WIDTH and recorder.names[rows[0]] == ("forward", "main", "")
    assert abs((rows[2] - rows[1]) - 10) <= 1 and world.waits == 0
    assert recorder.drain()[0] == []

"""Begin and end the recording of one rank.

The clock of each rank is compared with the clock of rank 0.

Tested with whole runs in tests/cli/test_run_folder.py and tests/reports.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import torch

from meshwise.hardware.memory import memory_counters
from meshwise.records import folder as names
from meshwise.records.files import stay_in
from meshwise.reports.recorder import Recorder, make_current
from meshwise.reports.span_log import SpanLog
from meshwise.spec.devices import has_streams
from meshwise.spec.world import World
from meshwise.torch_compat.reducer import default_store
from meshwise.training.recording import faults, joined_run
from meshwise.workers import heartbeat
from meshwise.workers.clock import ClockProbe, ClockServer
from meshwise.workers.environment import ATTEMPT, RUN_FOLDER, attempt
from meshwise.workers.join import rank_context

PATIENCE = timedelta(minutes=30)  # the same as the process group's own timeout
_numbers = count(1)  # numbers the clocks of this process. All ranks make their clocks together, so the numbers agree


class Clocks:
    """Compares the clock of this rank with the clock of rank 0."""

    def __init__(
        self, world: World, clock: Callable[[], int] = time.perf_counter_ns, patience: timedelta = PATIENCE
    ) -> None:
        alone, key, store = world.local_size == world.size, f"meshwise/clock/{next(_numbers)}", default_store()
        self._server: ClockServer | None = None
        self._probe: ClockProbe | None = None
        if world.rank == 0:
            self._server = ClockServer("127.0.0.1" if alone else "", clock)
            store.set(key, str(self._server.port))
        else:
            store.wait([key], patience)
            host = "127.0.0.1" if alone else os.environ["MASTER_ADDR"]
            self._probe = ClockProbe((host, int(store.get(key))), clock)

    def sample(self, rounds: int) -> Sequence[tuple[int, int, int]]:
        """Measure `rounds` round trips to the clock of rank 0 (see `SampleClock`)."""
        return () if self._probe is None else self._probe.sample(rounds)

    def close(self) -> None:
        """Close the clock server, which rank 0 has."""
        if self._server is not None:
            self._server.close()


class Recording:
    """The recorder of this process and its log file in a run folder. `close` ends the recording."""

    def __init__(
        self,
        world: World,
        folder: Path | None,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], int] = time.perf_counter_ns,
        *,
        recorder: Recorder | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        """Begin to record into the run folder `folder`."""
        self.recorder = recorder or Recorder(world.device, on=folder is not None, clock=clock)
        faults.watch(self.recorder)
        self.recorder.pulse = heartbeat.beat
        self._before = make_current(self.recorder)
        self._clocks = clocks
        self._log: SpanLog | None = None
        if folder is None:
            return
        if folder.exists() or attempt() > 1:  # only the first attempt may create the folder
            stay_in(folder)
        if world.size > 1 and recorder is None:
            self._clocks = Clocks(world, clock)
        self.recorder.memory = partial(memory_counters, world.device)
        streams = has_streams(world.device)
        head = {
            "rank": world.rank,
            "world": world.size,
            "device": torch.get_device_module(world.device).get_device_name() if streams else world.device,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **({"attempt": attempt()} if ATTEMPT in os.environ else {}),
            **({"program": "plain"} if recorder is not None else {}),
        }
        path = names.span_log(folder, world.rank, attempt())
        sample = self._clocks.sample if self._clocks is not None else None
        self._log = SpanLog(path, self.recorder, head, sample_clock=sample, failed=say)

    def close(self, status: str = "finished") -> None:
        """Write the remaining records, and close the log."""
        if self._log is not None:
            self._log.close(status)
            self._log = None
        if self._clocks is not None:
            self._clocks.close()
        make_current(self._before)


def record_script(
    world: World,
    *,
    foreign: bool,
    say: Callable[[str], None],
    recorder: Recorder | None = None,
    clocks: Clocks | None = None,
) -> Recording | None:
    """Record a script with its own training loop, until its end. Return None without a run folder."""
    named = os.environ.get(RUN_FOLDER)
    if named is None:
        return None
    folder = Path(named)
    if foreign and ATTEMPT not in os.environ:  # no launcher has opened the folder
        run = joined_run.begin(partial(_opened, folder, world))
        atexit.register(lambda: run.ends(_last_error()))
    recording = Recording(world, folder, say, recorder=recorder, clocks=clocks)
    atexit.register(lambda: recording.close("finished" if _last_error() is None else "failed"))
    return recording


def _opened(folder: Path, world: World) -> tuple[Path, int]:
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"devices": [world.kind] * world.size, "world": world.size, "versions": names.versions()}
    number = names.begin_session(folder, time.time(), rank_context().place.record(), job=sys.argv[0], **facts)
    return folder, number


def _last_error() -> BaseException | None:
    """Return the uncaught error of this process (`sys.last_value`), if any."""
    return getattr(sys, "last_value", None)

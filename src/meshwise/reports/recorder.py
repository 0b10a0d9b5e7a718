"""Record spans and counters of one rank during the run.

Recording a span takes two readings of the clock and one append; the log's thread encodes and writes the spans. On CUDA,
device work is marked by events, which are read once `query` says that they have passed, so recording never
synchronizes. If nobody calls `drain`, the oldest spans are dropped and counted.

One process is one rank and has one recorder, `current()`, which is off until recording is switched on.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from meshwise.reports.device_clock import DeviceClock, DeviceMark, is_captured
from meshwise.reports.spans import KIND, LANE, NO_COLLECTIVE, WIDTH
from meshwise.spec.devices import has_streams
from meshwise.torch_compat.profiling import NVTX, is_profiled, open_range

Mark = int | DeviceMark
"""A moment: either a time of the rank's clock in ns, or a mark recorded in the device's stream."""
Count = tuple[int, int, int, str, Any]
"""One value of a counter: time (ns), step, kind of the phase that ended at that time (-1 for none), name, value."""
BEATS, PHASE = 0, 2  # indices into a pulse's words (workers/heartbeat.py)
CAPACITY = 200_000  # most spans to keep if no log drains them: about 40 MB


class Recorder:
    """Records the spans and counters of one rank. Recording can be switched with `on` at any time."""

    def __init__(
        self, device: str = "cpu", *, on: bool = True, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.on = on
        self.step = 0
        self.phase = "idle"
        self.clock = clock
        self.names: list[tuple[str, str, str]] = []
        """The (kind, lane, name) of each code. A recorded span has only a code, which is an index in this list."""
        self.dtypes: dict[tuple[int, int], Any] = {}
        """The dtype of the data that a collective sent, if known. The key is (code of the span, number of bytes)."""
        self.dropped = 0
        self.program = ""
        """The kind of program for which advice is given, if known (see `advice.WORDS`)."""
        self.divided = ""
        """How far the whole view divides the work on a batch over the ranks, in words, if known."""
        self.samples = 0
        """Number of samples in the global batches that this rank has worked on."""
        self.pulse: Any = None
        """Reports to the launcher that the rank enters a phase or a step (`Heartbeat` of workers/heartbeat.py). None
        without a launcher of meshwise."""
        self.memory: Callable[[], Mapping[str, float]] | None = None
        """Returns the bytes in use, by name. Called at the end of each phase of the step after `request_memory`."""
        self.held: Callable[[], Mapping[str, float]] = dict
        """Returns the bytes that parameters, gradients and so on take, by name. Called whenever `memory` is called."""
        self.parameters: Callable[[], Mapping[str, Any]] = dict
        """Returns this rank's parameters by name.
        An injected fault may change one of them."""
        self._codes: dict[tuple[str, str, str], int] = {}
        self._rows: list[Any] = []
        self._counters: list[Count] = []
        self._collectives = 0
        timed = functools.partial(torch.Event, device, enable_timing=True)
        self.device = DeviceClock(clock, timed) if has_streams(device) else None
        """Records marks in the device's stream. It is None if the device does not run asynchronously."""
        self._memory_wanted, self.takes_memory = True, False  # measure memory in the first step: there may be no other

    def begin_step(self, step: int) -> None:
        """Record the following spans under this step number. If more than CAPACITY spans wait for `drain`, drop the
        oldest."""
        self.step = step
        if self.pulse is not None:
            self.pulse.step(step)
        self.takes_memory, self._memory_wanted = self._memory_wanted, False
        if len(self._rows) > CAPACITY * WIDTH:
            half = CAPACITY // 2
            del self._rows[: half * WIDTH]
            self.dropped += half

    def come_to(self, phase: str) -> None:
        """Set the phase in which the rank is now, without recording a span."""
        if self.pulse is not None:
            self.pulse.phase(phase)
        self.phase = phase

    def request_memory(self) -> None:
        """Measure memory at the end of each phase of the next step."""
        self._memory_wanted = True

    def phase_ends(self, kind: str) -> None:
        """Measure memory at the end of a phase of this kind. Do nothing if `request_memory` did not ask for it in this
        step."""
        if self.takes_memory and self.memory is not None:
            now, used, held = self.clock(), self.memory(), self.held()
            rest = {"activations": used["allocated"] - sum(held.values())} if held and "allocated" in used else {}
            for name, value in {**used, **held, **(rest if kind == "forward" else {})}.items():
                self._counters.append((now, self.step, KIND[kind], name, value))

    def mark(self) -> Mark:
        """Return the current moment. If the device runs asynchronously, this is a mark in the device's stream."""
        return self.clock() if self.device is None or not self.on else self.device.mark()

    def code(self, kind: str, name: str = "", lane: str = "main") -> int:
        """Return the integer that stands for spans of this kind, name and lane in this rank's records.

        Raises ValueError if the kind or the lane is unknown.
        """
        key = (kind, lane, name)
        code = self._codes.get(key)
        if code is None:
            if kind not in KIND or lane not in LANE:
                raise ValueError(f"kind {kind!r} or lane {lane!r} of a span is not listed in reports/spans.py")
            code = self._codes[key] = len(self.names)
            self.names.append(key)
        return code

    def ended(self, kind: str, start: Mark) -> None:
        """Record a span that began at `start` and ends now. If `request_memory` was called for this step, measure the
        memory too."""
        end = self.mark()
        if self.on:
            self._rows.extend((self.code(kind), start, end, self.step, 0, NO_COLLECTIVE))
        if self.takes_memory:
            self.phase_ends(kind)

    def turn(self, phase: str, over: str = "", since: Mark | None = None) -> Mark:
        """Enter a phase and record the span of the previous phase. Returns the moment at which the new phase begins.

        over: the previous phase.
        since: when the previous phase began. If it is None, no span is recorded.

        The phase `data` runs on the host and is timed there. Everything is in one function for speed, since each phase
        of each step calls it.
        """
        device = self.device if self.on else None
        by_host = over == "data" or (phase == "data" and since is None)
        end: Mark = self.clock() if device is None or by_host else device.mark()
        begins = end
        if device is not None and by_host != (phase == "data"):
            begins = self.clock() if phase == "data" else device.mark()
        if since is not None:
            if self.on:
                lane = "host" if over == "data" and self.device is not None else "main"
                code = self._codes.get((over, lane, ""))
                code = self.code(over, lane=lane) if code is None else code
                self._rows.extend((code, since, end, self.step, 0, NO_COLLECTIVE))
            if self.takes_memory:
                self.phase_ends(over)
        if (pulse := self.pulse) is not None:  # `pulse.phase` is inlined, which saves a call in each phase
            pulse.words[PHASE] = pulse.names.get(phase) or pulse.name(phase)
            pulse.words[BEATS] = pulse.beats = pulse.beats + 1
        self.phase = phase
        return begins

    def add(self, code: int, start: Mark, end: Mark, bytes: int = 0, collective: int = NO_COLLECTIVE) -> None:
        if self.on:
            self._rows.extend((code, start, end, self.step, bytes, collective))

    def arrive(self) -> int:
        """Return the number of the next collective. All ranks enter collectives in the same order, so they get the same
        number."""
        self._collectives += 1
        return self._collectives - 1

    def begin_collective(self, name: str) -> tuple[int, int, Mark]:
        """Begin a collective that overlaps with other work. Return what `end_collective` needs: the code of its span,
        the number of the collective, and the start.

        This runs for each gradient bucket of each step. For speed, it calls few functions.
        """
        key = ("communication", "communication", name)
        code = self._codes.get(key)
        code = self.code("communication", name, "communication") if code is None else code
        self._collectives += 1
        start = self.clock() if self.device is None or not self.on else self.device.mark()
        return code, self._collectives - 1, start

    def end_collective(self, code: int, number: int, start: Mark, moved: torch.Tensor) -> None:
        """Record a collective that began with `begin_collective` and ends now.

        moved: the tensor that the collective sent.
        """
        if self.on:
            end = self.clock() if self.device is None else self.device.mark()
            self.dtypes[code, moved.nbytes] = moved.dtype
            self._rows.extend((code, start, end, self.step, moved.nbytes, number))

    def count(self, name: str, value: Any) -> None:
        """Record the present value of a counter. The value is a number, or a tensor of one number, which another thread
        reads later."""
        if self.on and (self.device is None or not is_captured()):
            self._counters.append((self.clock(), self.step, -1, name, value))

    def span(self, kind: str, name: str = "") -> _Open:
        """Return a context manager that records its `with` block as one span."""
        code = self._codes.get((kind, "main", name))
        return _Open(self, kind, self.code(kind, name) if code is None else code)

    def collective(
        self, name: str, bytes: int, lane: str = "main", *, numbered: bool = True, dtype: Any = None
    ) -> _Blocking:
        """Return a context manager that records its `with` block as a collective for which this rank waits.

        numbered: whether to give the collective a number, by which the same collective is found on other ranks. It must
            be False if only some ranks take part.
        dtype: the dtype of the data, if known.
        """
        code = self.code("communication", name, lane)
        if dtype is not None:
            self.dtypes[code, bytes] = dtype
        return _Blocking(self, code, bytes, numbered)

    def drain(self) -> tuple[list[int], list[Count]]:
        """Remove all records and return them as (spans, counters)."""
        end, count = len(self._rows), len(self._counters)
        rows, counters = self._rows[:end], self._counters[:count]
        del self._rows[:end]
        del self._counters[:count]
        return (rows if self.device is None else self._resolved(rows, self.device)), counters

    def _resolved(self, rows: list[Any], device: DeviceClock) -> list[int]:
        ready: list[int] = []
        later: list[Any] = []
        for at in range(0, len(rows), WIDTH):
            row = rows[at : at + WIDTH]
            marks = [mark for mark in row[1:3] if isinstance(mark, DeviceMark)]
            if all(mark.event.query() for mark in marks):  # reached by the device; this does not wait
                ready += [device.time(value) if isinstance(value, DeviceMark) else value for value in row]
            else:
                later += row
        self._rows[:0] = later
        return ready


class _Open:
    """Context manager that records a span."""

    __slots__ = ("_before", "_code", "_kind", "_profiled", "_recorder", "_start")

    def __init__(self, recorder: Recorder, kind: str, code: int) -> None:
        self._recorder, self._kind, self._code = recorder, kind, code

    def __enter__(self) -> None:
        recorder = self._recorder
        self._before = recorder.phase
        if recorder.pulse is not None:
            recorder.pulse.phase(self._kind)
        recorder.phase = self._kind
        self._profiled = open_range(self._kind) if NVTX or is_profiled() else None
        device = recorder.device if recorder.on else None
        self._start = recorder.clock() if device is None else device.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._recorder
        device = recorder.device if recorder.on else None
        end = recorder.clock() if device is None else device.mark()
        if recorder.on:
            recorder._rows.extend((self._code, self._start, end, recorder.step, 0, NO_COLLECTIVE))
        if recorder.takes_memory:
            recorder.phase_ends(self._kind)
        if self._profiled is not None:
            self._profiled.__exit__(kind, error, trace)
        if error is None:  # after an error, keep the phase, because the error report names it
            if (pulse := recorder.pulse) is not None:  # `pulse.phase` is inlined, as in `turn`
                pulse.words[PHASE] = pulse.names.get(self._before) or pulse.name(self._before)
                pulse.words[BEATS] = pulse.beats = pulse.beats + 1
            recorder.phase = self._before


class _Blocking:
    """Context manager that records a collective for which this rank waits."""

    __slots__ = ("_bytes", "_code", "_number", "_numbered", "_recorder", "_start")

    def __init__(self, recorder: Recorder, code: int, bytes: int, numbered: bool) -> None:
        self._recorder, self._code, self._bytes, self._numbered = recorder, code, bytes, numbered

    def __enter__(self) -> None:
        self._number = self._recorder.arrive() if self._numbered else NO_COLLECTIVE
        self._start = self._recorder.mark()

    def __exit__(self, *error: object) -> None:
        recorder = self._recorder
        recorder.add(self._code, self._start, recorder.mark(), self._bytes, self._number)


_current = Recorder(on=False)


def current() -> Recorder:
    """Return the recorder of this process."""
    return _current


def make_current(recorder: Recorder) -> Recorder:
    """Replace the recorder of this process. Returns the previous one."""
    global _current
    before, _current = _current, recorder
    return before

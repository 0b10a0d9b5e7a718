"""Write a rank's spans to its log, in a background thread.

The spans come from the rank's recorder.

The log has one JSON object per line. The first line has the rank and how its clock relates to the time of day. `spans`
are packed columns; `counters` and `clock` samples are plain. `end` comes last, and is missing if the worker was cut
off. A resumed run appends a new first line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshwise.records.files import append_lines
from meshwise.reports.recorder import Count, Recorder
from meshwise.reports.spans import VERSION, WIDTH, as_rows, pack

EVERY = 1.0  # seconds between writes and between memory samples: a killed worker loses about 1 s of its records
CLOCK_EVERY = 10.0
FIRST_ROUNDS, ROUNDS = 32, 8

SampleClock = Callable[[int], Sequence[tuple[int, int, int]]]
"""`sample(rounds)` measures round trips to rank 0's clock. It returns (sent, rank 0's time, received) in ns."""


class SpanLog:
    """Writes the log of one rank in a background thread until it is closed."""

    def __init__(
        self,
        path: Path,
        recorder: Recorder,
        head: dict[str, Any],
        *,
        sample_clock: SampleClock | None = None,
        failed: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._path, self._recorder, self._sample_clock, self._failed = path, recorder, sample_clock, failed
        self._names = self._dtypes = 0
        self._divided = ""
        self._samples = 0
        self._broken = False
        self._closed = threading.Event()
        self._looked_at_clock = time.monotonic()
        self.cpu_seconds = 0.0
        """CPU time spent so far on encoding and writing, in seconds of one core."""
        self._write([{"log": VERSION, **head, "unix": time.time(), "clock": recorder.clock()}])
        self._write(self._clock_lines(FIRST_ROUNDS))
        self._thread = threading.Thread(target=self._run, name="meshwise-log", daemon=True)
        self._thread.start()

    def close(self, status: str) -> None:
        """Write the remaining records, and the status with which the rank ended. A second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(timeout=10)
        self._write(self._lines())
        cost = {"cpu_seconds": round(self.cpu_seconds, 4)}
        self._write([*self._clock_lines(ROUNDS), {"end": self._recorder.clock(), "status": status, "cost": cost}])
        self._recorder.on = False

    def _run(self) -> None:
        while not self._closed.wait(EVERY):
            began = time.thread_time()
            self._write(self._lines())
            self._recorder.request_memory()
            now = time.monotonic()
            if now - self._looked_at_clock > CLOCK_EVERY:
                self._looked_at_clock = now
                self._write(self._clock_lines(ROUNDS))
            self.cpu_seconds += time.thread_time() - began

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if not lines or self._broken:
            return
        try:
            append_lines(self._path, lines)
        except OSError as error:
            self._recorder.on, self._broken = False, True
            self._failed(
                f"the timeline ends here: {self._path} cannot be written ({error.strerror}). The run continues."
            )

    def _lines(self) -> list[dict[str, Any]]:
        recorder = self._recorder
        rows, counters = recorder.drain()
        lines: list[dict[str, Any]] = []
        if rows:
            line: dict[str, Any] = {"spans": len(rows) // WIDTH, "data": pack(as_rows(rows))}
            names, dtypes = recorder.names[self._names :], list(recorder.dtypes.items())[self._dtypes :]
            self._names += len(names)
            self._dtypes += len(dtypes)
            line |= {
                "names": names,
                "dtypes": [[*key, str(dtype).removeprefix("torch.")] for key, dtype in dtypes],
                "program": recorder.program,
                "dropped": recorder.dropped,
            }
            lines.append({key: value for key, value in line.items() if value})
        if recorder.divided != self._divided:
            self._divided = recorder.divided
            lines.append({"divided": self._divided})
        if recorder.samples != self._samples:
            self._samples = recorder.samples
            counters.append((recorder.clock(), recorder.step, -1, "samples", self._samples))
        if counters:
            lines.append({"counters": [_plain(counter) for counter in counters]})
        return lines

    def _clock_lines(self, rounds: int) -> list[dict[str, Any]]:
        samples = self._sample_clock(rounds) if self._sample_clock is not None else ()
        return [{"clock": [list(sample) for sample in samples]}] if samples else []


def _plain(counter: Count) -> list[Any]:
    """Convert one value of a counter to a list for JSON."""
    *facts, value = counter
    return [*facts, value if isinstance(value, (int, float)) else float(value)]

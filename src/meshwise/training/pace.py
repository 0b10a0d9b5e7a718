"""How fast a run goes. Tested in tests/training/test_metrics_log.py."""

from __future__ import annotations

import time


class Pace:
    """How fast the run goes now, and how long it still takes."""

    def __init__(self, samples: int, done: int) -> None:
        self._all = samples
        self._since, self._samples = time.perf_counter(), done

    def facts(self, done_now: int, behind: int) -> dict[str, float | None]:
        now = time.perf_counter()
        rate = (done_now - self._samples) / max(now - self._since, 1e-9)
        if now - self._since > 1.0:
            self._since, self._samples = now, done_now
        return {"samples_per_second": rate, "seconds_left": (self._all - behind) / rate if rate > 0 else None}

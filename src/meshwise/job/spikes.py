"""Detect a loss far above those before it: `--on-spike save`.

A spike is reported, and the state is saved.

The rule is the modified z-score of Iglewicz and Hoaglin (How to Detect and Handle Outliers, 1993): the distance from
the median of the last WINDOW losses, divided by their median absolute deviation, which is scaled to a standard
deviation. In the book, a value above 3.5 is an outlier. FAR is larger, since a run has many thousands of losses. The
deviation has a lower bound, for losses that are nearly constant. Tested in tests/job/test_spikes.py.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

WINDOW, LEAST = 100, 20  # losses that are looked back on; fewer say nothing
FAR = 10.0  # standard deviations above the median
OF_NORMAL = 1.4826  # a standard deviation of normal values, by their median absolute deviation
FLOOR = 0.01  # of the median, that a standard deviation is at least
EVERY = 10  # steps between two looks


class Spikes:
    """Detects spikes in a run's losses. All ranks get the same losses, which are means over all ranks, and so find the
    same spikes."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._high = False

    def is_due(self, step: int) -> bool:
        """Return whether to look for a spike in the losses after this step. It is True after every EVERY-th step."""
        return step % EVERY == 0

    def look(self, losses: Sequence[float], step: int) -> str:
        """Return a sentence that describes the first spike among the losses since the last call. Return an empty string
        if there is no spike.

        losses: all losses so far. The last one is the loss of step `step`.
        """
        told = ""
        first = step - len(losses) + 1
        for number in range(self._seen, len(losses)):
            text = self._judge(losses[number])
            if text and not told:
                told = f"step {first + number}: {text}"
        self._seen = len(losses)
        return told

    def _judge(self, loss: float) -> str:
        """Add a loss to the previous ones. Return a sentence if a spike begins with this loss, else an empty string."""
        was_high, self._high, text = self._high, False, ""
        if len(self._before) >= LEAST:
            median = statistics.median(self._before)
            deviation = OF_NORMAL * statistics.median(abs(each - median) for each in self._before)
            distance = (loss - median) / max(deviation, FLOOR * abs(median), 1e-12)
            self._high = distance > FAR
            if self._high and not was_high:
                text = (
                    f"the loss is {loss:.4g}, {distance:.0f} standard deviations above the median {median:.4g} of the "
                    f"{len(self._before)} losses before it."
                )
        self._before.append(loss)
        return text

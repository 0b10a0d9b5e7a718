"""Cut a script's loops short, and make their last batch ragged.

A check then takes little time.

A training loop ends when the wanted steps are made, an evaluation after three batches. Later epochs have the batches of
one step, so that an evaluation after them is seen; a script that trains on after `AFTER` such batches ends there.
"""

from __future__ import annotations

EVALUATED = 3  # batches of an evaluation
AFTER = 30  # backwards after the steps that are compared


class ScriptEnds(BaseException):
    """Ends a script when the check has seen enough. Not an error: a script's `except Exception` does not catch it."""


class ShortLoops:
    """Counts batches, backwards and steps. steps: how many are compared. ragged: the samples of a ragged last batch."""

    def __init__(self, steps: int, ragged: int) -> None:
        self._steps, self._ragged = steps, ragged
        self.made = 0
        """Optimizer steps so far."""
        self._batches, self._trained = 0, False
        self._since_step = self._a_step = 0  # batches since the last step; batches that made the last step
        self._after = 0  # backwards since the last step that is compared

    def loop_begins(self) -> None:
        """A loop begins."""
        self._batches, self._trained = 0, False

    def batch_given(self) -> None:
        """A loop has its batch."""
        self._batches += 1
        self._since_step += 1

    def limit(self, batch_size: int) -> int | None:
        """Return how many samples the next batch may have; 0 ends the loop, None does not limit it."""
        ends = not self._since_step or self._batches >= self._a_step  # as a whole epoch does
        if (ends and self.made >= self._steps) if self._trained else (self._batches >= EVALUATED):
            return 0
        if self._trained:
            last = self.made == self._steps - 1 and self._a_step > 0 and self._since_step == self._a_step - 1
        else:
            last = self._batches == EVALUATED - 1
        return min(self._ragged, max(batch_size - 1, 1)) if last else None

    def backward(self) -> None:
        """Note a backward. Raises ScriptEnds if there were enough."""
        self._trained = True
        self._after += self.made >= self._steps
        if self._after > AFTER:
            raise ScriptEnds

    def step_made(self) -> None:
        """Note that an optimizer has made its step."""
        self.made += 1
        self._a_step, self._since_step = self._since_step, 0

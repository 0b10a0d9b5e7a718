"""Cut a script's loops short, and make their last batch ragged.

The first training loop ends after the wanted steps, the next one after two more, and each later one after one step. An
evaluation loop ends after three batches. A script may make `AFTER` backward passes after the steps that are compared.
"""

from __future__ import annotations

EVALUATED = 3  # number of batches that an evaluation reads in a check
AFTER = 30  # number of backwards that may follow the compared steps
LATER = 2  # number of steps of the second epoch that are compared


class ScriptEnds(BaseException):
    """Raised inside a script to end it when the check has seen enough. It is not an `Exception`, so that
    `except Exception` in the script does not catch it."""


class ShortLoops:
    """Decides when the loops of a script end in a check."""

    def __init__(self, steps: int, ragged: int) -> None:
        self._steps, self._ends, self._ragged = steps, steps, ragged
        self.made = 0
        """The number of optimizer steps made so far."""
        self._batches, self._trained = 0, False
        self._since_step = self._a_step = 0  # batches since the last step, and batches that the last step took
        self._after = 0  # backwards since the last compared step

    @property
    def compares(self) -> bool:
        """Whether the newest step is compared."""
        return self.made <= self._ends

    def loop_begins(self) -> None:
        """Record that a loop over batches begins."""
        self._ends = self._steps + min(LATER, self._steps) * (self.made >= self._steps)
        self._batches, self._trained = 0, False

    def batch_given(self) -> None:
        """Record that a loop received its next batch."""
        self._batches += 1
        self._since_step += 1

    def limit(self, batch_size: int) -> int | None:
        """Return the largest size that the next batch may have. 0 ends the loop, None means no limit."""
        ends = not self._since_step or self._batches >= self._a_step  # loops end only between steps, as an epoch does
        over = self.made >= self._ends or (self._ends > self._steps and self._batches >= LATER * self._a_step)
        if (ends and over) if self._trained else (self._batches >= EVALUATED):
            return 0
        if self._trained:
            last = self.made == self._steps - 1 and self._a_step > 0 and self._since_step == self._a_step - 1
        else:
            last = self._batches == EVALUATED - 1
        return min(self._ragged, max(batch_size - 1, 1)) if last and self._ragged else None

    def backward(self) -> None:
        """Record a backward pass."""
        self._trained = True
        self._after += self.made >= self._ends
        if self._after > AFTER:
            raise ScriptEnds

    def step_made(self) -> None:
        """Record that an optimizer has made its step."""
        self.made += 1
        self._a_step, self._since_step = self._since_step, 0

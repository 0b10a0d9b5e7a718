"""Skip batches whose loss or gradient was not finite: `--on-nan back`.

The run continues from the newest state without these batches. If the parameters are finite, that is the state before
the step: going back to a save and repeating the steps since would give the same bits. If not, the previous step's
update, or a fault, has spoiled them: the attempt ends (SpoiledError), the next one begins from the newest saved state,
and the batch of the previous step is left out, too.

A batch that is left out is no step: no update, no step of the scheduler, no step number. The run folder records these
batches, so that later attempts skip them. Tested in tests/job/test_left_out.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from meshwise.compat.sharding import local_of
from meshwise.engine.weighing import Losses, total_of
from meshwise.job.not_finite import MOST_IN_A_ROW, KeptBuffers, agreed, any_not_finite, gradients_of
from meshwise.records import folder as names
from meshwise.records.files import append_lines, read_lines
from meshwise.recovery.state import RunState
from meshwise.spec.errors import LossError, SpoiledError
from meshwise.spec.words import ranks_text
from meshwise.transfer import collectives, stages

Batch = tuple[int, int, int]
"""A batch: its epoch (from 0), and the positions of its first sample and after its last sample in the epoch's order."""


class LeftOut:
    """The batches that a run leaves out because their loss or gradient was not finite. All ranks hold the same list."""

    is_step = False
    """Whether the step number also increases for a batch that is left out. It stays the same in this class."""

    def __init__(self, state: RunState, folder: Path | None, tell: Callable[[str], None], *, scaled: bool) -> None:
        """Read the batches that earlier attempts have left out."""
        self._state, self._scaled, self._first = state, scaled, collectives.get_rank(collectives.everyone()) == 0
        self._tell = tell
        self._file = None if folder is None else folder / names.LEFT_OUT
        self._kept = KeptBuffers(state.model)
        own = list(_read(self._file)) if self._first else []
        self._every: list[Batch] = collectives.broadcast_object(own, collectives.everyone())
        self.last: deque[Batch] = deque(maxlen=2)
        """The batches of the previous step and of the current one."""
        self.in_a_row = 0

    def ranges(self, epoch: int, begin: int = 0) -> list[tuple[int, int]]:
        """Return the batches of this epoch that the run skips because their loss or gradient was not finite.
        `batch_bounds` uses them. A batch is a pair: the index of its first sample, and the index after its last sample,
        both counted in the epoch's order. Batches that end at sample `begin` or before are omitted."""
        return [(first, stop) for of, first, stop in self._every if of == epoch and stop > begin]

    def step_begins(self) -> None:
        """Copy the model's buffers before the forward pass of a step."""
        self._kept.keep()

    def skips(self, step: int, losses: Losses) -> bool:
        """Check whether this step's loss or gradients are finite on all ranks. If not, leave its batch out. Collective.

        Returns True if the batch is left out. The model's buffers are then restored. Raises SpoiledError if parameters
        are not finite, and LossError if too many batches in a row are left out.
        """
        seen = [total_of(losses)[0], *([] if self._scaled else gradients_of(self._state.model))]
        if not agreed(any_not_finite(seen).to(seen[0].device)):
            self.in_a_row = 0
            return False
        self._kept.put_back()
        self.refuse_spoiled(step)
        self.in_a_row += 1
        if self.in_a_row > MOST_IN_A_ROW:
            raise LossError(
                f"step {step}: {MOST_IN_A_ROW} batches in a row had losses or gradients that are not finite. Check "
                "the data, or resume from an earlier state with a lower learning rate."
            )
        text = f"step {step}: the loss or a gradient is not finite. {self._leave_out(step, [self.last[-1]])}"
        self._tell(text)
        return True

    def refuse_spoiled(self, step: int) -> None:
        """Raise SpoiledError on all ranks if at least one rank has a parameter that is not finite."""
        model = self._state.model
        lacking = stages.absent_parameters(model)  # another rank's of a pipeline, which are NaN here
        trained = [local_of(p.detach()) for p in model.parameters() if p.requires_grad and p not in lacking]
        flags = collectives.gather_objects(bool(any_not_finite(trained)), collectives.everyone())
        if any(flags):
            ranks = [rank for rank, flag in enumerate(flags) if flag]
            self._tell(f"step {step}: {self._leave_out(step, list(self.last))}")
            raise SpoiledError(f"step {step}: parameters of {ranks_text(ranks)} are not finite.", ranks=ranks)

    def _leave_out(self, step: int, batches: Sequence[Batch]) -> str:
        """Record that the run skips these batches from now on, also after a restart."""
        self._every += batches
        which = " and ".join(f"samples {first} to {stop - 1} of epoch {epoch + 1}" for epoch, first, stop in batches)
        text = f"Training continues without {which}."
        if self._file is not None and self._first:
            lines = [{"epoch": epoch, "first": first, "stop": stop, "step": step} for epoch, first, stop in batches]
            try:
                append_lines(self._file, lines)
            except OSError as error:
                self._tell(f"{self._file}: {error.strerror}. A restart would read that batch again.")
        return text


def _read(file: Path | None) -> Iterator[Batch]:
    """Yield the batches that earlier attempts of this run skipped because their loss or gradient was not finite, as
    recorded in `file`. Yield nothing if `file` is None."""
    for line in read_lines(file) if file is not None else ():
        found = [number for name in ("epoch", "first", "stop") if isinstance(number := line.get(name), int)]
        if len(found) == 3:
            yield found[0], found[1], found[2]

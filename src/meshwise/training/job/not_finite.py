"""Handle a step whose loss or gradients are not finite: `--on-nan`.

All ranks make the same decision.

stop    the run ends, and names the step and the ranks of the first such loss (metrics_log.py); this costs nothing
skip    the optimizer does not step, buffers are restored, and the next step follows
back    the batch is left out, as if the data did not have it: no update, no step of the scheduler, no step number

Under `skip` and `back` all ranks agree in each step, with one number, whether every gradient is finite. A loss scaler
(float16) skips steps by itself.

Under `back`, the run continues from the newest state without the batch. If the parameters are finite, that is the state
before the step: loading a save and repeating the steps after it would give the same bits. If not, the previous step's
update, or a fault, has spoiled the parameters: the attempt ends (SpoiledError), the next attempt begins from the newest
saved state, and the batch of the previous step is left out, too. The run folder records these batches, so that later
attempts skip them. Also tested in tests/training/job/test_left_out.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshwise.parallel.step_hooks import needs_closure
from meshwise.records import folder as names
from meshwise.records.files import append_lines, read_lines
from meshwise.spec.errors import LossError, SpoiledError, UsageError
from meshwise.spec.units import plural
from meshwise.spec.words import ranks_text
from meshwise.torch_compat.sharding import local_of
from meshwise.training.engine.weighing import Losses, total_of
from meshwise.training.job.options import BACK, SKIP, STOP
from meshwise.training.recovery.state import RunState
from meshwise.transfer import collectives, stages

MOST_IN_A_ROW = 20  # how many steps in a row may be skipped before the run fails
Batch = tuple[int, int, int]
"""A batch: its epoch (from 0), and the positions of its first sample and after its last sample in the epoch's order."""


class NotFinite:
    """Decides what to do with a step whose loss or gradients are not finite."""

    def __init__(
        self, on_nan: str, state: RunState, folder: Path | None, tell: Callable[[str], None], *, scaled: bool
    ) -> None:
        """Read which batches earlier attempts have left out. scaled: whether a loss scaler skips steps by itself."""
        if on_nan != STOP and needs_closure(state.optimizer):
            raise UsageError(
                f"--on-nan {on_nan}: {type(state.optimizer).__name__} changes the parameters several times in a step, "
                "so a step cannot be skipped. Remove --on-nan, or use another optimizer."
            )
        self._state, self._tell, self._scaled = state, tell, scaled
        self.back = on_nan == BACK
        self.checks = self.back or (on_nan == SKIP and not scaled)
        self.count = self.in_a_row = 0
        self._before: list[tuple[Tensor, Tensor]] = []
        self._file = None if folder is None else folder / names.LEFT_OUT
        self._first = collectives.get_rank(collectives.everyone()) == 0
        lines = read_lines(self._file) if self._file is not None and self._first else []
        own = [(line["epoch"], line["first"], line["stop"]) for line in lines]
        self._every: list[Batch] = collectives.tell_all(own)
        self.last: deque[Batch] = deque(maxlen=2)
        """The batches of the previous step and of the current one."""

    def ranges(self, epoch: int, begin: int = 0) -> list[tuple[int, int]]:
        """Return the batches of this epoch that the run leaves out, as `batch_bounds` uses them: the index of the first
        sample, and the index after the last. Batches that end at sample `begin` or before are omitted."""
        return [(first, stop) for of, first, stop in self._every if of == epoch and stop > begin]

    def step_begins(self) -> None:
        """Copy the model's buffers before the forward pass of a step."""
        self._before = [(buffer, buffer.detach().clone()) for buffer in self._state.model.buffers()]

    def skips(self, step: int, losses: Losses) -> bool:
        """Return whether to skip this step's update, because a value on some rank is not finite."""
        loss = total_of(losses)[0]
        seen = [local_of(p.grad) for p in self._state.model.parameters() if p.grad is not None and not self._scaled]
        found = _any_not_finite([*seen, loss] if self.back else seen).to(loss.device)
        if not float(collectives.all_reduce(found, "max", collectives.everyone(), of="whether gradients are finite")):
            self.in_a_row = 0
            return False
        for buffer, before in self._before:
            buffer.detach().copy_(before)
        if self.back:
            self.refuse_spoiled(step)
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        if self.in_a_row > MOST_IN_A_ROW:
            raise LossError(
                f"step {step}: {MOST_IN_A_ROW} batches in a row had losses or gradients that are not finite. Check "
                "the data, or resume from an earlier state with a lower learning rate."
            )
        if self.back:
            self._tell(f"step {step}: the loss or a gradient is not finite. {self._leave_out(step, [self.last[-1]])}")
        elif self.in_a_row == 1:
            self._tell(f"step {step} is skipped: its gradients are not finite.")
        return True

    def refuse_spoiled(self, step: int) -> None:
        """Raise SpoiledError on all ranks if at least one rank has a parameter that is not finite."""
        model = self._state.model
        lacking = stages.absent_parameters(model)  # parameters of other pipeline stages, which are NaN here
        trained = [local_of(p.detach()) for p in model.parameters() if p.requires_grad and p not in lacking]
        flags = collectives.gather_from_all(bool(_any_not_finite(trained)))
        if any(flags):
            ranks = [rank for rank, flag in enumerate(flags) if flag]
            self._tell(f"step {step}: {self._leave_out(step, list(self.last))}")
            raise SpoiledError(f"step {step}: parameters of {ranks_text(ranks)} are not finite.", ranks=ranks)

    def _leave_out(self, step: int, batches: Sequence[Batch]) -> str:
        """Skip these batches from now on, also after a restart. Return a sentence that says so."""
        self._every += batches
        which = " and ".join(f"samples {first} to {stop - 1} of epoch {epoch + 1}" for epoch, first, stop in batches)
        if self._file is not None and self._first:
            lines = [{"epoch": epoch, "first": first, "stop": stop, "step": step} for epoch, first, stop in batches]
            append_lines(self._file, lines)
        return f"Training continues without {which}."

    def note(self) -> str:
        """Return a text for the run's summary that says how many steps were skipped; "" if none was."""
        skipped = f"{plural(self.count, 'step')} skipped (--on-nan skip): gradients that are not finite"
        return skipped if self.count and not self.back else ""


def _any_not_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return a scalar tensor: 1 if any value in `tensors` is infinite or NaN, otherwise 0."""
    bad = [~torch.isfinite(tensor).all() for tensor in tensors if tensor.numel()]
    return torch.stack(bad).any().float() if bad else torch.zeros(())

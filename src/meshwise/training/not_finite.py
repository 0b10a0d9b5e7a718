"""A step whose gradients are not finite, and what all ranks do about it: `--on-nan`.

stop    the run ends with the step and the ranks where it began (metrics_log.py); nothing is paid for it
skip    the optimizer does not step, buffers are as before the step, and the next one follows

Under `skip` all ranks agree in each step, with one number, whether every gradient is finite. A loss scaler (float16)
skips by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwise.compat.sharding import local_of
from meshwise.spec.errors import LossError
from meshwise.spec.units import plural
from meshwise.transfer import collectives

MOST_IN_A_ROW = 20  # steps that are skipped before the run is held to be lost


class SkippedSteps:
    """Lets steps be skipped whose gradients are not finite."""

    def __init__(self, model: nn.Module, notify: Callable[[str], None]) -> None:
        self._model, self._notify = model, notify
        self._before: list[tuple[Tensor, Tensor]] = []
        self.count = self.in_a_row = 0

    def step_begins(self) -> None:
        """Keep the buffers as they are before the forward."""
        self._before = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]

    def skips(self, step: int) -> bool:
        """Whether some rank has a gradient that is not finite: then buffers are as they were. Collective."""
        grads = [local_of(p.grad) for p in self._model.parameters() if p.grad is not None]
        device = grads[0].device if grads else next(iter(self._model.parameters())).device
        bad = [~torch.isfinite(grad).all() for grad in grads if grad.numel()]
        found = torch.stack(bad).any().float() if bad else torch.zeros((), device=device)
        if not float(collectives.all_reduce(found, "max", collectives.everyone(), of="whether gradients are finite")):
            self.in_a_row = 0
            return False
        for buffer, before in self._before:
            buffer.detach().copy_(before)
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        if self.in_a_row > MOST_IN_A_ROW:
            raise LossError(
                f"step {step}: the gradients of {MOST_IN_A_ROW} steps in a row are not finite. Go on from an earlier "
                "state with a lower learning rate."
            )
        if self.in_a_row == 1:
            self._notify(f"step {step} is skipped: its gradients are not finite.")
        return True

    def note(self) -> str:
        """How many steps were skipped, for the summary; empty for none."""
        skipped = f"{plural(self.count, 'step')} skipped (--on-nan skip): gradients that are not finite"
        return skipped if self.count else ""

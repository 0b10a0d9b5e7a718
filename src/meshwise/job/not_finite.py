"""Handle a step whose gradients are not finite: `--on-nan`.

All ranks make the same decision.

stop    the run ends with the step and the ranks where it began (metrics_log.py); nothing is paid for it
skip    the optimizer does not step, buffers are as before the step, and the next one follows
back    the batch is left out, as if the data did not have it (left_out.py)

Under `skip` and `back` all ranks agree in each step, with one number, whether every gradient is finite. A loss scaler
(float16) skips by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwise.compat.sharding import local_of
from meshwise.engine.weighing import Losses
from meshwise.job.options import STOP
from meshwise.parallel.step_hooks import needs_closure
from meshwise.spec.errors import LossError, UsageError
from meshwise.spec.units import plural
from meshwise.transfer import collectives

MOST_IN_A_ROW = 20  # steps that are skipped before the run is held to be lost


def refuse_closures(on_nan: str, optimizer: Optimizer) -> None:
    """Raise UsageError if the optimizer needs a closure and `on_nan` is not `stop`."""
    if on_nan != STOP and needs_closure(optimizer):
        raise UsageError(
            f"--on-nan {on_nan}: {type(optimizer).__name__} changes the parameters several times in a step, so a step "
            "cannot be skipped. Remove --on-nan, or use another optimizer."
        )


class KeptBuffers:
    """Copies of a model's buffers, made before a forward pass in order to restore them after it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: list[tuple[Tensor, Tensor]] = []

    def keep(self) -> None:
        """Copy the current values of the buffers."""
        self._before = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]

    def put_back(self) -> None:
        """Set the model's buffers back to the values that `keep` copied."""
        for buffer, before in self._before:
            buffer.detach().copy_(before)


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Return the gradients of `model` on this rank. A sharded gradient appears as this rank's shard."""
    return [local_of(p.grad) for p in model.parameters() if p.grad is not None]


def any_not_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return a scalar tensor: 1 if any value in `tensors` is infinite or NaN, else 0."""
    bad = [~torch.isfinite(tensor).all() for tensor in tensors if tensor.numel()]
    return torch.stack(bad).any().float() if bad else torch.zeros(())


def agreed(found: Tensor) -> bool:
    """Return True on all ranks if `found` is 1 on at least one rank. Collective."""
    return bool(float(collectives.all_reduce(found, "max", collectives.everyone(), of="whether gradients are finite")))


class SkippedSteps:
    """The check that skips the update of each step with gradients that are not finite, and counts these steps."""

    is_step = True
    """Whether a step still counts in the step number if its update is skipped. Here it does."""

    def __init__(self, model: nn.Module, notify: Callable[[str], None]) -> None:
        self._model, self._notify, self._kept = model, notify, KeptBuffers(model)
        self.count = self.in_a_row = 0

    def step_begins(self) -> None:
        """Copy the model's buffers before the forward pass of a step."""
        self._kept.keep()

    def skips(self, step: int, losses: Losses) -> bool:
        """Return whether to skip this step's update, because a gradient on some rank is not finite. Collective.

        If the update is skipped, the model's buffers are restored. Raises LossError if too many steps in a row are
        skipped.
        """
        device = next(iter(self._model.parameters())).device
        if not agreed(any_not_finite(gradients_of(self._model)).to(device)):
            self.in_a_row = 0
            return False
        self._kept.put_back()
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        if self.in_a_row > MOST_IN_A_ROW:
            raise LossError(
                f"step {step}: the gradients of {MOST_IN_A_ROW} steps in a row are not finite. Resume from an earlier "
                "state with a lower learning rate."
            )
        if self.in_a_row == 1 and collectives.get_rank(collectives.everyone()) == 0:
            self._notify(f"step {step} is skipped: its gradients are not finite.")
        return True

    def note(self) -> str:
        """Return a text for the run's summary that says how many steps were skipped. Return an empty string if no step
        was skipped."""
        skipped = f"{plural(self.count, 'step')} skipped (--on-nan skip): gradients that are not finite"
        return skipped if self.count else ""

"""Recover the value of a loss before a GradScaler scaled it.

Logs and charts should show the loss without the scale.

`GradScaler.scale` is wrapped, because no public API returns the unscaled loss. Based on torch 2.13:
`amp/grad_scaler.py`, whose `scale` returns a new tensor, or the same one if the scaler is disabled.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from meshwise.torch_compat.modules import as_real

_before = WeakTensorKeyDictionary()
SCALED: list[bool] = []
"""Empty until a GradScaler has scaled a loss in this process. While it is empty, `unscaled` need not be called."""


@functools.cache
def note_scaling() -> None:
    """Make `scale` of every GradScaler in this process remember the tensor that it scales, so that `unscaled` can
    return it."""
    scaler: Any = torch.amp.GradScaler
    real = scaler.scale

    @functools.wraps(real)
    def scale(self: Any, outputs: Any) -> Any:
        result = real(self, outputs)
        if isinstance(result, Tensor) and result is not outputs:
            _before[result] = outputs
            SCALED[:] = [True]
        return result

    scaler.scale = scale


class Scaler(torch.amp.GradScaler):
    """A GradScaler that also unscales the gradients of complex parameters. torch's GradScaler skips them."""

    def _unscale_grads_(self, optimizer: Any, *facts: Any) -> Any:
        groups = [{"params": [_real_twin(p) for p in group["params"]]} for group in optimizer.param_groups]
        return super()._unscale_grads_(SimpleNamespace(param_groups=groups), *facts)  # type: ignore[arg-type]


def _real_twin(p: Tensor) -> Tensor:
    """Return a complex parameter viewed as real numbers, with its gradient viewed the same way."""
    if not p.is_complex() or p.grad is None:
        return p
    p.grad, twin = p.grad.resolve_conj(), as_real(p.detach())
    twin.grad = as_real(p.grad)
    return twin


def found_infinite(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> list[Tensor]:
    """Return one tensor for each device. The tensor is above 0 if `scaler.unscale_(optimizer)` has found gradients on
    the device that are not finite. The scaler reads the tensor later to decide whether to step, so a caller can change
    the decision by writing to the tensor."""
    state: Any = scaler._per_optimizer_states[id(optimizer)]
    return list(state["found_inf_per_device"].values())


def always_steps() -> AbstractContextManager[Any]:
    """In the block, make every GradScaler run the optimizer's step without reading whether the gradients are finite."""

    def step(self: Any, optimizer: Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    return patch.object(torch.amp.GradScaler, "_maybe_opt_step", step)


def unscaled(loss: Tensor) -> Tensor:
    """Return the loss as it was before a GradScaler scaled it.
    If it was not scaled, return `loss` itself."""
    before: Tensor = _before.get(loss, loss)
    return before

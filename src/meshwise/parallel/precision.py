"""Precision: what parameters are stored in, what is computed in, and whether the loss is scaled."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.transfer.tree import map_tensors

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def store_parameters(model: nn.Module, precision: str) -> None:
    """Convert the model's floating parameters and buffers, in place, where the precision asks for it."""
    if precision == "fp64":
        model.double()


def computing(device: str, precision: str) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward pass."""
    dtype = _AUTOCAST.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.split(":")[0], dtype)


def cast_batch(batch: Any, precision: str) -> Any:
    """Floating tensors of a batch in the dtype of the parameters."""
    if precision != "fp64":
        return batch

    def cast(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return map_tensors(cast, batch)


def loss_scaler(device: str, precision: str) -> torch.amp.GradScaler:
    """Scales the loss under fp16; passes everything through otherwise."""
    return torch.amp.GradScaler(device.split(":")[0], enabled=precision == "fp16")

"""Move batches to the device ahead of their use.

One batch is copied ahead, through pinned memory, on a side stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshwise.spec.devices import has_streams
from meshwise.torch_compat.tree import map_tensors, tensors_in


def to_device(batch: Any, device: str) -> Any:
    """Move every tensor of `batch` to `device`."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def prefetch(batches: Iterable[tuple[Any, Any]], device: str) -> Iterator[tuple[Any, Any]]:
    """Yield each `(batch, facts)` pair after its batch is moved to `device`. The second item is not changed.

    On an accelerator, the next batch is copied while the current batch is used.
    """
    if device == "cpu":
        return iter(batches)
    if not has_streams(device):
        return ((to_device(batch, device), facts) for batch, facts in batches)
    return _copied_ahead(batches, device)


def _copied_ahead(batches: Iterable[tuple[Any, Any]], device: str) -> Iterator[tuple[Any, Any]]:
    stream = torch.Stream(device)
    ahead: tuple[Any, Any] | None = None
    for batch, facts in batches:
        with stream:
            moved = map_tensors(lambda tensor: _pinned(tensor).to(device, non_blocking=True), batch)
        if ahead is not None:
            yield ahead
        ahead = (_handed_over(moved, stream, device), facts)
    if ahead is not None:
        yield ahead


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if not tensor.is_cpu or tensor.is_pinned() else tensor.pin_memory()


def _handed_over(batch: Any, stream: torch.Stream, device: str) -> Any:
    """Make the device's current stream wait for a batch that was copied on `stream`, and return the batch."""
    current = torch.get_device_module(device).current_stream(device)
    current.wait_stream(stream)
    for tensor in tensors_in(batch):
        tensor.record_stream(current)
    return batch

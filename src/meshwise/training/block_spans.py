"""Spans of the model's blocks, forward and backward, where they are asked for with MESHWISE_BLOCKS or `--blocks`.

The backward of a block goes from when the gradient of its output is there to when that of its input is, or, where no
input needs one, those of its parameters. Hooks on tensors leave the graph as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.parallel.blocks import blocks_of
from meshwise.timeline.record import Mark, current

BLOCKS = "MESHWISE_BLOCKS"


def record_blocks(model: nn.Module) -> None:
    """Record the spans of each block of `model` from now on, if the environment asks for it."""
    if os.environ.get(BLOCKS, "") not in ("", "0"):
        for name, block in blocks_of(model):
            _Block(name, block)


class _Block:
    """The hooks of one block."""

    def __init__(self, name: str, block: nn.Module) -> None:
        self._name = name
        self._began: list[Mark] = []
        self._back: Mark | None = None
        self._parameters = [p for p in block.parameters() if p.requires_grad]
        block.register_forward_pre_hook(lambda *_: self._began.append(current().mark()))
        block.register_forward_hook(self._ended, always_call=True)

    def _ended(self, block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not self._began:
            return
        recorder = current()
        recorder.add(recorder.code("forward", self._name, "blocks"), self._began.pop(), recorder.mark())
        if not recorder.on or not torch.is_grad_enabled():
            return
        gives = next((t for t in _tensors(output) if t.requires_grad and t.grad_fn is not None), None)
        if gives is None:
            return
        gives.register_hook(self._backward_begins)
        takes = [t for t in _tensors(inputs) if t.requires_grad]
        if takes:
            takes[0].register_hook(self._backward_ends)
        elif self._parameters:
            torch.autograd.graph.register_multi_grad_hook(self._parameters, lambda _: self._backward_ends(None))

    def _backward_begins(self, gradient: Tensor) -> None:
        self._back = current().mark()

    def _backward_ends(self, gradient: Tensor | None) -> None:
        if self._back is not None:
            recorder = current()
            recorder.add(recorder.code("backward", self._name, "blocks"), self._back, recorder.mark())
            self._back = None


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value that modules take or give."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _tensors(item)

"""Record forward and backward spans of the model's blocks.

MESHWISE_BLOCKS or `--blocks` asks for these spans.

A block's backward begins at the autograd node that made the block's output, and ends where the next block's backward
begins. If the block's inputs need no gradient, it ends with the gradients of the parameters. The graph is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwise.compat.tree import tensors_in
from meshwise.parallel.blocks import blocks_of
from meshwise.timeline.recorder import Mark, current


def record_blocks(model: nn.Module) -> None:
    """From now on, record a span for each forward and each backward of each block of `model`."""
    backward = _Backward()
    for name, block in blocks_of(model):
        _Block(name, block, backward)


@dataclass
class _Backward:
    """The backward that is running: the name of its block, and the timestamp at which it began."""

    name: str = ""
    began: Mark | None = None

    def turn_to(self, name: str) -> None:
        """End the running backward span, then begin the span of block `name`. An empty name begins no span."""
        recorder = current()
        now = recorder.mark()
        if self.began is not None:
            recorder.add(recorder.code("backward", self.name, "blocks"), self.began, now)
        self.name, self.began = name, now if name else None


class _Block:
    """The hooks that record the forward and backward spans of one block."""

    def __init__(self, name: str, block: nn.Module, backward: _Backward) -> None:
        self._name, self._backward = name, backward
        self._began: list[Mark] = []
        self._parameters = [p for p in block.parameters() if p.requires_grad]
        self._left = 0
        self._is_first = False
        block.register_forward_pre_hook(self._begins)
        block.register_forward_hook(self._ended, always_call=True)

    def _begins(self, block: nn.Module, inputs: Any) -> None:
        self._began.append(current().mark())

    def _ended(self, block: nn.Module, inputs: Any, output: Any) -> None:
        recorder = current()
        recorder.add(recorder.code("forward", self._name, "blocks"), self._began.pop(), recorder.mark())
        if not recorder.on or not torch.is_grad_enabled():
            return
        node = next((t.grad_fn for t in tensors_in(output) if t.grad_fn is not None), None)
        if node is None:
            return
        node.register_prehook(self._backward_begins)
        if not self._is_first and not any(t.requires_grad for t in tensors_in(inputs)):
            self._is_first = True
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._parameter_done)

    def _backward_begins(self, gradients: Any) -> None:
        self._left = len(self._parameters)
        self._backward.turn_to(self._name)

    def _parameter_done(self, parameter: Tensor) -> None:
        self._left -= 1
        if self._left == 0 and self._backward.name == self._name:
            self._backward.turn_to("")

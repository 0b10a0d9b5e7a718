"""What the graph of a loss tells of it: whether it is a sum over samples.

Nodes keep what they were made with as `_saved_…`, which is not public. Read in torch 2.13:
`tools/autograd/derivatives.yaml`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

SUM = 2  # aten/src/ATen/core/Reduction.h
KNOWN = {
    "NllLossBackward0": "cross entropy",
    "NllLoss2DBackward0": "cross entropy",
    "MseLossBackward0": "mean squared error",
    "SmoothL1LossBackward0": "smooth L1",
    "HuberLossBackward0": "Huber loss",
    "BinaryCrossEntropyBackward0": "binary cross entropy",
    "BinaryCrossEntropyWithLogitsBackward0": "binary cross entropy",
}
"""Losses whose node keeps its reduction."""
OF_ROWS = {"AbsBackward0": "an L1 loss", "CtcLossBackward0": "a CTC loss"}
"""Losses that are a sum over what these nodes give."""


def summed_loss(loss: Tensor) -> str:
    """Which known loss `loss` is a sum of, without a division behind it; empty where the graph does not tell.

    Terms that are added are looked at one by one: one that is a sum makes the whole depend on the number of samples.
    """
    open_nodes: list[Any] = [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        kind = "" if node is None else node.name()
        if kind in KNOWN and getattr(node, "_saved_reduction", None) == SUM:
            return KNOWN[kind]
        if kind in ("AddBackward0", "SubBackward0"):
            open_nodes += [following for following, _ in node.next_functions]
        elif kind == "SumBackward0":
            below = node.next_functions[0][0]
            if below is not None and below.name() in OF_ROWS:
                return OF_ROWS[below.name()]
    return ""

"""Detect a loss that couples a batch's samples, such as dice.

If a loss is a mean or sum of one separate term per sample, its second derivative with respect to two different samples
is zero. This module computes that second derivative. It differentiates with respect to the nearest tensors below the
loss that have one row per sample and were made by a product with a parameter or by a custom autograd function.
A loss that selects the hardest samples cannot be found in this way, since a selection has no derivative. It is
recognized by its sort or top-k operator.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from meshwise.training.autograd.loss_graph import KNOWN, LEAF, PRODUCTS, VIEWS, below_of, is_parameter, signed

MOST_NODES, MOST_ELEMENTS = 5_000, 2**24
FAR = 1e-5  # cross-sample second derivatives below this fraction of same-sample ones count as 0
WITH_PARAMETERS = (*PRODUCTS, "BmmBackward0", "BaddbmmBackward0", "NativeLayerNormBackward0",
                   "NativeGroupNormBackward0", "NativeBatchNormBackward0", "CudnnBatchNormBackward0")  # fmt: skip
CHOICES = {"TopkBackward0", "SortBackward0", "KthvalueBackward0", "MaxBackward0", "MinBackward0", "MedianBackward1",
           "AmaxBackward0", "AminBackward0", "MaxBackward1", "MinBackward1", "MedianBackward0"}  # fmt: skip
"""Operators that select elements by size, along a dim (e.g. MaxBackward0) or among all elements (e.g. MaxBackward1)."""
SEPARATE = {*KNOWN, "AddBackward0", "SubBackward0", "NegBackward0", "MeanBackward0", "SumBackward0",
            "LogSoftmaxBackward0", *VIEWS}  # fmt: skip
"""Operators that keep samples independent of each other, except for a LogSoftmax over the dim of the samples."""
MIXED = "a choice among samples"
HOOKS = "meshwise's hooks"  # the key, in a graph node's metadata, of the gradient hooks of its results


def couples_samples(loss: Tensor, samples: int) -> bool:
    """Return whether a loss combines samples, so that it is no mean or sum of one term per sample."""
    if samples < 2 or not loss.requires_grad or loss.grad_fn is None or loss.numel() != 1:
        return False
    if (found := _between(loss.grad_fn, samples)) is None:
        return False
    kinds, rows, hooks = found
    if MIXED in kinds:
        return True
    elements = sum(math.prod(_shape(*row)) for row in rows)
    if kinds <= SEPARATE or not rows or elements > MOST_ELEMENTS or None in hooks:
        return False
    try:
        with contextlib.ExitStack() as quiet:  # no hook of the program runs, and none that gathers a sharded parameter
            for each in hooks:
                quiet.enter_context(patch.dict(each, clear=True))
            return _are_coupled(loss, rows)
    except RuntimeError:  # there is no second derivative, or memory ran out
        return False


def _between(first: Any, samples: int) -> tuple[set[str], list[tuple[Any, int]], list[Any]] | None:
    """Return (kinds of operators, outputs, hooks) from a loss to the model's outputs; None for too many nodes."""
    open_nodes, seen, rows = [(first, 0)], {(first, 0)}, []
    kinds: set[str] = set()
    while open_nodes:
        node, number = open_nodes.pop()
        kind = node.name()
        if kind == LEAF:
            continue
        output, shape = _is_output(node), _shape(node, number)
        if output and shape and shape[0] == samples:
            rows.append((node, number))
            continue
        if output and kind not in VIEWS:  # the output's rows are not samples but, for example, tokens
            continue
        over_samples = kind == "LogSoftmaxBackward0" and signed(node._saved_dim) % len(shape) == 0
        kinds.add(MIXED if _mixes_samples(node, kind, samples) else "softmax over samples" if over_samples else kind)
        new = [edge for edge in node.next_functions if edge[0] is not None and edge not in seen]
        seen.update(new)
        open_nodes += new
        if len(seen) > MOST_NODES:
            return None
    return kinds, rows, [each for node, _ in seen for each in node.metadata.get(HOOKS, ())]


def _shape(node: Any, number: int = 0) -> tuple[int, ...]:
    return tuple(node._input_metadata[number].shape)


def _is_output(node: Any) -> bool:
    """Return whether the result of a node comes from a layer of the model, or from a custom autograd function."""
    kind, below = node.name(), below_of(node)
    while below and (kind in VIEWS or (kind == "AddBackward0" and len(below) == 2 and any(map(is_parameter, below)))):
        node = below[-1] if is_parameter(below[0]) and kind not in VIEWS else below[0]
        kind, below = node.name(), below_of(node)
    if isinstance(node, BackwardCFunction) or "Convolution" in kind or "Rnn" in kind or kind == "EmbeddingBackward0":
        return True
    return kind in WITH_PARAMETERS and any(map(is_parameter, below))


def _mixes_samples(node: Any, kind: str, samples: int) -> bool:
    """Return whether a node sorts samples, selects the largest or smallest values among several samples, or computes
    the distances between them (`torch.cdist`)."""
    below = below_of(node)
    if "CdistBackward" in kind and not any(map(is_parameter, below)):
        return all(size % samples == 0 for size in _shape(node)[-2:])
    if kind not in CHOICES or not below:
        return False
    shape, dim = _shape(*node.next_functions[0]), getattr(node, "_saved_dim", ())
    dims = [signed(number) % len(shape) for number in (dim if isinstance(dim, tuple) else (dim,))] if shape else [-1]
    return (not dims or 0 in dims) and shape[0] % samples == 0


@functools.cache
def notice_hooks() -> None:
    """From now on, note in the graph which results have gradient hooks. The graph keeps them longer than tensors."""
    for name in ("register_hook", "retain_grad"):
        setattr(Tensor, name, _noticed(getattr(Tensor, name)))


def _noticed(method: Any) -> Any:
    @functools.wraps(method)
    def noticed(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = method(tensor, *args, **kwargs)
        if (node := cast(Any, tensor.grad_fn)) is not None:
            node.metadata.setdefault(HOOKS, []).append(None if tensor.retains_grad else tensor._backward_hooks)
        return made

    return noticed


def _are_coupled(loss: Tensor, rows: list[tuple[Any, int]]) -> bool:
    """Return whether a change of samples with even index changes gradients of samples with odd index."""
    edges = [GradientEdge(node, number) for node, number in rows]
    first = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
    used = [(edge, got) for edge, got in zip(edges, first, strict=True) if got is not None and got.requires_grad]
    if not used:
        return False
    changed = sum((got[::2] * _uneven(got[::2])).sum() for _, got in used)
    second = torch.autograd.grad(changed, [edge for edge, _ in used], retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
    of_own, of_others = ([got[begin::2].abs().max().double() for got in second if got is not None] for begin in (0, 1))
    if not of_own:
        return False
    own, others = (float(torch.stack(sizes).max()) for sizes in (of_own, of_others))
    return math.isfinite(own) and math.isfinite(others) and others > FAR * own


def _uneven(like: Tensor) -> Tensor:
    """Return fixed weights between 1 and 2, with the shape and dtype of `like`."""
    return 1 + (torch.arange(like.numel(), device=like.device) * 0.618034 % 1).to(like.dtype).view_as(like)

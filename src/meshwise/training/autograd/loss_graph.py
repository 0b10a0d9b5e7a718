"""Detect sums over samples and penalties in a loss's graph.

The functions read the autograd graph: the operators that led to the loss, and the values that these operators saved.

Autograd nodes keep operands and arguments in attributes named `_saved_…`, which are not public. The names used here
come from torch 2.13 (`tools/autograd/derivatives.yaml`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshwise.torch_compat.dispatch import without_interception

NONE, MEAN, SUM = 0, 1, 2  # values as in aten/src/ATen/core/Reduction.h
KNOWN = {
    "NllLossBackward0": "cross entropy",
    "NllLoss2DBackward0": "cross entropy",
    "MseLossBackward0": "mean squared error",
    "SmoothL1LossBackward0": "smooth L1",
    "HuberLossBackward0": "Huber loss",
    "BinaryCrossEntropyBackward0": "binary cross entropy",
    "BinaryCrossEntropyWithLogitsBackward0": "binary cross entropy",
}
"""Autograd nodes of losses that store their reduction, each with the name of its loss."""

SUMS = ("AddBackward0", "SubBackward0")
FACTORS = ("MulBackward0", "DivBackward0")
OF_EACH = {"PowBackward0", "AbsBackward0", "NegBackward0", "LogBackward0", "SumBackward1", "ToCopyBackward0",
           "ViewBackward0", "UnsafeViewBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0",
           "IndexBackward0", "GatherBackward0", *SUMS}  # fmt: skip
"""Operators that compute each sample separately. Products are not listed: a factor may be 1 / (number of samples)."""
PICKS = ("IndexBackward0", "MaskedSelectBackward0")
OF_ROWS = {"SigmoidBackward0", "TanhBackward0", "ReluBackward0", "SoftmaxBackward0", "LogSoftmaxBackward0",
           "ConvolutionBackward0", "CtcLossBackward0"}  # fmt: skip
"""Operators at the end of a model that return one row per sample. PRODUCTS with a parameter also return such rows."""
PRODUCTS = ("AddmmBackward0", "MmBackward0", "MvBackward0")
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "TransposeBackward0", "PermuteBackward0", "TBackward0",
         "ToCopyBackward0", "SqueezeBackward1", "UnsqueezeBackward0")  # fmt: skip
LEAF = "torch::autograd::AccumulateGrad"


def summed_loss(loss: Tensor) -> str:
    """Return the name of a loss that `loss` sums over samples without dividing by their number, or ""."""
    for node, following in _walk(loss.grad_fn):
        kind, below = node.name(), below_of(node)
        if kind in KNOWN and getattr(node, "_saved_reduction", None) == SUM:
            if any(map(reads_data, below)):
                return f"{KNOWN[kind]}, reduction='sum'"
        elif kind in (*SUMS, "NegBackward0"):
            following += below
        elif kind in ("SumBackward0", "SumBackward1") and (what := _of_each(below[0])) and reads_data(node):
            return f"{what} of each sample, then .sum()"
    return ""


def _walk(node: Any) -> Iterator[tuple[Any, deque[Any]]]:
    """Yield (node, queue) breadth-first from `node`. The caller adds the next nodes to the queue."""
    open_nodes, seen = deque([node]), {None}
    while open_nodes:
        node = open_nodes.popleft()
        if node not in seen:
            seen.add(node)
            yield node, open_nodes


def below_of(node: Any) -> list[Any]:
    """Return the nodes whose results are inputs of a node."""
    return [each for each, _ in node.next_functions if each is not None]


def _of_each(elements: Any) -> str:
    """Return the name of the loss that `elements`, a graph node, computes for each sample, or ""."""
    what = "a loss"
    for node, following in _walk(elements):
        kind, below = node.name(), below_of(node)
        if kind in KNOWN and getattr(node, "_saved_reduction", None) in (NONE, SUM):
            what = KNOWN[kind]
        elif kind in OF_EACH or _is_of_each(node, kind):
            following += below
        elif kind not in OF_ROWS and not (kind in PRODUCTS and any(map(is_parameter, below))):
            return ""
    return what


def _is_of_each(node: Any, kind: str) -> bool:
    """Return whether a node is a logsumexp or a product that computes each sample separately."""
    if kind == "LogsumexpBackward0":
        return 0 not in node._saved_dim and node._saved_self.dim() > 1
    return kind == "MulBackward0" and _divides_not(node)


def _divides_not(product: Any) -> bool:
    """Return whether a product has a constant factor of whole numbers, unlike 1 / (number of samples)."""
    factor = _constant(product)
    if factor is None or factor.is_complex():
        return False
    return bool((factor == factor.round()).all()) if factor.is_floating_point() else True


def _constant(node: Any) -> Tensor | None:
    """Return the operand of a product or quotient that needs no gradient, or None."""
    (left, _), (right, _) = node.next_functions
    return node._saved_self if left is None else node._saved_other if right is None else None


def is_parameter(node: Any) -> bool:
    """Return whether a node belongs to a leaf tensor, or to a view of one."""
    while node.name() in VIEWS and (below := below_of(node)):
        node = below[0]
    return bool(node.name() == LEAF)


def reads_data(term: Any) -> bool:
    """Return whether `term`, a graph node, depends on data. A penalty depends only on parameters and plain numbers."""
    for node, following in _walk(term):
        kind, constant = node.name(), any(each is None for each, _ in node.next_functions)
        number = _constant(node) if constant and kind in FACTORS else None
        beside = kind in SUMS or kind in KNOWN or (number is not None and number.numel() == 1)
        if kind == "EmbeddingBackward0" or (constant and not beside):
            return True
        following += below_of(node)
    return False


def uneven_mean(loss: Tensor, samples: int) -> str:
    """Return the source text of the `weight` to pass to `mw.backward` for a loss that is a mean over items such as
    tokens: "…" if the text is unknown, "" if the loss needs no weight."""
    for node, following in _walk(loss.grad_fn):
        kind = node.name()
        if kind.startswith("NllLoss") and getattr(node, "_saved_reduction", None) == MEAN:
            weights, ignored = node._saved_weight, node._saved_ignore_index
            if weights is not None and weights.min() != weights.max():
                return "class_weights[y].sum()"
            counted = float(node._saved_total_weight)
            if weights is None and counted % max(samples, 1) and node._saved_target.numel() >= samples:
                return f"(y != {signed(ignored)}).sum()" if counted < node._saved_target.numel() else "y.numel()"
        # A sum that is divided by a number of items: a number above 1 that is not a multiple of `samples`.
        if kind == "DivBackward0" and any(float(n) > 1 and float(n) % max(samples, 1) for n in _divisor(node)):
            return "…"
        if (kind in KNOWN or kind == "MeanBackward0") and _is_mean_of_some(node, samples):
            return "…"
        if kind in SUMS or kind in FACTORS or kind == "MulBackward1":
            following += below_of(node)
    return ""


def cross_entropy_means(loss: Tensor) -> list[tuple[Tensor, int, bool]]:
    """Return (total weight, number of targets, whether classes have weights) for each mean cross entropy in `loss`.

    The total weight is the number by which the mean was divided. It is a tensor, and its value is not read here.
    """
    found = []
    for node, following in _walk(loss.grad_fn):
        kind = node.name()
        if kind.startswith("NllLoss") and getattr(node, "_saved_reduction", None) == MEAN:
            found.append((node._saved_total_weight, node._saved_target.numel(), node._saved_weight is not None))
        elif kind in SUMS or kind in FACTORS or kind in ("MulBackward1", "ToCopyBackward0", "ViewBackward0"):
            following += below_of(node)
    return found


def is_of_items(loss: Tensor, rows: int) -> bool:
    """Return whether `loss` has a mean cross entropy over something other than rows: the cross entropy has class
    weights, or its number of targets is not `rows`."""
    return any(targets != rows or weighed for _, targets, weighed in cross_entropy_means(loss))


def signed(number: int) -> int:
    """Convert an unsigned 64-bit number, as autograd nodes store it, back to the signed number."""
    return number - 2**64 if number >= 2**63 else number


def _divisor(node: Any) -> list[Tensor]:
    """Return [divisor] if `node` divides the sum of a tensor by a number, otherwise []."""
    above, below = (each for each, _ in node.next_functions)
    is_sum, number = above is not None and above.name() == "SumBackward0" and below is None, node._saved_other
    return [number] if is_sum and number is not None and number.numel() == 1 else []


def count_of_sum(loss: Tensor) -> list[Tensor]:
    """Return the number by which `loss` was divided in its last operator, as a list of one tensor. Reads no values.

    The list is empty if the last operator is not the division of a sum by a number.
    """
    node = loss.grad_fn
    return _divisor(node) if node is not None and node.name() == "DivBackward0" else []


def _is_mean_of_some(node: Any, samples: int) -> bool:
    """Return whether `node` is a mean over indexed or masked data, with a number of elements that is not a multiple of
    `samples`."""
    below, number = node.next_functions[0]
    of = () if below is None else tuple(below._input_metadata[number].shape)
    if getattr(node, "_saved_reduction", MEAN) != MEAN or math.prod(of) % max(samples, 1) == 0:
        return False
    for each, following in _walk(below):
        if each.name() in PICKS:
            return any(map(reads_data, below_of(each)))
        if each.name() in OF_EACH or each.name() in FACTORS:
            following += below_of(each)
    return False


def next_node() -> int:
    """Return the sequence number of this thread's next autograd node."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def node_under_way() -> int | None:
    """Return the sequence number of the autograd node that runs now in a backward. Returns None outside of a
    backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def scale_of(loss: Tensor) -> float:
    """Return the factor by which the program has scaled a loss to get `loss`, e.g. 1/16 for `loss / 4 / 4`.

    Only multiplications and divisions by plain numbers at the end of the computation count.
    """
    node, scale = loss.grad_fn, 1.0
    while node is not None and node.name() in FACTORS:
        number, divides = _constant(node), node.name() == "DivBackward0"
        if number is None or number.numel() != 1 or (divides and node.next_functions[0][0] is None):
            break
        with without_interception():  # observers of the program must not see this read of the factor
            scale = scale / float(number) if divides else scale * float(number)
        node = below_of(node)[0]
    return scale

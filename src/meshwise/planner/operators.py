"""Classify an operator's work and find its matrix product.

Both are determined from the operator's name and shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from meshwise.planner.work import Operation

WIDTHS = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
"""The bytes of an element of each dtype."""
MATMULS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "linear", "linear_backward", "mv", "addmv", "dot"}
MATMULS |= {"_scaled_mm", "_int_mm", "_grouped_mm", "_addmm_activation", "_scaled_grouped_mm", "addr", "ger", "einsum"}
RECURRENT = ("_rnn", "lstm_layer", "lstm_mps", "rnn_layer")
GATHERS = (
    *("embedding", "index", "gather", "scatter", "take", "masked_select", "nonzero", "sort", "topk", "unique"),
    *("grid_sampler", "upsample", "searchsorted", "roll", "flip", "histc", "bincount"),
)
REDUCTIONS = {
    *("softmax", "norm", "sum", "mean", "var", "std", "amax", "amin", "max", "min", "argmax", "argmin", "prod"),
    *("cumsum", "cumprod", "logsumexp", "any", "all", "pool"),
}


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of matrix products, each (m × k) by (k × n)."""

    batch: int
    m: int
    n: int
    k: int
    misaligned: bool = False

    @property
    def flops(self) -> int:
        """The number of floating-point operations. A multiplication and an addition count as two."""
        return 2 * self.batch * self.m * self.n * self.k


@lru_cache(maxsize=4_096)
def _sort_of_name(name: str) -> str:
    bare = name.split("::")[-1].split(".")
    word = bare[1] if len(bare) > 1 and bare[0] in ("aten", "torch", "mkldnn", "prims", "c10d") else bare[0]
    if word.startswith(("_foreach", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_multi_tensor")):
        return "optimizer"
    if "attention" in word:
        return "attention"
    if "convolution" in word or word.startswith(("conv1d", "conv2d", "conv3d", "slow_conv")):
        return "convolution"
    if word in MATMULS or word.startswith(("mkldnn_linear", "_mkl_linear")):
        return "matmul"
    if any(part in word for part in RECURRENT):
        return "recurrent"
    if any(part in word for part in GATHERS):
        return "gather"
    if "batch_norm" in word:
        return "batch-norm"
    if word == "native_dropout":
        return "dropout"
    parts = word.strip("_").split("_")
    return (
        "reduction" if any(part in REDUCTIONS or part.startswith(("pool", "norm")) for part in parts) else "elementwise"
    )


def sort_of(operation: Operation) -> str:
    """Return the kind of work that an operator does."""
    sort = _sort_of_name(operation.name)
    if sort == "convolution":
        weight = _convolution_weight(operation)
        return "depthwise" if weight is not None and weight[1] == 1 and weight[0] > 1 else sort
    if sort == "elementwise" and operation.flops > 4 * (operation.read + operation.written):
        return "matmul"
    return sort


def product_of(operation: Operation) -> Product | None:
    """Return the matrix product that an operator computes, or None if there is none or its shape is unknown."""
    sort = _sort_of_name(operation.name)
    if sort == "convolution":
        return _of_convolution(operation)
    if sort != "matmul":
        return None
    word = operation.name.split("::")[-1].removeprefix("aten.").split(".")[0]
    shapes = [shape for shape in operation.shapes if shape]
    if word in ("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation") and len(shapes) > 2:
        shapes = shapes[1:]
    if len(shapes) < 2:
        return None
    left, right = shapes[:2]
    found = _of_two(word, left, right)
    if found is None or (operation.flops and abs(found.flops / operation.flops - 1) > 0.01):
        return None
    width = WIDTHS.get(operation.dtypes[0], 4) if operation.dtypes else 4
    off = any(side * width % 16 for side in (found.m, found.n, found.k) if side > 1)
    return Product(found.batch, found.m, found.n, found.k, off)


def _of_two(word: str, left: tuple[int, ...], right: tuple[int, ...]) -> Product | None:
    if word == "linear" and len(right) == 2:
        return Product(1, math.prod(left[:-1]), right[0], right[1])
    if word == "_grouped_mm" and len(left) == 2 and len(right) == 3:
        return Product(right[0], max(left[0] // right[0], 1), right[2], right[1])
    if len(left) == len(right) == 2 and left[1] == right[0]:
        return Product(1, left[0], right[1], left[1])
    if len(left) == len(right) == 3 and left[2] == right[1]:
        return Product(left[0], left[1], right[2], left[2])
    if len(left) == 2 and len(right) == 1:
        return Product(1, left[0], 1, left[1])
    return None


def _convolution_weight(operation: Operation) -> tuple[int, ...] | None:
    """Return the shape of a convolution's weight: output channels, input channels of a group, kernel."""
    shapes = [shape for shape in operation.shapes if len(shape) >= 3]
    place = 2 if "backward" in operation.name else 1
    return shapes[place] if len(shapes) > place else None


def _of_convolution(operation: Operation) -> Product | None:
    """Return a convolution as the product of (output pixels × kernel inputs) by (kernel inputs × output channels)."""
    weight = _convolution_weight(operation)
    if weight is None or not operation.flops:
        return None
    shapes = [shape for shape in operation.shapes if len(shape) >= 3]
    inputs = shapes[1 if "backward" in operation.name else 0]
    groups = max(inputs[1] // max(weight[1], 1), 1)
    k, n = math.prod(weight[1:]), max(weight[0] // groups, 1)
    m = round(operation.flops / (2 * groups * k * n))
    return Product(groups, max(m, 1), n, k)

"""Compute the grouped product of experts in float64.

torch's own operator does not support it.

`torch.nn.functional.grouped_mm` multiplies each group of rows with its own matrix. `offs` holds the end of each group;
rows after the last group are zero in the result here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def grouped_product(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Compute what `aten._grouped_mm` returns for these arguments.

    Shapes: (rows, k) x (groups, k, n) -> (rows, n) groups rows; (m, k) x (k, n) -> (groups, m, n) groups k; (groups, m,
    k) x (k, columns) -> (m, columns) groups columns. Without `offs`: an ordinary batched product.
    """
    if offs is None:
        product = left @ right
    else:
        ends = list(pairwise([0, *offs.tolist()]))
        if left.dim() == right.dim():
            product = torch.stack([left[:, a:b] @ right[a:b] for a, b in ends])
        elif left.dim() == 2:
            product = left.new_zeros(len(left), right.shape[-1])
            for group, (a, b) in enumerate(ends):
                product[a:b] = left[a:b] @ right[group]
        else:
            product = right.new_zeros(left.shape[1], right.shape[1])
            for group, (a, b) in enumerate(ends):
                product[:, a:b] = left[group] @ right[:, a:b]
    return product if bias is None else product + bias

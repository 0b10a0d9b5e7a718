"""Read the factor that a loss was finally multiplied by.

Tested in tests/equivalence/test_plain_scripts.py.
"""

from __future__ import annotations

from torch import Tensor

from meshwise.autograd.loss_graph import FACTORS
from meshwise.compat.dispatch import without_interception


def scale_of(loss: Tensor) -> float:
    """Return the factor by which the program has scaled a loss to get `loss`, e.g. 1/16 for `loss / 4 / 4`.

    Only multiplications and divisions by plain numbers at the end of the computation count.
    """
    node, scale = loss.grad_fn, 1.0
    while node is not None and node.name() in FACTORS:
        above = [each for each, _ in node.next_functions]
        if above.count(None) != 1:
            break
        number = node._saved_other if above[1] is None else node._saved_self  # type: ignore[attr-defined]
        if number is None or number.numel() != 1 or (node.name() == "DivBackward0" and above[0] is None):
            break
        with without_interception():  # which would be given a plain number
            by = float(number)
        scale = scale / by if node.name() == "DivBackward0" else scale * by
        node = above[0] or above[1]
    return scale

"""Compare boxes of a tensor: a (begin, end) for each dim.

This module does not import torch.
Tested in tests/recovery/test_layout.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Box = tuple[tuple[int, int], ...]


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(end - begin for begin, end in box)


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """Choose boxes that do not overlap. The boxes are considered from the largest to the smallest, and the result is in
    this order. A box that overlaps a box that was chosen before is left out."""
    chosen: list[Box] = []
    for box in sorted(boxes, key=lambda box: (-volume(box), box)):
        if volume(box) and not any(_overlap(box, other) for other in chosen):
            chosen.append(box)
    return chosen


def cover(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Return whether disjoint boxes cover a whole tensor of this shape."""
    return sum(map(volume, boxes)) == math.prod(shape)


def _overlap(one: Box, other: Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))
